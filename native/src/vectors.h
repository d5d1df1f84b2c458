// What kernels share that multiply digits on AVX-512: integers of a weight, digits, and vectors of x and y.
#ifndef EQQUANT_VECTORS_H_
#define EQQUANT_VECTORS_H_

#include <immintrin.h>
#include <stdint.h>

#include "runs.h"

namespace {

// The power of two that makes a table integers of a byte, or 0.
EQQ_INLINE int64_t integer_factor(const Problem& p) {
  if (p.bits == 8) return p.values == kValueInteger && p.table[0] >= -255 && p.table[0] <= 0 ? 1 : 0;
  for (int64_t factor = 1; factor <= (p.zero_point == nullptr ? 8 : 1); factor *= 2) {
    float low = p.table[0], high = low;
    bool whole = true;
    for (int i = 0; i < 1 << p.bits; ++i) {
      const float value = p.table[i] * static_cast<float>(factor);
      whole = whole && value >= -255 && value <= 255 && value == static_cast<float>(static_cast<int>(value));
      low = value < low ? value : low;
      high = value > high ? value : high;
    }
    if (whole && high - low <= 255) return factor;
  }
  return 0;
}

EQQ_INLINE int32_t lowest_integer(const Problem& p, int64_t factor) {
  float low = p.table[0];
  for (int i = 1; i < (p.bits == 8 ? 1 : 1 << p.bits); ++i) low = p.table[i] < low ? p.table[i] : low;
  return static_cast<int32_t>(low * static_cast<float>(factor));
}

// Codes of whatever bits, upper ones ignored, to bytes without a sign.
EQQ_INLINE __m512i integers_table(const Problem& p, int64_t factor) {
  alignas(64) uint8_t table[64];
  const int32_t lowest = lowest_integer(p, factor);
  for (int i = 0; i < 64; ++i)
    table[i] = p.bits == 8 ? 0 : static_cast<uint8_t>(p.table[i & ((1 << p.bits) - 1)] * static_cast<float>(factor) - static_cast<float>(lowest));
  return _mm512_load_si512(table);
}

// Of four integers in each quarter first all low bytes, then all second ones, and so on.
EQQ_INLINE __m512i bytes_apart(__m512i integers) {
  return _mm512_shuffle_epi8(integers, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
}

// The same of integers as digits of a byte with a sign, which a carry makes of bytes without one.
EQQ_INLINE __m512i digits_apart(__m512i integers) {
  const __m512i flip = _mm512_set1_epi32(static_cast<int>(0x80808080));
  return bytes_apart(_mm512_xor_si512(_mm512_add_epi32(integers, flip), flip));
}

EQQ_INLINE __mmask16 first_few(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : static_cast<__mmask16>((1 << n) - 1); }

// Sixteen numbers of x in a row, from element `at` on; those that the mask leaves out are zero, and not read.
EQQ_INLINE __m512 load_some(const void* x, int type, int64_t at, __mmask16 mask) {
  if (type == kFloat32) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(x) + at);
  const __m256i half = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(x) + at);
  return type == kFloat16 ? _mm512_cvtph_ps(half) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Likewise to y, rounded to its type.
EQQ_INLINE void store_some(const Problem& p, int64_t at, __m512 value, __mmask16 mask) {
  if (p.x_type == kFloat32) return _mm512_mask_storeu_ps(static_cast<float*>(p.y) + at, mask, value);
  __m256i half;
  if (p.x_type == kFloat16) {
    half = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT);
  } else {
    const __m512i bits = _mm512_castps_si512(value), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i near = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    near = _mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), _mm512_or_si512(bits, _mm512_set1_epi32(1 << 22)));
    half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(near, 16));
  }
  _mm256_mask_storeu_epi16(static_cast<uint16_t*>(p.y) + at, mask, half);
}

}  // namespace

#endif  // EQQUANT_VECTORS_H_
