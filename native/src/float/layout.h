// The layout of a product of floats: which codes are decoded at a time, in which order, and by which method.
//
// A row of the weight is decoded a segment (64 bytes) at a time, in the order in which shifts yield the codes, not in
// logical order: with fewer than 8 bits, lane `j` of vector `(h, plane, c)` holds the code of byte `4 L h + 4 j + c` in
// that plane. `x` is permuted to this order instead, once per call. A last, shorter segment is padded with zero bytes,
// which decode to zero and are multiplied by zeros of `x`. With blocks or several rows of `x` its codes are decoded to
// logical order, without padding.
#pragma once

#include <stdint.h>
#include <string.h>

#include "core/tail.h"

namespace {

constexpr int64_t kSegment = 64;       // bytes
constexpr int64_t kChunk = 512;        // codes of a row that tiles decode at a time
constexpr int64_t kChunkStride = 528;  // floats from one decoded row to the next: a power of two would share sets of L1
constexpr int64_t kRowChunk = 64;      // rows of the weight that transposed products decode at a time
constexpr int64_t kRowChunkStride = 80;
constexpr int64_t kScaleChunk = 4096;   // codes of a row whose scales are decoded at a time: a multiple of `kChunk`
constexpr int64_t kAheadOfDots = 8192;  // bytes of the weight from a prefetch to its use by `kDot`
constexpr int64_t kFewBlock = 16;       // rows of the weight that `kFew` multiplies by a piece of `x` in L1
constexpr int64_t kFewFloats = 8192;    // floats of this piece
constexpr int64_t kMostDots = 64;       // the most rows of the weight in a unit of `kDot`
constexpr int64_t kShortRow = 2;        // segments of a short row, where the work per row takes longest
constexpr int64_t kMostRows = 48;       // the most rows of the weight in a unit of `kPanels`: they stay in L2
constexpr int64_t kRowBlock = 256;      // rows of `x` by which a decoded tile is multiplied

// Which codes of a segment share a scale.
enum Mode {
  kOneScale,  // all codes of a row: per-channel scales
  kUniform,   // all codes of a vector: blocks are multiples of 64, or of 16 where codes have 8 bits
  kBy32,      // runs of 32 codes of a plane
  kBy16,      // runs of 16
  kAnyBlock   // any codes: each has an index of its scale
};

// The number of scales of a plane, and from one segment to the next.
constexpr int per_plane(Mode mode) { return mode == kBy16 ? 4 : mode == kBy32 ? 2 : 1; }
constexpr int64_t scales_of_segment(int bits, Mode mode) { return mode == kOneScale ? 0 : 8 / bits * per_plane(mode); }

// Instantiates a template for a mode but `kAnyBlock`: calls `choose(ModeKind<mode>())`.
template <Mode mode>
struct ModeKind {
  static constexpr Mode value = mode;
};
template <class Choose>
auto by_mode(Mode mode, const Choose& choose) {
  switch (mode) {
    case kOneScale: return choose(ModeKind<kOneScale>());
    case kBy32: return choose(ModeKind<kBy32>());
    case kBy16: return choose(ModeKind<kBy16>());
    default: return choose(ModeKind<kUniform>());
  }
}

enum Method { kDot = 0, kFew = 1, kPanels = 2, kTransposed = 3, kMix = 4 };

EQQ_INLINE int64_t aligned(int64_t bytes) { return round_up(bytes, 64); }

// The segments of a row of the weight.
struct Shape {
  int64_t planes, codes;    // codes that share a byte, and codes of a segment
  int64_t segments, whole;  // segments of a row, and whole ones among them
  int64_t tail_bytes;       // bytes of a partial last segment
  int64_t tail;             // decoded floats of a partial last segment
  int64_t padded;           // decoded floats of a row
  Mode mode;                // the mode of whole segments
  Mode tail_mode;           // of a partial last segment, if it is multiplied as a whole one; otherwise `kAnyBlock`
  int64_t grain;            // codes per expanded scale: 64, 32 or 16
};

// The mode in which kernels of whole segments multiply the last one. Its padding is multiplied by zeros of x, which is
// NaN if a value of the table is not finite: then `kAnyBlock`.
EQQ_INLINE Mode tail_mode_of(const Problem& p) {
  // Padding is zero with codes of eight bits, and any code with others.
  for (int i = 0; i < (p.bits == 8 ? 1 : 1 << p.bits); ++i)
    if (!(__builtin_fabsf(p.table[i]) < __builtin_inff())) return kAnyBlock;
  const int64_t groups = tail_groups(p).groups;
  return groups == 1 ? kUniform : groups == 2 ? kBy32 : groups == 4 ? kBy16 : kAnyBlock;
}

// `direct`: the most rows of `x` with which the last segment stays in the order of decoding.
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
  // With more rows, multiplying padding would cost more than decoding the tail to logical order; and blocks of the tail
  // are whole vectors only in that order, unless each group of lanes lies in one block.
  const bool divides = s.mode != kAnyBlock && s.mode != kOneScale && s.segments > s.whole && p.m <= min64(direct, 3);
  s.tail_mode = divides ? tail_mode_of(p) : kAnyBlock;
  const int64_t most = s.mode == kOneScale || s.tail_mode != kAnyBlock ? direct : s.mode == kAnyBlock ? 1 : 0;
  const bool in_order = !p.transpose && p.m > most;
  s.tail = in_order ? min64(div_up(p.k - s.whole * s.codes, 16) * 16, s.codes) : s.codes;
  s.padded = s.whole * s.codes + (s.segments - s.whole) * s.tail;
  return s;
}

// Memory that threads share: a table of 256 floats; its bytes, low ones first, where `V` looks up bytes; indices of the
// codes of a segment, the same in every row; and packed `x`.
struct Shared {
  // For each code in the order of decoding its block, relative to the first one of the segment: of all segments with
  // `kAnyBlock`, else of the last one only.
  int32_t* index;
  int32_t* mask;   // the codes of the last segment that are not padding
  int32_t* place;  // the position of each code of the last segment in the order of decoding
  float* x;
};

// The plan of a product: units, and offsets into memory.
struct FloatDetail {
  int64_t method;
  int64_t rows;        // rows of the weight in a unit; segments with `kTransposed`
  int64_t chunks;      // units along the weight
  int64_t row_blocks;  // units along the rows of `x`
  int64_t x_batch;     // packed floats of one batch
  int64_t m_padded;    // rows of packed `x`, or the lanes of panels
  int64_t scales;      // offsets of decoded scales and of sums into the scratch memory of a thread
  int64_t sums;
  int64_t x_parts;   // parts of the preparation of one batch
  int64_t x_row;     // floats from one row of packed `x` to the next, without panels
  int64_t few_step;  // segments at a time, with `kFew`
};

EQQ_INLINE int64_t scale_segments(const Shape& s) { return kScaleChunk / s.codes; }

EQQ_INLINE int64_t chunk_segments(const Shape& s) { return kChunk / s.codes; }

// The number of decoded floats of some segments.
EQQ_INLINE int64_t span(const Shape& s, int64_t first, int64_t last) {
  return min64(last * s.codes, s.padded) - first * s.codes;
}

// The floats from one row of packed `x` to the next: not a power of two, so that rows use all sets of a cache.
EQQ_INLINE int64_t few_row(const Shape& s) { return s.padded < 1024 ? s.padded : (s.padded + 767) / 1024 * 1024 + 256; }

}  // namespace
