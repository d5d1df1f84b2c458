// Products with few rows of x that decode codes in registers: reading a decoded row from memory would take as long as
// decoding it.
#pragma once

#include "float/decode.h"

namespace {

template <class V>
struct Dots {
  using D = Decode<V>;
  using F = typename V::F;
  using Codes = typename V::Codes;
  using Table = typename V::Table;
  using RowScales = typename D::RowScales;
  static constexpr int L = V::L, kHalves = D::kHalves, kRows = V::kDotRows;
  static constexpr int kMost = V::kFewGroup < 4 ? 2 : 4;  // the most rows of x whose sums fit in registers

  // Decodes four vectors of a plane of a segment, from its bytes `4 L h` on. `scale` and `zero` belong to the segment.
  // Unless `kScaled`, the caller applies the scale, if a plane has one.
  template <int kBits, int kValues, Mode kMode, bool kZero, bool kScaled>
  EQQ_INLINE void four(const uint8_t* bytes, int h, int plane, const float* values, const Table& table,
                       const float* scale, const float* zero, F* w) {
    constexpr int kScales = per_plane(kMode);
    constexpr bool kOfTable = kBits < 8 && kScales == 1 && V::kScalesTables;
    const int first = kMode == kOneScale ? 0 : plane * kScales;
    if constexpr (kBits == 8) {
      const F offset = V::broadcast(values[0]);
      if constexpr (V::kTablesOfBytes) {
        D::template decode_all_bytes<kValues>(bytes, values, offset, w);
      } else {
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) w[v] = D::template decode_bytes<kValues>(bytes + v * L, values, offset);
      }
    } else {
      Table t = table;
      if (kOfTable && kZero) t = V::offset(t, V::broadcast(zero[first]));
      if (kOfTable && kScaled) t = V::scale(t, V::broadcast(scale[first]));
      const Codes codes = V::shift(V::codes(bytes), plane * kBits);
      w[0] = V::lookup(t, V::template shift<0>(codes));
      w[1] = V::lookup(t, V::template shift<8>(codes));
      w[2] = V::lookup(t, V::template shift<16>(codes));
      w[3] = V::lookup(t, V::template shift<24>(codes));
    }
    if constexpr (!kOfTable) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        F s = V::zero(), z = s;
        if constexpr (kBits < 8 && kScales > 1) {
          const typename V::Lanes lanes = V::lanes(h, kScales);
          s = V::spread(scale + first, lanes);
          if (kZero) z = V::spread(zero + first, lanes);
        } else {
          const int at = first + (kBits == 8 ? (4 * h + v) * L * kScales / 64 : 0);
          if (kScaled || kScales > 1) s = V::broadcast(scale[at]);
          if (kZero) z = V::broadcast(zero[at]);
        }
        if (kZero) w[v] = V::sub(w[v], z);
        if (kScaled || kScales > 1) w[v] = V::mul(w[v], s);
      }
    }
  }

  // Whether a whole segment can be read at `bytes`, past the end of a row: other codes of the weight follow.
  EQQ_INLINE bool can_overread(const Problem& p, const uint8_t* bytes) {
    const int64_t rows = (p.selected != nullptr ? p.stack : p.batch) * p.n;
    return bytes + kSegment <= p.codes + (rows - 1) * p.words + packed_bytes(p.k, p.bits);
  }

  //
  // x times the weight: lanes run along k
  //

  // The most rows of x. Each group of them decodes the weight anew, for which gathers take too long.
  static int64_t most(const Problem& p) {
    return p.bits == 8 && p.values == kValueTable && !V::kTablesOfBytes ? min64(kMost, V::kDirectRows) : V::kDirectRows;
  }

  using Loop = void (*)(const uint8_t* const* bytes, int64_t ahead, const RowScales* scales, int64_t segments,
                        const float* values, const int32_t* mask, const float* x, int64_t x_row, F* sums);

  // Adds the products of `kRows` rows of the weight and `kM` rows of x to `sums`, where the sums of a row of x are
  // contiguous. The caller applies per-channel scales. `kMask` masks padding.
  template <class C, Mode kMode, int kM, bool kMask>
  static void dots(const uint8_t* const* bytes, int64_t ahead, const RowScales* scales, int64_t segments,
                   const float* values, const int32_t* mask, const float* x, int64_t x_row, F* sums) {
    constexpr int64_t kStep = scales_of_segment(C::kBits, kMode);
    const Table table = V::table(values);
    F acc[kRows][kM];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) acc[r][m] = V::zero();
    for (int64_t i = 0; i < segments; ++i) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) V::prefetch(bytes[r] + i * kSegment + ahead);
      for (int h = 0; h < D::kHalves; ++h)
#pragma GCC unroll 1
        for (int plane = 0; plane < 8 / C::kBits; ++plane) {
          const int place = (h * (8 / C::kBits) + plane) * 4 * L;
          dots_of_plane<C, kMode, kM, kMask>(bytes, i, h, plane, scales, i * kStep, values, table, mask + place,
                                             x + i * kSegment * (8 / C::kBits) + place, x_row, acc);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) sums[m * kRows + r] = V::add(sums[m * kRows + r], acc[r][m]);
  }

  template <class C, Mode kMode, int kM, bool kMask>
  EQQ_INLINE void dots_of_plane(const uint8_t* const* bytes, int64_t segment, int h, int plane, const RowScales* scales,
                                int64_t at, const float* values, const Table& table, const int32_t* mask,
                                const float* x, int64_t x_row, F (*acc)[kM]) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r += 2) {  // two rows share the loaded x
      F w[2][4];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        four<C::kBits, C::kValues, kMode, C::kZero, kMode != kOneScale>(
            bytes[r + i] + segment * kSegment + 4 * L * h, h, plane, values, table, scales[r + i].scale + at,
            scales[r + i].zero + at, w[i]);
#pragma GCC unroll 4
        for (int v = 0; kMask && v < 4; ++v) w[i][v] = V::masked(w[i][v], mask + v * L);
      }
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v)
#pragma GCC unroll 8
        for (int m = 0; m < kM; ++m) {
          const F xs = V::load(x + m * x_row + v * L);
          acc[r][m] = V::fma(w[0][v], xs, acc[r][m]);
          acc[r + 1][m] = V::fma(w[1][v], xs, acc[r + 1][m]);
        }
    }
  }
};

}  // namespace
