// Many rows of floats on AMX: how a product is divided, and the layout of shared memory.
#pragma once

#include "amx/amx.h"
#include "float/slice_panels.h"

namespace {

constexpr int64_t kTile = 1024;      // bytes
constexpr int64_t kPiece = 256;      // of them that are decoded at a time: they stay in L1
constexpr int64_t kMostPiece = 512;  // of one slice, of whole rows, or of a segment of single bits
constexpr int64_t kSteps = kSpan / 64;
constexpr int64_t kMostBlocks = 80;  // of a chunk, and room to write more
constexpr int64_t kUnitRows = 512;   // of the weight in a unit, at most
constexpr int64_t kFewest = 5;       // rows of x that are worth a tile: with many scales more
constexpr int64_t kFewestOfMany = 8;
constexpr int64_t kTables = 1024;  // bytes of tables at the start of shared memory
constexpr int kSlices = 3;         // of a weight that is not of integers with one scale for a row

// How codes become slices.
enum Kind {
  kDirect,          // they are slices where they lie
  kPlain,           // through a table of bytes: one slice
  kScaled,          // fewer than eight bits: through a table for each block
  kLookUp,          // eight bits: through a table of 256 for each slice
  kScaledIntegers,  // eight bits: signed bytes times the scale of a block
  kFloats           // through floats
};

struct Detail {
  int64_t kind, w_slices;
  int64_t rows, chunks;        // of the weight in a unit, and units that they make
  int64_t panels, row_blocks;  // of x, and how many units they make
  int64_t parts;               // chunks of a row of codes
  int64_t together;            // tiles of rows that meet some x in turn
  int64_t packed;              // bytes of a panel of x
  int64_t spare;               // bytes for what AVX-512 multiplies
};

// Where the blocks of a chunk of a row are: the first, how many, and which has each 16 codes.
struct alignas(64) Place {
  int64_t first, count;
  int block[kSpan / 16];
};

// Of slices of x.
struct Sums {
  int32_t all[4][16];
  int32_t start[4][16];  // what results begin with, since slices of the weight have no sign
};

// Properties of a chunk of a panel.
struct alignas(64) Head {
  int64_t slices;               // of its numbers; 0 if they must not be slices
  alignas(64) float scale[16];  // of a row
  Sums chunk, pieces[kSpan / kPiece];
};

constexpr float kRangeOfW = 0x1p96f;   // magnitudes that are ordinary: up to this, and down to one by it
constexpr float kNoScale = 0x1p-120f;  // the largest scale of a block of zeros, of any kind

// Slices of the weight are unsigned: the bias of each, and of all together.
constexpr int32_t kMore = 128;
constexpr float kAllMore = kMore * (65536 + 256 + 1);

// Codes of a row that are decoded at a time: whole segments.
EQQ_INLINE int64_t piece_of(const Problem& p, const Detail& d) {
  return d.w_slices == 1 || p.k <= kMostPiece ? kMostPiece : max64(kPiece, 512 / p.bits);
}

// Shared memory: tables, places, heads, and tiles of x. The panels of a unit lie side by side for each piece, in the
// order in which they are read.
EQQ_INLINE int64_t heads_at(const Detail& d) { return kTables + d.parts * static_cast<int64_t>(sizeof(Place)); }
EQQ_INLINE int64_t head_of(const Detail& d, int64_t batch, int64_t panel, int64_t chunk) {
  return heads_at(d) + ((batch * d.panels + panel) * d.parts + chunk) * static_cast<int64_t>(sizeof(Head));
}
EQQ_INLINE int64_t x_at(const Problem& p, const Detail& d) { return head_of(d, p.batch, 0, 0); }
EQQ_INLINE int64_t piece_at(const Problem& p, const Detail& d, int64_t batch, int64_t panel, int64_t first) {
  const int64_t block = panel / kUnitPanels * kUnitPanels, panels = min64(kUnitPanels, d.panels - block);
  const int64_t steps = min64(div_up(p.k - first, 64), piece_of(p, d) / 64);
  return x_at(p, d) + (batch * d.panels + block) * d.packed +
         (panels * (first / 64) + (panel - block) * steps) * kMostSlices * kTile;
}

// The memory of a thread.
struct Room {
  int64_t bytes, unpacked, results, scales, sums, spare, all;  // where these are, behind decoded codes

  explicit Room(const Detail& d) {
    bytes = kMostPiece / 64 * d.w_slices * kTile;
    unpacked = bytes + kRows * kMostPiece;
    results = unpacked + round_up(kStepRoom, 64);
    scales = results + 8 * kTile;
    sums = scales + 2 * 4 * kRows * kMostBlocks;
    spare = sums + d.together * min64(d.panels, kUnitPanels) * kTile;
    all = spare + d.spare;
  }
};

}  // namespace
