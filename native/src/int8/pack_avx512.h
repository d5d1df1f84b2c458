// Rows of x on AVX-512, sixteen at a time: what integer products with tiles and without them share. `X` is an `Int8X`.
#pragma once

#include "core/arrays_avx512.h"
#include "core/runs.h"
#include "int8/x.h"

namespace {

using I = __m512i;
using F = __m512;

// As `row_at` of `K`, of a row of floats that lie side by side.
template <class X, int kType>
typename X::Row row_at(const Int8Problem& q, int64_t m, const void* x) {
  const int64_t count = q.p.k;
  const bool ranges = q.affine && X::finds_scales(q);
  const I magnitude = _mm512_set1_epi32(0x7fffffff);
  I most[2] = {};
  F low[2] = {}, high[2] = {};
  const auto take = [&](int i, int64_t k, __mmask16 mask) {
    const F values = load_some(x, kType, k, mask);
    most[i] = _mm512_max_epu32(most[i], _mm512_and_si512(_mm512_castps_si512(values), magnitude));
    if (ranges) low[i] = _mm512_min_ps(low[i], values), high[i] = _mm512_max_ps(high[i], values);
  };
  int64_t k = 0;
  for (; k + 32 <= count; k += 32) take(0, k, 0xffff), take(1, k + 16, 0xffff);
  for (; k < count; k += 16) take(0, k, first_few(count - k));
  return X::row_of(q, m, _mm512_reduce_max_epu32(_mm512_max_epu32(most[0], most[1])),
                   _mm512_reduce_min_ps(_mm512_min_ps(low[0], low[1])),
                   _mm512_reduce_max_ps(_mm512_max_ps(high[0], high[1])));
}

// The same of `rows` floats across, each a lane of adjacent floats.
template <class X, int kType>
void rows_at(const Int8Problem& q, int64_t m, const void* x, int64_t rows, typename X::Row* out) {
  const bool ranges = q.affine && X::finds_scales(q);
  const I magnitude = _mm512_set1_epi32(0x7fffffff);
  I most = {};
  F low = {}, high = {};
  for (int64_t k = 0; k < q.p.k; ++k) {
    const F values = load_some(x, kType, k * q.p.x_column, first_few(rows));
    most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(values), magnitude));
    if (ranges) low = _mm512_min_ps(low, values), high = _mm512_max_ps(high, values);
  }
  uint32_t mosts[16];
  float lows[16], highs[16];
  _mm512_storeu_si512(mosts, most);
  _mm512_storeu_ps(lows, low);
  _mm512_storeu_ps(highs, high);
  for (int64_t i = 0; i < rows; ++i) out[i] = X::row_of(q, m + i, mosts[i], lows[i], highs[i]);
}

// How a row, or the row of each lane, is quantized. Products with the inverse of the scale round as quotients do,
// except so near the middle of two integers that the quotient may be on the other side: some units in the last place of
// 256.
struct Quantizer {
  F scale, inverse, zero;
  I flip;      // of 16 bits: unsigned codes less signed ones
  bool exact;  // whether there is an inverse
};

EQQ_INLINE Quantizer quantizer(F scale, F zero, bool affine) {
  const __mmask16 large = _mm512_cmp_ps_mask(scale, _mm512_set1_ps(0x1p-120f), _CMP_GE_OQ);  // the inverse is finite
  const __mmask16 small = _mm512_cmp_ps_mask(scale, _mm512_set1_ps(0x1p120f), _CMP_LE_OQ);   // and no subnormal number
  const F inverse = _mm512_div_ps(_mm512_set1_ps(1), scale);
  return {scale, inverse, zero, _mm512_set1_epi16(affine ? 128 : 0), (large & small) == 0xffff};
}

// Far beyond the last code, but an integer: without it a value that is too large becomes the least.
EQQ_INLINE F below(F v) { return _mm512_min_ps(v, _mm512_set1_ps(1000)); }

// 64 floats as bytes, of which `count` are real: vector `j` is in the `j`th group of each quarter.
EQQ_INLINE I quantize(const Quantizer& q, const F* values, int64_t count) {
  I codes[4];
  F middle = _mm512_setzero_ps();  // how far they are from integers, at most
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const F v = below(_mm512_add_ps(_mm512_mul_ps(values[j], q.inverse), q.zero));
    codes[j] = _mm512_cvtps_epi32(v);
    middle = _mm512_range_ps(middle, _mm512_reduce_ps(v, 0), 3 | 2 << 2);  // the larger magnitude
  }
  const __mmask16 near = _mm512_cmp_ps_mask(middle, _mm512_set1_ps(0.5f - 0x1p-13f), _CMP_GT_OQ);
  if (__builtin_expect(near != 0 || !q.exact, 0))
    for (int j = 0; j < 4; ++j)
      codes[j] = _mm512_cvtps_epi32(below(_mm512_add_ps(_mm512_div_ps(values[j], q.scale), q.zero)));
  if (count < 64)
    for (int j = 0; j < 4; ++j)
      codes[j] = _mm512_mask_mov_epi32(_mm512_srli_epi32(q.flip, 16), first_few(count - 16 * j), codes[j]);
  // All steps saturate, and so clip.
  const I low = _mm512_subs_epi16(_mm512_packs_epi32(codes[0], codes[1]), q.flip);
  return _mm512_packs_epi16(low, _mm512_subs_epi16(_mm512_packs_epi32(codes[2], codes[3]), q.flip));
}

// Four columns of a panel, of which `count` are real, for rows that have codes: four bytes of each row.
template <int kType>
EQQ_INLINE I columns(const Problem& p, const Quantizer& across, __mmask16 coded, const void* x, int64_t first,
                     int64_t count) {
  F values[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) values[j] = load_some(x, kType, (first + j) * p.x_column, j < count ? coded : 0);
  const I codes = bytes_apart(quantize(across, values, 64));
  const uint32_t real = count >= 4 ? ~uint32_t{0} : count <= 0 ? 0 : (uint32_t{1} << 8 * count) - 1;
  return _mm512_maskz_and_epi32(coded, codes, _mm512_set1_epi32(static_cast<int32_t>(real)));
}

// Sixteen rows of x that are packed, or a part of their codes.
struct Packed {
  int64_t batch, first;   // the first of them
  int64_t piece, pieces;  // which part, of how many
  bool fetches;           // whether the next sixteen rows are packed after these
  float* scales;          // of the rows; null if another part writes them
  int32_t* shifts;
  uint8_t* out;  // of the first part: groups of each row, one after the other
};

EQQ_INLINE int64_t depth_of(const Runs& r) { return min64(r.size, 64); }

// `each(position, width)` takes codes that were packed.
template <class X, int kType, bool kFloatsHere, class Each>
void pack(const Int8Problem& q, const Runs& r, const Packed& a, const Each& each) {
  const Problem& p = q.p;
  const int64_t first = a.first, rows = min64(16, p.m - first), at = a.batch * p.x_batch + first * p.x_row;
  const int64_t depth = depth_of(r), item = kFloatsHere ? (kType == kFloat32 ? 4 : 2) : 1, row = a.batch * p.m + first;
  const char* x = static_cast<const char*>(p.x) + at * item;
  uint8_t* out = a.out;
  const bool beside = p.x_column == 1;
  typename X::Row all[16];
  if (kFloatsHere && !beside) rows_at<X, kType>(q, row, x, rows, all);
  float scale[16] = {0}, zero[16] = {0};
  int32_t shift[16] = {0};
  __mmask16 coded = 0;
  Quantizer quantizers[16];
  for (int64_t i = 0; i < rows; ++i) {
    if (kFloatsHere && beside) all[i] = row_at<X, kType>(q, row + i, x + i * p.x_row * item);
    if (!kFloatsHere) all[i] = X::row_at(q, row + i, at + i * p.x_row);
    scale[i] = all[i].scale;
    zero[i] = all[i].zero;
    shift[i] = all[i].shift;
    coded |= static_cast<__mmask16>(X::has_codes(all[i]) << i);
    quantizers[i] = quantizer(_mm512_set1_ps(scale[i]), _mm512_set1_ps(zero[i]), q.affine);
  }
  const Quantizer across =
      quantizer(_mm512_mask_loadu_ps(_mm512_set1_ps(1), coded, scale), _mm512_loadu_ps(zero), q.affine);
  if (a.scales != nullptr) {
    memcpy(a.scales, scale, sizeof scale);
    memcpy(a.shifts, shift, sizeof shift);
  }
  const I flip = _mm512_set1_epi8(static_cast<char>(q.form == kUnsigned ? 128 : 0));
  // Without padding between runs, codes are taken 64 at a time whatever the runs are.
  const bool whole = r.count == 1 || (r.per_block == 1 && r.size == r.real);
  const int64_t width = whole ? 64 : depth, chunks = div_up(r.padded, width);
  const bool fetches = beside && kFloatsHere && first + 32 <= p.m && a.fetches;
  for (int64_t c = chunks * a.piece / a.pieces; c < chunks * (a.piece + 1) / a.pieces; ++c) {
    int64_t from = c * 64, count = min64(64, p.k - from);
    if (!whole) {
      const int64_t run = c * depth / r.size, offset = c * depth % r.size;
      from = run_start(r, run) + offset;
      count = min64(depth, run_length(r, p.k, run) - offset);
    }
    const int64_t position = c * width;
    F square[16];  // of bytes, four in each lane
    if (kFloatsHere && !beside) {
      for (int64_t i = 0; i < width; i += 4)
        _mm512_storeu_si512(out + 16 * (position + i), columns<kType>(p, across, coded, x, from + i, count - i));
    } else {
      for (int64_t i = 0; i < 16; ++i) {
        square[i] = _mm512_setzero_ps();
        if (i >= rows || count <= 0) continue;
        const int64_t start = i * p.x_row + from * p.x_column;
        if (fetches)  // of the next panel: hardware does not prefetch so many streams
          for (int64_t j = 0; j < 64 * item; j += 64) _mm_prefetch(x + (start + 16 * p.x_row) * item + j, _MM_HINT_T1);
        if (kFloatsHere) {
          if (!(coded >> i & 1)) continue;
          F values[4];
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) values[j] = load_some(x, kType, start + 16 * j, first_few(count - 16 * j));
          square[i] = _mm512_castsi512_ps(quantize(quantizers[i], values, count));
        } else {
          alignas(64) char some[64];
          if (!beside)
            for (int64_t j = 0; j < count; ++j) some[j] = x[start + j * p.x_column];
          const __mmask64 mask = ~uint64_t{0} >> (64 - count);
          const I codes = _mm512_maskz_loadu_epi8(mask, beside ? x + start : some);
          square[i] = _mm512_castsi512_ps(_mm512_xor_si512(codes, _mm512_maskz_mov_epi8(mask, flip)));
        }
      }
      avx512::Simd::transpose(square);
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        const int order = kFloatsHere ? 4 * (i % 4) + i / 4 : i;
        if (4 * i < width) _mm512_storeu_si512(out + 16 * position + 64 * i, _mm512_castps_si512(square[order]));
      }
    }
    each(position, width);
  }
}

// The same of x of whatever type.
template <class X, class Each>
void pack_rows(const Int8Problem& q, const Runs& r, const Packed& a, const Each& each) {
  if (q.form != kFloats) return pack<X, kFloat32, false>(q, r, a, each);
  if (q.p.x_type == kFloat32) return pack<X, kFloat32, true>(q, r, a, each);
  if (q.p.x_type == kFloat16) return pack<X, kFloat16, true>(q, r, a, each);
  pack<X, kBFloat16, true>(q, r, a, each);
}

// What products of integers have vectors do with many rows of x, if `kPacks`.
template <class V>
struct Int8Pack {
  using X = Int8X<V>;

  static void pack(const Int8Problem& q, const Runs& r, int64_t batch, int64_t first, float* scales, int32_t* shifts,
                   uint8_t* out) {
    pack_rows<X>(q, r, {batch, first, 0, 1, true, scales, shifts, out}, [](int64_t, int64_t) {});
  }
  // Sums of the runs of a panel, times a factor; the sums of a run are `stride` behind those of the previous one.
  static void run_sums(const Runs& r, int32_t factor, const uint8_t* x, int64_t stride, int32_t* out) {
    for (int64_t run = 0; run < r.count; ++run, out += stride) {
      I sum = V::zero_int();
      for (int64_t i = 0; i < r.size; i += 4, x += 4 * V::L) sum = V::dot(sum, _mm512_set1_epi8(1), V::load_int(x));
      V::store(out, V::mul(sum, V::broadcast_int(factor)));
    }
  }
  // Writes sums of `count` rows of the weight, `stride` apart, times the scales of x.
  static void write(const Problem& p, int64_t base, const float* sums, int64_t stride, const float* x_scale,
                    int64_t count, int64_t lanes) {
    F square[16];
    const F scale = V::load(x_scale);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) square[i] = i < count ? V::mul(V::load(sums + i * stride), scale) : V::zero();
    write_square(p, base, count, lanes, square);
  }
};

}  // namespace
