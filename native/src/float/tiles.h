// Tiles of results in registers, with lanes along the results.
#pragma once

#include "float/layout.h"

namespace {

template <class V>
struct Tiles {
  using F = typename V::F;
  static constexpr int L = V::L;

  // c[i][:] += sum over p of a[i][p] b[p][:], for `kRows` rows of `kVectors` vectors. Sums over p, then adds to c:
  // short sums are more exact than a long one.
  template <int kVectors, int kRows, int64_t kStride>
  static void tile(const float* a, const float* b, int64_t b_row, int64_t length, float* c, int64_t c_row) {
    F acc[kRows][kVectors];
#pragma GCC unroll 32
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[i][v] = V::zero();
    for (int64_t p = 0; p < length; ++p) {
      F bs[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) bs[v] = V::load(b + p * b_row + v * L);
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i) {
        const F as = V::broadcast(a[i * kStride + p]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) acc[i][v] = V::fma(as, bs[v], acc[i][v]);
      }
    }
#pragma GCC unroll 32
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        V::store(c + i * c_row + v * L, V::add(V::load(c + i * c_row + v * L), acc[i][v]));
  }

  // The same for any number of rows up to `kRows`.
  template <int kVectors, int kRows, int64_t kStride>
  EQQ_INLINE void tile_rows(int64_t rows, const float* a, const float* b, int64_t b_row, int64_t length, float* c,
                            int64_t c_row) {
    if constexpr (kRows == 1) {
      tile<kVectors, 1, kStride>(a, b, b_row, length, c, c_row);
    } else {
      if (rows >= kRows) {
        tile<kVectors, kRows, kStride>(a, b, b_row, length, c, c_row);
      } else {
        tile_rows<kVectors, kRows - 1, kStride>(rows, a, b, b_row, length, c, c_row);
      }
    }
  }

  template <int kVectors, int kRows, int64_t kStride>
  static void tiles(int64_t rows, const float* a, const float* b, int64_t b_row, int64_t length, float* c,
                    int64_t c_row) {
    for (int64_t i = 0; i < rows; i += kRows)
      tile_rows<kVectors, kRows, kStride>(rows - i, a + i * kStride, b, b_row, length, c + i * c_row, c_row);
  }
};

}  // namespace
