// How a product of integers is divided, and where its parts are in memory.
#pragma once

#include "core/runs.h"
#include "core/tail.h"
#include "int8/int8.h"

namespace {

constexpr int64_t kUnitRows = 48;       // of the weight in a unit, at most
constexpr int64_t kInt8RowBlock = 256;  // rows of `x` for which decoded rows are used
constexpr int64_t kAhead = 2048;        // bytes ahead to prefetch to L1, of one row of the weight
constexpr int64_t kNear = 4096;         // bytes ahead that have room in L1
constexpr int64_t kFar = 8192;          // bytes ahead to prefetch to L2
constexpr int64_t kLargeRun = 512;      // codes of a run, from which on its lanes are added up as integers

constexpr int64_t kRunRoom = kStep / 16 + 16;

enum Int8Method { kFewMethod = 0, kPanelMethod = 1 };

struct Int8Detail {
  int64_t method;
  int64_t rows, chunks, row_blocks;
  int64_t m_padded;
  int64_t panels;                        // parts of the preparation of one batch
  int64_t sums, lanes, x;                // where they are in shared memory: sums of runs, of lanes, and codes
  int64_t tail;                          // likewise x for a partial last segment in registers, or 0
  int64_t scale_at, partial_at, sum_at;  // likewise in the memory of a thread
};

// Codes of a row of packed `x`.
EQQ_INLINE int64_t row_codes(const Runs& r) { return round_up(max64(r.padded, 1), 64); }
EQQ_INLINE bool by_lanes(const Runs& r) { return r.size < kLargeRun && r.count > 1; }

// What `kPacks` announces: `pack_avx512.h`.
template <class V>
struct Int8Pack;

}  // namespace
