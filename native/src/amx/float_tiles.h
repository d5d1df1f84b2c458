// Products of tiles of slices, and what becomes of their results.
#pragma once

#include "amx/float_layout.h"

namespace {

// Pairs of slices of the weight and of x whose product counts: the sum of their orders is at most this, the order of
// the last slice of x.
constexpr int last_order(int x) { return x - 1; }

// Tiles 0 to 3 are results, by their order; then there are three of the weight and one of x.
template <int kOrder, int kSlice>
EQQ_INLINE void multiply() {
#define EQQ_MULTIPLY(ORDER, SLICE, TILE) \
  if constexpr (kOrder == ORDER && kSlice == SLICE) _tile_dpbusd(ORDER, TILE, 7);
  EQQ_MULTIPLY(0, 0, 4)
  EQQ_MULTIPLY(1, 0, 4)
  EQQ_MULTIPLY(2, 0, 4)
  EQQ_MULTIPLY(3, 0, 4)
  EQQ_MULTIPLY(1, 1, 5)
  EQQ_MULTIPLY(2, 1, 5)
  EQQ_MULTIPLY(3, 1, 5)
  EQQ_MULTIPLY(2, 2, 6)
  EQQ_MULTIPLY(3, 2, 6)
#undef EQQ_MULTIPLY
}

// A slice of x times the slices of the weight that count, which are loaded with the first.
template <int kW, int kX, int kSlice>
EQQ_INLINE void multiply_slice(const uint8_t* w, int64_t w_row, const uint8_t* x) {
  if constexpr (kSlice < kX) {
    constexpr int kLast = last_order(kX);
    _tile_loadd(7, x + kSlice * kTile, 64);
    if constexpr (kSlice == 0) _tile_loadd(4, w, w_row);
    multiply<kSlice, 0>();
    if constexpr (kSlice == 0 && kW > 1) _tile_loadd(5, w + kTile, w_row);
    if constexpr (kW > 1 && kSlice + 1 <= kLast) multiply<kSlice + 1, 1>();
    if constexpr (kSlice == 0 && kW > 2 && kLast >= 2) _tile_loadd(6, w + 2 * kTile, w_row);
    if constexpr (kW > 2 && kSlice + 2 <= kLast) multiply<kSlice + 2, 2>();
  }
}

// Bytes of 16 rows that come to L2 while something else is multiplied, some lines in each step: all at once they would
// stand in each other's way, and hardware does not prefetch so many streams.
struct Lines {
  const char* from = nullptr;
  int64_t stride = 0, bytes = 0, rows = 0, lines = 0;  // how far apart rows are, bytes of each, and lines in a step
  int64_t row = 0, at = 0;

  EQQ_INLINE void fetch_some(Lines& a) {
    for (int64_t i = 0; i < a.lines && a.row < a.rows; ++i) {
      _mm_prefetch(a.from + a.row * a.stride + a.at, _MM_HINT_T1);
      a.at += 64;
      if (a.at >= a.bytes) a.at = 0, ++a.row;
    }
  }
};

struct Next {
  Lines codes, scales;
};

// Some codes of 16 rows of the weight, and a panel of x.
struct Piece {
  const uint8_t* w;
  int64_t w_row, w_next;  // bytes to the next row, and to the next 64 codes
  const uint8_t* x;
  int64_t steps;            // of 64 codes
  const Sums* sums;         // of x, for all codes whose results are stored together
  bool first, last;         // whether results begin, or are to be stored:
  int32_t (*results)[256];  // here
};

// All rows of a result begin alike.
template <int kOrders>
EQQ_INLINE void begin_results(const Sums& sums) {
  settle(&sums);
  _tile_loadd(0, sums.start[0], 0);
  if constexpr (kOrders > 1) _tile_loadd(1, sums.start[1], 0);
  if constexpr (kOrders > 2) _tile_loadd(2, sums.start[2], 0);
  if constexpr (kOrders > 3) _tile_loadd(3, sums.start[3], 0);
}

// What tiles held: is added to the sums of 16 rows and a panel while others are multiplied.
struct Pending {
  int32_t (*results)[256];  // for each order
  int64_t orders;
  const float* x_scale;  // of rows of x
  const Sums* x_sums;
  float factor[16];  // the unit of the results of a row, without the scale of x
  int32_t zero[16];  // what codes of a row are less
  bool zeros;        // whether they are
  float* sums;
  int64_t done = kRows;     // rows
  bool first, last;         // whether sums begin, or are to be written:
  int64_t at, rows, lanes;  // here, and their number
};

template <int kOrders>
EQQ_INLINE void store_results(int32_t (*results)[256]) {
  _tile_stored(0, results[0], 64);
  if constexpr (kOrders > 1) _tile_stored(1, results[1], 64);
  if constexpr (kOrders > 2) _tile_stored(2, results[2], 64);
  if constexpr (kOrders > 3) _tile_stored(3, results[3], 64);
}

// The next rows of pending results.
template <int kOrders, bool kZeros>
EQQ_INLINE void finish_rows(const Pending& a, int64_t rows) {
  const F scale = _mm512_load_ps(a.x_scale);
  for (int64_t i = a.done; i < a.done + rows; ++i) {
    F sum;
#pragma GCC unroll 4
    for (int order = 0; order < kOrders; ++order) {
      I result = _mm512_load_si512(a.results[order] + 16 * i);
      if (kZeros)
        result = _mm512_sub_epi32(
            result, _mm512_mullo_epi32(_mm512_load_si512(a.x_sums->all[order]), _mm512_set1_epi32(a.zero[i])));
      const F part = _mm512_cvtepi32_ps(result);
      sum = order == 0 ? part : _mm512_fmadd_ps(sum, _mm512_set1_ps(256), part);
    }
    const F before = a.first ? _mm512_setzero_ps() : _mm512_load_ps(a.sums + 16 * i);
    _mm512_store_ps(a.sums + 16 * i, _mm512_fmadd_ps(_mm512_mul_ps(sum, scale), _mm512_set1_ps(a.factor[i]), before));
  }
}

template <bool kZeros>
EQQ_INLINE void finish_rows_of(const Pending& a, int64_t rows) {
  a.orders == 2   ? finish_rows<2, kZeros>(a, rows)
  : a.orders == 3 ? finish_rows<3, kZeros>(a, rows)
                  : finish_rows<4, kZeros>(a, rows);
}

EQQ_INLINE void finish_some(const Problem& p, Pending& a, int64_t rows) {
  if (a.done == kRows) return;
  settle(a.results);
  if (a.zeros) {
    finish_rows_of<true>(a, rows);
  } else {
    finish_rows_of<false>(a, rows);
  }
  a.done += rows;
  if (a.done == kRows && a.last) write_results(p, a.at, a.rows, a.lanes, a.sums);
}

void finish(const Problem& p, Pending& a) {
  while (a.done < kRows) finish_some(p, a, kRows / 4);
}

// Some steps. The results before are finished meanwhile.
template <int kW, int kX>
void multiply_piece(const Problem& p, const Piece& a, Next& next, Pending& before) {
  constexpr int kOrders = last_order(kX) + 1;
  if (a.first) begin_results<kOrders>(*a.sums);
  const uint8_t *w = a.w, *x = a.x;
  for (int64_t step = 0; step < a.steps; ++step, w += a.w_next, x += kX * kTile) {
    settle(w);
    multiply_slice<kW, kX, 0>(w, a.w_row, x);
    Lines::fetch_some(next.codes);
    multiply_slice<kW, kX, 1>(w, a.w_row, x);
    Lines::fetch_some(next.scales);
    multiply_slice<kW, kX, 2>(w, a.w_row, x);
    multiply_slice<kW, kX, 3>(w, a.w_row, x);
    finish_some(p, before, kRows / 4);
  }
  finish(p, before);
  if (a.last) store_results<kOrders>(a.results);
}

using Multiply = void (*)(const Problem& p, const Piece& a, Next& next, Pending& before);

Multiply multiply_of(int64_t w_slices, int64_t x_slices) {
  if (w_slices == 1)
    return x_slices == 2 ? multiply_piece<1, 2> : x_slices == 3 ? multiply_piece<1, 3> : multiply_piece<1, 4>;
  return x_slices == 2 ? multiply_piece<kSlices, 2>
       : x_slices == 3 ? multiply_piece<kSlices, 3>
                       : multiply_piece<kSlices, 4>;
}

// The unit of the lowest of these products.
float lowest_power(int64_t w_slices) { return w_slices == 1 ? 1 : 65536; }

}  // namespace
