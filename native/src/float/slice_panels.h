// Panels: 16 rows of x as integers of 16, 24 or 31 bits. Their bytes, called slices, are multiplied by bytes of the
// weight. This is Ozaki's scheme (https://arxiv.org/abs/2306.11975).
//
// The integers are multiples of the amax of 1024 numbers of a row, divided by the largest integer. Products of slices
// are exact, and so are their sums.
//
// A number much smaller than the amax keeps few bits. So x is checked while it is packed. Packing tries two slices if
// the problem is coarse, otherwise three, and one more if there are outliers. If four slices are not enough, or a
// number is not finite, very large or very small, another kernel multiplies the panel.
#pragma once

#include "float/slices.h"

namespace {

using F = __m512;
using I = __m512i;

constexpr int64_t kRows = 16;    // rows of a panel
constexpr int64_t kSpan = 1024;  // numbers of a row that share the scale of their integers
constexpr int64_t kShort = 256;  // codes of a short row, whose product of floats has few roundings
constexpr int kMostSlices = 4;
constexpr int64_t kUnitPanels = 16;  // the most panels in a unit

constexpr float kRangeOfX = 0x1p64f;  // ordinary magnitudes are at most this, and at least its reciprocal

// Loads numbers `k` to `k + 15` (`real` of which exist) of 16 rows from `at` on: a vector of rows for each number.
void square(const Problem& p, int64_t at, int64_t k, int64_t real, int64_t rows, F* out) {
  at += k * p.x_column;
  if (p.x_column == 1) {
    for (int64_t i = 0; i < 16; ++i)
      out[i] = load_some(p.x, p.x_type, at + (i < rows ? i : 0) * p.x_row, i < rows ? first_few(real) : 0);
    avx512::Simd::transpose(out);
    return;
  }
  for (int64_t j = 0; j < 16; ++j)
    out[j] = load_some(p.x, p.x_type, at + (j < real ? j : 0) * p.x_column, j < real ? first_few(rows) : 0);
}

// The amax, the sum of squares and the count of nonzeros of each lane. With a NaN, the amax is NaN.
struct Magnitudes {
  I most = _mm512_setzero_si512(), count = _mm512_setzero_si512();
  F squares = _mm512_setzero_ps();

  EQQ_INLINE void add(Magnitudes& a, F value) {
    const I magnitude = _mm512_and_si512(_mm512_castps_si512(value), _mm512_set1_epi32(0x7fffffff));
    a.most = _mm512_max_epu32(a.most, magnitude);
    a.squares = _mm512_fmadd_ps(value, value, a.squares);
    a.count = _mm512_sub_epi32(a.count, _mm512_movm_epi32(_mm512_test_epi32_mask(magnitude, magnitude)));
  }
};

// Computes the magnitudes of 16 rows of a span.
Magnitudes magnitudes_of(const Problem& p, int64_t at, int64_t first, int64_t count, int64_t rows) {
  Magnitudes all;
  if (p.x_column != 1) {
    for (int64_t k = 0; k < count; k += 16) {
      F values[16];
      square(p, at, first + k, min64(16, count - k), rows, values);
      for (int j = 0; j < 16; ++j) Magnitudes::add(all, values[j]);
    }
    return all;
  }
  alignas(64) float squares[16] = {0};
  alignas(64) uint32_t most[16] = {0};
  alignas(64) int32_t nonzero[16] = {0};
  const int64_t item = p.x_type == kFloat32 ? 4 : 2;
  for (int64_t i = 0; i < rows; ++i) {
    Magnitudes row;
    for (int64_t k = 0; k < count; k += 16) {
      const int64_t from = at + i * p.x_row + first + k;
      // A row is too short for the hardware prefetcher.
      _mm_prefetch(static_cast<const char*>(p.x) + (from + 2 * p.x_row) * item, _MM_HINT_T1);
      Magnitudes::add(row, load_some(p.x, p.x_type, from, first_few(count - k)));
    }
    most[i] = _mm512_reduce_max_epu32(row.most);
    squares[i] = _mm512_reduce_add_ps(row.squares);
    nonzero[i] = _mm512_reduce_add_epi32(row.count);
  }
  all.most = _mm512_load_si512(most);
  all.count = _mm512_load_si512(nonzero);
  all.squares = _mm512_load_ps(squares);
  return all;
}

// Whether all numbers are finite, and none is very large or very small.
bool are_ordinary(const Magnitudes& all) {
  const F most = _mm512_castsi512_ps(all.most);
  const __mmask16 some = _mm512_cmp_ps_mask(most, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  return some == (_mm512_mask_cmp_ps_mask(some, most, _mm512_set1_ps(1 / kRangeOfX), _CMP_GE_OQ) &
                  _mm512_cmp_ps_mask(most, _mm512_set1_ps(kRangeOfX), _CMP_LE_OQ));
}

// Whether the amax is not many times the root mean square, to which errors should be small.
bool are_near(const Magnitudes& all) {
  const F most = _mm512_castsi512_ps(all.most), mean = _mm512_div_ps(all.squares, _mm512_cvtepi32_ps(all.count));
  const __mmask16 some = _mm512_cmp_ps_mask(most, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  return _mm512_mask_cmp_ps_mask(some, most, _mm512_mul_ps(_mm512_sqrt_ps(mean), _mm512_set1_ps(8)), _CMP_NLE_UQ) == 0;
}

// Numbers `first` to `first + count` of the rows of a panel, which begins at element `at`.
struct Span {
  int64_t at, rows, first, count;
  Magnitudes magnitudes;

  Span(const Problem& p, int64_t batch, int64_t panel, int64_t first)
      : at(batch * p.x_batch + kRows * panel * p.x_row), rows(min64(kRows, p.m - kRows * panel)), first(first),
        count(min64(kSpan, p.k - first)), magnitudes(magnitudes_of(p, at, first, count, rows)) {}
};

// Where to store slices: the high slices of the first four numbers of all rows, the next four `group` bytes later, and
// lower slices `slice` bytes later.
struct Slices {
  uint8_t* to;
  int64_t group, slice;
};

// Packs a span as `kX` slices, and stores the scale of the integers of each row. `where(k)` returns where 16 numbers
// go. `keep(end, sums)` gets the sums of slices up to number `end`, high slices first; if it returns true, sums restart
// at zero. Returns whether `kX` slices are enough.
template <int kX, class Where, class Keep>
bool pack_slices(const Problem& p, const Span& span, float* scale, const Where& where, const Keep& keep) {
  const F most = _mm512_castsi512_ps(span.magnitudes.most), largest = _mm512_set1_ps(largest_of(kX));
  const F inverse = _mm512_maskz_div_ps(_mm512_cmp_ps_mask(most, _mm512_setzero_ps(), _CMP_NEQ_UQ), largest, most);
  _mm512_store_ps(scale, _mm512_div_ps(most, largest));
  const I ones = _mm512_set1_epi8(1);
  I sums[4] = {}, tiny = {}, tiniest = {}, before = {};
  __mmask16 lost = 0;  // rows that lose precision: most of some consecutive numbers keep few bits
  for (int64_t k = 0; k < round_up(span.count, 64); k += 16) {
    F values[16];
    square(p, span.at, span.first + k, min64(16, span.count - k), span.rows, values);
    Slices out = where(k);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j, out.to += out.group) {
      I slices[4];  // in each quarter the low slices of four rows, then the next ones
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        const I number = _mm512_cvtps_epi32(_mm512_mul_ps(values[4 * j + i], inverse));
        const I size = _mm512_abs_epi32(number);
        const __mmask16 some = _mm512_cmp_ps_mask(values[4 * j + i], _mm512_setzero_ps(), _CMP_NEQ_OQ);
        tiny = _mm512_mask_add_epi32(tiny, _mm512_mask_cmplt_epu32_mask(some, size, _mm512_set1_epi32(few_bits_of(kX))),
                                     tiny, _mm512_set1_epi32(1));
        tiniest = _mm512_mask_add_epi32(tiniest,
                                        _mm512_mask_cmplt_epu32_mask(some, size, _mm512_set1_epi32(hardly_any_of(kX))),
                                        tiniest, _mm512_set1_epi32(1));
        slices[i] = slices_apart(number);
      }
      const I low0 = _mm512_unpacklo_epi32(slices[0], slices[1]), low1 = _mm512_unpacklo_epi32(slices[2], slices[3]);
      const I high0 = _mm512_unpackhi_epi32(slices[0], slices[1]), high1 = _mm512_unpackhi_epi32(slices[2], slices[3]);
      const I apart[4] = {_mm512_unpacklo_epi64(low0, low1), _mm512_unpackhi_epi64(low0, low1),
                          _mm512_unpacklo_epi64(high0, high1), _mm512_unpackhi_epi64(high0, high1)};
#pragma GCC unroll 4
      for (int slice = 0; slice < kX; ++slice) {
        const I codes = bytes_apart(apart[kX - 1 - slice]);
        _mm512_store_si512(out.to + slice * out.slice, codes);
        sums[slice] = _mm512_dpbusd_epi32(sums[slice], ones, codes);
      }
    }
    if (k % 32 == 16) {
      lost |= _mm512_cmpgt_epi32_mask(_mm512_sub_epi32(tiny, before), _mm512_set1_epi32(16));
      before = tiny;
    }
    if (!keep(k + 16, sums)) continue;
#pragma GCC unroll 4
    for (int slice = 0; slice < 4; ++slice) sums[slice] = _mm512_setzero_si512();
  }
  // If many numbers keep few bits, or all of a block, a row of the weight may multiply only those. Of normally
  // distributed numbers, one in 100 keeps few bits, and one in 400 hardly any.
  const I count = span.magnitudes.count;
  lost |= _mm512_cmpgt_epi32_mask(tiny, _mm512_srli_epi32(count, kX == 2 ? 4 : 3));
  lost |= _mm512_cmpgt_epi32_mask(tiniest, _mm512_add_epi32(_mm512_srli_epi32(count, 6), _mm512_set1_epi32(4)));
  return lost == 0;
}

// Packs a span by `pack(Count<slices>)`, which returns whether these are enough. Returns the number of slices, or 0 if
// the span cannot be sliced.
template <class Pack>
int64_t pack_fewest(const Problem& p, const Span& span, bool short_rows, const Pack& pack) {
  if (!are_ordinary(span.magnitudes)) return 0;
  if (are_near(span.magnitudes)) {
    if (p.coarse && pack(Count<2>())) return 2;
    if ((p.coarse || !short_rows) && pack(Count<3>())) return 3;
  }
  return pack(Count<4>()) ? 4 : 0;
}

// The operands of a unit: rows of the weight, and panels.
struct Extent {
  int64_t batch, first, count, panel, panels;

  template <class Detail>
  Extent(const Problem& p, const Detail& d, int64_t unit)
      : batch(unit / d.chunks / d.row_blocks), first(unit % d.chunks * d.rows), count(min64(d.rows, p.n - first)),
        panel(unit / d.chunks % d.row_blocks * kUnitPanels), panels(min64(kUnitPanels, d.panels - panel)) {}
};

// Writes the results of 16 rows of the weight and a panel, stored row by row.
void write_results(const Problem& p, int64_t at, int64_t rows, int64_t lanes, const float* results) {
  F square[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) square[i] = _mm512_load_ps(results + 16 * i);
  write_square(p, at, rows, lanes, square);
}

// A panel times some rows of the weight, as a problem of its own. The method for a single row of x would turn NaN into
// infinity: so it is multiplied as two equal rows, which are written to one place.
Problem part_of(const Problem& p, int64_t batch, int64_t panel, int64_t n, int64_t count) {
  Problem q = p;
  const int64_t row = first_row(&p, batch) + n, item = p.x_type == kFloat32 ? 4 : 2, first = kRows * panel;
  q.batch = 1;
  q.m = min64(kRows, p.m - first);
  if (q.m == 1) {
    q.m = 2;
    q.x_row = q.y_row = 0;
  }
  q.n = count;
  q.selected = nullptr;
  q.x = static_cast<const char*>(p.x) + (batch * p.x_batch + first * p.x_row) * item;
  q.y = static_cast<char*>(p.y) + (batch * p.y_batch + first * p.y_row + n * p.y_column) * item;
  q.codes += row * p.words;
  q.scale = static_cast<const char*>(p.scale) + row * p.blocks * scale_bytes(p.scale_kind);
  if (p.row_scale != nullptr) q.row_scale += row;
  if (p.zero_point != nullptr) q.zero_point += row * p.zero_words;
  return q;
}

// The bytes that a kernel needs to compute such a part.
int64_t memory_of(const MatmulKernel& kernel, const Problem& part) {
  Plan plan = {};
  kernel.plan(&part, 1, &plan);
  return round_up(plan.shared_bytes, 64) + plan.own_bytes;
}

// The bytes for any part of up to `count` rows of the weight. Units of fewer rows of x are larger, so the last panel
// may need more.
int64_t spare_of(const MatmulKernel& kernel, const Problem& p, int64_t count) {
  return max64(memory_of(kernel, part_of(p, 0, 0, 0, count)),
               memory_of(kernel, part_of(p, 0, div_up(p.m, kRows) - 1, 0, count)));
}

// Computes such a part by a kernel.
void multiply_by(const MatmulKernel& kernel, const Problem& part, char* memory) {
  Plan plan = {};
  kernel.plan(&part, 1, &plan);
  for (int64_t i = 0; i < plan.parts; ++i) kernel.prepare(&part, &plan, memory, i);
  for (int64_t i = 0; i < plan.units; ++i)
    kernel.run(&part, &plan, memory, memory + round_up(plan.shared_bytes, 64), i);
}

// Multiplies unusual numbers by a kernel: all rows of a unit with its panel `j`, or rows for which `odd(n)` holds.
template <class Odd>
void multiply_unusual(const MatmulKernel& kernel, const Problem& p, const Extent& a, int64_t j, bool ordinary,
                      const Odd& odd, char* memory) {
  if (!ordinary) return multiply_by(kernel, part_of(p, a.batch, a.panel + j, a.first, a.count), memory);
  for (int64_t n = 0; n < a.count; ++n)
    if (odd(n)) multiply_by(kernel, part_of(p, a.batch, a.panel + j, a.first + n, 1), memory);
}

}  // namespace
