// A few rows of floats on AMX: rows of the weight as tiles, products, and what becomes of their results.
#pragma once

#include "amx/amx.h"
#include "core/arrays_avx512.h"
#include "float/decode.h"

namespace {

using F = __m512;
using I = __m512i;

constexpr int64_t kTile = 1024;      // bytes
constexpr int64_t kStrip = 32;       // rows of the weight that are decoded and multiplied at a time
constexpr int64_t kMostRowsOfX = 4;  // of x
constexpr int64_t kUnitRows = 128;   // of the weight in a unit, at most
constexpr int64_t kSlots = 4;        // of a tile of x: each has the slices of some codes of a row
constexpr int64_t kStretch = 16;     // groups whose scales are decoded at a time
constexpr int64_t kMostTiles = 8;    // of 64 codes in a step

struct Detail {
  int64_t rows, chunks;   // of the weight in a unit, and units of all its rows
  int64_t x_rows;         // slots of a group: 2 or 4
  int64_t groups, grain;  // of codes in a tile of results, and codes in a group
  int64_t flush, step;    // tiles of codes per tile of results, and tiles that are decoded at a time
  int64_t tiles;          // of x, with padding
  int64_t factor;         // that makes the table integers
  int64_t batch_bytes;    // of shared memory
};

// Shared memory of a batch: this for each tile of results, tiles of x, and a byte: whether its numbers are ordinary.
struct alignas(64) Flush {
  int32_t off[16];     // sums of slices times the bias of all codes
  int32_t slices[16];  // sums of slices
  float factor[16];    // the unit of a slice
};

EQQ_INLINE int64_t flushes_of(const Detail& d) { return d.tiles / d.flush; }
EQQ_INLINE int64_t flag_at(const Detail& d) {
  return flushes_of(d) * static_cast<int64_t>(sizeof(Flush)) + d.tiles * kTile;
}

// Codes of a strip as tiles: the next 16 rows are 1 KB on, and the next 64 codes 2 KB.
struct Decoding {
  const uint8_t* codes;
  int64_t stride, segments;  // bytes of a row; segments that all rows have
  int64_t done;              // rows of all segments that are decoded
  I table;
  uint8_t* out;

  // The next `count` rows of a segment, a divisor of 32.
  template <int kBits, int kCount>
  EQQ_INLINE void rows(Decoding& a) {
    if (a.done >= kStrip * a.segments) return;
    const int64_t segment = a.done / kStrip, row = a.done % kStrip;
    const uint8_t* from = a.codes + row * a.stride + 64 * segment;
    uint8_t* to = a.out + segment * (8 / kBits) * 2 * kTile + 64 * row;
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      const I all = _mm512_loadu_si512(from + i * a.stride);
#pragma GCC unroll 8
      for (int plane = 0; plane < 8 / kBits; ++plane)
        _mm512_store_si512(to + plane * 2 * kTile + 64 * i,
                           _mm512_permutexvar_epi8(_mm512_srli_epi16(all, plane * kBits), a.table));
    }
    a.done += kCount;
  }
};

// Results that are to be scaled and added, once they are stored.
struct Pending {
  int turn;            // which of the two pairs of tiles has them
  int64_t group;       // the first, of the stretch
  const float* scale;  // of rows and the groups of a stretch
  const int32_t* off;  // likewise what codes are off, or null
  const Flush* flush;
};

// A step of a strip, and the work done meanwhile.
struct Work {
  const uint8_t *w, *x;
  int64_t w_row, w_next, w_below;  // bytes to the next row, 64 codes and 16 rows
  int64_t tiles;
  float (*results)[512];  // of both turns
  float* sums;            // of the strip
  I lanes;                // the group of each slice
  Decoding decoding;
  Ahead ahead;
};

// Two results take turns, so that one is stored while the other is summed up: tiles 0 and 1, and 2 and 3.
template <int kTurn>
EQQ_INLINE void clear_results() {
  if constexpr (kTurn == 0) {
    _tile_zero(0);
    _tile_zero(1);
  } else {
    _tile_zero(2);
    _tile_zero(3);
  }
}

template <int kTurn>
EQQ_INLINE void store_results(float (*results)[512]) {
  if constexpr (kTurn == 0) {
    _tile_stored(0, results[0], 64);
    _tile_stored(1, results[0] + 256, 64);
  } else {
    _tile_stored(2, results[1], 64);
    _tile_stored(3, results[1] + 256, 64);
  }
}

EQQ_INLINE void add_results(const Work& a, const Pending& last) {
  const int32_t* results = reinterpret_cast<const int32_t*>(a.results[last.turn]);
  const I lanes = _mm512_add_epi32(a.lanes, _mm512_set1_epi32(static_cast<int>(last.group)));
  const I off = _mm512_load_si512(last.flush->off), slices = _mm512_load_si512(last.flush->slices);
  const F factor = _mm512_load_ps(last.flush->factor);
  settle(results);
#pragma GCC unroll 8
  for (int i = 0; i < kStrip; ++i) {
    I sum = _mm512_add_epi32(_mm512_load_si512(results + 16 * i), off);
    if (last.off != nullptr)
      sum = _mm512_add_epi32(
          sum, _mm512_mullo_epi32(slices, _mm512_permutexvar_epi32(lanes, _mm512_load_si512(last.off + 16 * i))));
    const F scale = _mm512_permutexvar_ps(lanes, _mm512_load_ps(last.scale + 16 * i));
    const F part = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), factor);
    _mm512_store_ps(a.sums + 16 * i, _mm512_fmadd_ps(part, scale, _mm512_load_ps(a.sums + 16 * i)));
  }
}

// Some tiles whose results are added up. Earlier results are stored during other work.
template <int kBits, int kTurn>
EQQ_INLINE void multiply_some(Work& a, int64_t first, int64_t last, const Pending& before) {
  clear_results<kTurn>();
  for (int64_t tile = first; tile < last; ++tile) {
    const uint8_t* w = a.w + tile * a.w_next;
    settle(w);
    _tile_loadd(4, a.x + tile * kTile, 64);
    _tile_loadd(6, w, a.w_row);
    if constexpr (kTurn == 0) _tile_dpbusd(0, 6, 4);
    if constexpr (kTurn == 1) _tile_dpbusd(2, 6, 4);
    Ahead::fetch_some(a.ahead, 2 * kBits);
    if constexpr (kBits < 8) Decoding::rows<kBits, 2 * kBits>(a.decoding);
    _tile_loadd(7, w + a.w_below, a.w_row);
    if constexpr (kTurn == 0) _tile_dpbusd(1, 7, 4);
    if constexpr (kTurn == 1) _tile_dpbusd(3, 7, 4);
    Ahead::fetch_some(a.ahead, 2 * kBits);
    if constexpr (kBits < 8) Decoding::rows<kBits, 2 * kBits>(a.decoding);
    if (tile == first) store_results<1 - kTurn>(a.results);
  }
  add_results(a, before);
}

// Some rows of the weight that a thread multiplies, a strip at a time.
struct Unit {
  const Problem& p;
  const Detail& d;
  int64_t row, count;  // the first, and how many
  int64_t whole;       // codes of a row in whole segments
  I table;
  int32_t lowest;
  float* scale;  // of rows and groups: two stretches
  int32_t* off;
  uint8_t *bytes, *room;

  // The scales, and what codes are off, of a stretch of groups of a strip.
  void fetch(int64_t strip, int64_t stretch) {
    const bool one = p.blocks <= 1;
    const int64_t slot = stretch & 1, ratio = one ? 1 : p.block_size / d.grain, group = kStretch * stretch;
    const int64_t first = one ? 0 : group / ratio, end = one ? 1 : min64((group + kStretch - 1) / ratio + 1, p.blocks);
    const int64_t size = scale_bytes(p.scale_kind);
    alignas(64) int32_t blocks[16];
    for (int64_t i = 0, block = 0, within = group - first * ratio; i < kStretch; ++i) {
      blocks[i] = static_cast<int32_t>(min64(block, end - first - 1));
      if (++within == ratio) ++block, within = 0;
    }
    const I places = _mm512_load_si512(blocks);
    for (int64_t i = 0; i < kStrip; ++i) {
      const int64_t at = row + min64(kStrip * strip + i, count - 1);
      F values;
      if (end - first == 16) {
        values = Decode<avx512::Simd>::load_scales(
            p.scale_kind, static_cast<const uint8_t*>(p.scale) + (at * p.blocks + first) * size);
        if (p.row_scale != nullptr) values = _mm512_mul_ps(values, _mm512_set1_ps(p.row_scale[at]));
      } else {
        float some[16] = {0};
        avx512::decode_scales(&p, at, first, end, some);
        values = _mm512_permutexvar_ps(places, _mm512_loadu_ps(some));
      }
      _mm512_store_ps(scale + slot * 512 + 16 * i, values);
      if (p.zero_point == nullptr) continue;
      int32_t zeros[16] = {0};
      unpack_zero_points(p, at, first, end, zeros);
      const I less = _mm512_sub_epi32(_mm512_set1_epi32(lowest), _mm512_loadu_si512(zeros));
      _mm512_store_si512(off + slot * 512 + 16 * i, _mm512_permutexvar_epi32(places, less));
    }
  }

  // Whether tiles of a strip, up to this one, lie in memory as whole segments of whole strips do.
  bool direct(int64_t strip, int64_t last) const { return count - kStrip * strip >= kStrip && 64 * last <= whole; }

  // Decodes the others.
  void decode_slowly(int64_t strip, int64_t first, int64_t tiles, uint8_t* out) const {
    const Integers raw = {};
    for (int64_t i = 0; i < kStrip; ++i) {
      const int64_t at = row + min64(kStrip * strip + i, count - 1), from = 64 * first,
                    to = min64(from + 64 * tiles, p.k);
      memset(bytes, 0, 64 * tiles);
      for (int64_t k = from; k < to; k += kStep / 2) {
        const int64_t end = min64(k + kStep / 2, to);
        memcpy(bytes + k - from, some_codes(p, raw, at, k, end, room), end - k);
      }
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const I codes = _mm512_loadu_si512(bytes + 64 * tile);
        _mm512_store_si512(out + tile * 2 * kTile + 64 * i,
                           p.bits == 8 ? codes : _mm512_permutexvar_epi8(codes, table));
      }
    }
  }
};

}  // namespace
