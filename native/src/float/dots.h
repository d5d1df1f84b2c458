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
  template <int kBits, int kValues, Mode kMode, bool kZero, bool kScaled, int kPlaneIndex>
  EQQ_INLINE void four(const uint8_t* bytes, int h, const float* values, const Table& table, const float* scale,
                       const float* zero, F* w) {
    constexpr int kScales = per_plane(kMode), kAt = kMode == kOneScale ? 0 : kPlaneIndex * kScales;
    constexpr bool kOfTable = kBits < 8 && kScales == 1 && V::kScalesTables;
    if constexpr (kBits == 8) {
      const F offset = V::broadcast(values[0]);
      if constexpr (V::kTablesOfBytes && kValues != kValueInteger) {
        D::template decode_all_bytes<kValues>(bytes, values, offset, w);
      } else {
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) w[v] = D::template decode_bytes<kValues>(bytes + v * L, values, offset);
      }
    } else {
      Table t = table;
      if (kOfTable && kZero) t = V::offset(t, V::broadcast(zero[kAt]));
      if (kOfTable && kScaled) t = V::scale(t, V::broadcast(scale[kAt]));
      constexpr int kShift = kPlaneIndex * kBits;
      const Codes codes = V::codes(bytes);
      w[0] = V::lookup(t, V::template shift<kShift>(codes));
      w[1] = V::lookup(t, V::template shift<kShift + 8>(codes));
      w[2] = V::lookup(t, V::template shift<kShift + 16>(codes));
      w[3] = V::lookup(t, V::template shift<kShift + 24>(codes));
    }
    if constexpr (!kOfTable) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        F s = V::zero(), z = s;
        if constexpr (kBits < 8 && kScales > 1) {
          const typename V::Lanes lanes = V::lanes(h, kScales);
          s = V::spread(scale + kAt, lanes);
          if (kZero) z = V::spread(zero + kAt, lanes);
        } else {
          const int at = kAt + (kBits == 8 ? (4 * h + v) * L * kScales / 64 : 0);
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

  // Adds the products of `kRows` rows of the weight and `kM` rows of x to `sums`, where the sums of a row of x are
  // contiguous. The caller applies per-channel scales. `kMask` masks padding.
  template <int kBits, int kValues, Mode kMode, bool kZero, int kM, bool kMask>
  static __attribute__((noinline)) void dots(const uint8_t* const* bytes, int64_t ahead, const RowScales* scales,
                                             int64_t step, int64_t segments, const float* values, const int32_t* mask,
                                             const float* x, int64_t x_row, F* sums) {
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
        dots_of_planes<kBits, kValues, kMode, kZero, kM, kMask, 0>(bytes, i, h, scales, i * step, values, table, mask,
                                                                   x + i * kSegment * (8 / kBits), x_row, acc);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) sums[m * kRows + r] = V::add(sums[m * kRows + r], acc[r][m]);
  }

  template <int kBits, int kValues, Mode kMode, bool kZero, int kM, bool kMask, int kPlaneIndex>
  EQQ_INLINE void dots_of_planes(const uint8_t* const* bytes, int64_t segment, int h, const RowScales* scales,
                                 int64_t at, const float* values, const Table& table, const int32_t* mask,
                                 const float* x, int64_t x_row, F (*acc)[kM]) {
    if constexpr (kPlaneIndex < 8 / kBits) {
      const int place = (h * (8 / kBits) + kPlaneIndex) * 4 * L;
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r += 2) {  // two rows share the loaded x
        F w[2][4];
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          four<kBits, kValues, kMode, kZero, kMode != kOneScale, kPlaneIndex>(
              bytes[r + i] + segment * kSegment + 4 * L * h, h, values, table, scales[r + i].scale + at,
              scales[r + i].zero + at, w[i]);
#pragma GCC unroll 4
          for (int v = 0; kMask && v < 4; ++v) w[i][v] = V::masked(w[i][v], mask + place + v * L);
        }
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v)
#pragma GCC unroll 8
          for (int m = 0; m < kM; ++m) {
            const F xs = V::load(x + m * x_row + place + v * L);
            acc[r][m] = V::fma(w[0][v], xs, acc[r][m]);
            acc[r + 1][m] = V::fma(w[1][v], xs, acc[r + 1][m]);
          }
      }
      dots_of_planes<kBits, kValues, kMode, kZero, kM, kMask, kPlaneIndex + 1>(bytes, segment, h, scales, at, values,
                                                                               table, mask, x, x_row, acc);
    }
  }

  template <int kBits, int kValues, bool kZero, int kM>
  EQQ_INLINE void dots_of_mode(Mode mode, const uint8_t* const* bytes, int64_t ahead, const RowScales* scales,
                               int64_t step, int64_t segments, const float* values, const float* x, int64_t x_row,
                               F* sums) {
    if (mode == kOneScale) {
      dots<kBits, kValues, kOneScale, kZero, kM, false>(bytes, ahead, scales, 0, segments, values, nullptr, x, x_row,
                                                        sums);
    } else if (mode == kBy32) {
      dots<kBits, kValues, kBy32, kZero, kM, false>(bytes, ahead, scales, step, segments, values, nullptr, x, x_row,
                                                    sums);
    } else if (mode == kBy16) {
      dots<kBits, kValues, kBy16, kZero, kM, false>(bytes, ahead, scales, step, segments, values, nullptr, x, x_row,
                                                    sums);
    } else {
      dots<kBits, kValues, kUniform, kZero, kM, false>(bytes, ahead, scales, step, segments, values, nullptr, x, x_row,
                                                       sums);
    }
  }
};

}  // namespace
