// Rows of x and squares of y on AVX-512, sixteen numbers at a time, of whatever type.
#pragma once

#include "core/simd_avx512.h"

namespace {

// Of four integers in each quarter first all low bytes, then all second ones, and so on.
EQQ_INLINE __m512i bytes_apart(__m512i integers) {
  return _mm512_shuffle_epi8(
      integers, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
}

// Groups of four bytes, or integers: first each fourth one from the first on, then from the second on.
EQQ_INLINE __m512i fours_in_order(__m512i a) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), a);
}

// The larger of some magnitudes, as bits, which are in their order, and those of numbers. NaN is the largest.
EQQ_INLINE __m512i larger_magnitudes(__m512i most, __m512 numbers) {
  return _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(numbers), _mm512_set1_epi32(0x7fffffff)));
}

EQQ_INLINE __mmask16 first_few(int64_t n) {
  return n >= 16 ? 0xffff : n <= 0 ? 0 : static_cast<__mmask16>((1 << n) - 1);
}

// Sixteen numbers of x in a row, from element `at` on; masked ones are zero, and not read.
EQQ_INLINE __m512 load_some(const void* x, int type, int64_t at, __mmask16 mask) {
  if (type == kFloat32) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(x) + at);
  const __m256i half = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(x) + at);
  return type == kFloat16 ? _mm512_cvtph_ps(half)
                          : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Likewise to y, rounded to its type. Whole vectors go without a mask: with one, AMD's processors take longer.
EQQ_INLINE void store_some(const Problem& p, int64_t at, __m512 value, __mmask16 mask) {
  if (p.x_type == kFloat32) {
    float* y = static_cast<float*>(p.y) + at;
    return mask == 0xffff ? _mm512_storeu_ps(y, value) : _mm512_mask_storeu_ps(y, mask, value);
  }
  __m256i half;
  if (p.x_type == kFloat16) {
    half = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
  } else {
    const __m512i bits = _mm512_castps_si512(value),
                  odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i near = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    near = _mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q),
                                 _mm512_or_si512(bits, _mm512_set1_epi32(1 << 22)));
    half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(near, 16));
  }
  uint16_t* y = static_cast<uint16_t*>(p.y) + at;
  mask == 0xffff ? _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), half) : _mm256_mask_storeu_epi16(y, mask, half);
}

// Writes a square of results, of rows of the weight and sixteen rows of x; `count` and `lanes` of them are real.
EQQ_INLINE void write_square(const Problem& p, int64_t base, int64_t count, int64_t lanes, __m512* square) {
  // Most squares are whole and of float32: without a condition for each store, all sixteen vectors stay in registers.
  if (p.x_type == kFloat32 && p.y_column == 1 && count == 16 && lanes == 16) {
    avx512::Simd::transpose(square);
    float* y = static_cast<float*>(p.y) + base;
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_storeu_ps(y + i * p.y_row, square[i]);
    return;
  }
  if (p.y_row == 1) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
      if (i < count) store_some(p, base + i * p.y_column, square[i], first_few(lanes));
  } else {
    avx512::Simd::transpose(square);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
      if (i < lanes) store_some(p, base + i * p.y_row, square[i], first_few(count));
  }
}

}  // namespace
