// How a product of floats is divided: which codes are decoded at a time, in which order, and with which method.
//
// A row of the weight is taken a segment (64 bytes) at a time. The codes of a segment are decoded in the order in which
// shifts yield them, not in the logical one: with fewer than 8 bits vector `(h, plane, c)` holds, in lane `j`, the code
// of byte `4 L h + 4 j + c` in that plane. `x` is permuted to that order once per call instead. A last, shorter segment
// is padded with zero bytes; the padding decodes to zero and meets zeros of `x`. With several rows of `x` its codes are
// brought to their logical order, without the padding.
#pragma once

#include <stdint.h>
#include <string.h>

#include "core/ints.h"
#include "core/isa.h"

namespace {

constexpr int64_t kSegment = 64;       // bytes
constexpr int64_t kChunk = 512;        // codes of a row, decoded at a time by tiles
constexpr int64_t kChunkStride = 528;  // floats from one decoded row to the next: a power of two would share sets of L1
constexpr int64_t kRowChunk = 64;      // rows of the weight, decoded at a time by transposed products
constexpr int64_t kRowChunkStride = 80;
constexpr int64_t kScaleChunk = 4096;   // codes of a row, whose scales are decoded at a time: a multiple of `kChunk`
constexpr int64_t kAheadOfDots = 8192;  // bytes of the weight: memory takes as long as groups of short rows
constexpr int64_t kFewBlock = 16;       // rows of the weight for which a piece of few rows of `x` stays in L1
constexpr int64_t kFewFloats = 8192;    // of that piece
constexpr int64_t kMostDots = 64;       // rows of the weight in a unit of one row of `x`
constexpr int64_t kShortRow = 2;        // segments of a row of which what happens once for each row takes longest
constexpr int64_t kMostRows = 48;       // of the weight in a unit of many rows of `x`: decoded codes stay in L2
constexpr int64_t kRowBlock = 256;      // rows of `x` for which a decoded tile is used

// Which codes of a segment share a scale.
enum Mode {
  kOneScale,  // all of a row
  kUniform,   // a scale per vector: blocks of multiples of 64, or of 16 where codes have 8 bits
  kBy32,      // of a plane, runs of 32 and of 16; with 8 bits likewise
  kBy16,
  kAnyBlock  // found by an index for each code
};

// How many scales a plane has.
constexpr int per_plane(Mode mode) { return mode == kBy16 ? 4 : mode == kBy32 ? 2 : 1; }

enum Method { kDot = 0, kFew = 1, kPanels = 2, kTransposed = 3, kMix = 4 };

EQQ_INLINE int64_t aligned(int64_t bytes) { return round_up(bytes, 64); }

// Properties of a problem.
struct Shape {
  int64_t planes, codes;    // of a segment: codes that share a byte, and all of them
  int64_t segments, whole;  // of a row, and the whole ones
  int64_t tail_bytes;       // of the last segment if it is cut short
  int64_t tail;             // floats of the last segment if it is cut short, once it is decoded
  int64_t padded;           // floats of a row: in whole segments and the last one
  Mode mode;                // of whole segments
  int64_t grain;            // codes for which there is one scale, once they are expanded: 64, 32 or 16
};

// `direct`: up to how many rows of `x` codes are taken in the order of decoding to their end.
EQQ_INLINE Shape shape_of(const Problem& p, int64_t direct) {
  Shape s;
  s.planes = 8 / p.bits;
  s.codes = kSegment * s.planes;
  s.whole = p.k / s.codes;
  s.tail_bytes = packed_bytes(p.k, p.bits) - s.whole * kSegment;
  s.segments = s.whole + (s.tail_bytes > 0);
  s.grain = 64;
  if (p.blocks <= 1) {
    s.mode = kOneScale;
  } else if (p.block_size % 64 == 0) {
    s.mode = kUniform;
  } else if (p.block_size == 32 || (p.bits == 8 && p.block_size % 32 == 0)) {
    s.mode = kBy32;
    s.grain = 32;
  } else if (p.block_size == 16 || (p.bits == 8 && p.block_size % 16 == 0)) {
    s.mode = kBy16;
    s.grain = 16;
  } else {
    s.mode = kAnyBlock;
  }
  // With more rows, multiplying padding would cost more than bringing the codes of the tail to their order.
  const bool in_order = !p.transpose && p.m > (s.mode == kAnyBlock ? 1 : direct);
  s.tail = in_order ? min64(div_up(p.k - s.whole * s.codes, 16) * 16, s.codes) : s.codes;
  s.padded = s.whole * s.codes + (s.segments - s.whole) * s.tail;
  return s;
}

// Shared memory: a table of 256 floats, the bytes of these where `V` looks up bytes, low ones first, where each code of
// a segment is (the same in every row), and packed `x`.
struct Shared {
  // Of whole segments in `kAnyBlock`, and then of the last one: the block of each code in the order of decoding, less
  // the first of the segment; and whether it is a code, not padding.
  int32_t* index;
  int32_t* mask;
  int32_t* place;  // of each code of the last segment, in the order of decoding
  float* x;
};

// How a product is divided, and where its parts are in memory.
struct FloatDetail {
  int64_t method;
  int64_t rows;        // of the weight in a unit; of `kTransposed` segments
  int64_t chunks;      // units along the weight
  int64_t row_blocks;  // units along the rows of `x`
  int64_t x_batch;     // packed floats of one batch
  int64_t m_padded;    // rows of packed `x`, or with panels their lanes
  int64_t scales;      // where in the scratch memory of a thread scales are decoded, and results summed
  int64_t sums;
  int64_t x_parts;   // parts of the preparation of one batch
  int64_t x_row;     // floats from one row of packed `x` to the next, but with panels
  int64_t few_step;  // with `kFew`: segments at a time
};

EQQ_INLINE int64_t scale_segments(const Shape& s) { return kScaleChunk / s.codes; }

EQQ_INLINE int64_t chunk_segments(const Shape& s) { return kChunk / s.codes; }

// Floats of decoded segments.
EQQ_INLINE int64_t span(const Shape& s, int64_t first, int64_t last) {
  return min64(last * s.codes, s.padded) - first * s.codes;
}

// Pieces of rows that lie so far apart fill all sets of a cache alike.
EQQ_INLINE int64_t few_row(const Shape& s) { return s.padded < 1024 ? s.padded : (s.padded + 767) / 1024 * 1024 + 256; }

}  // namespace
