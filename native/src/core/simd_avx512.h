// AVX-512: F, BW, DQ and VL. A code of at most four bits is looked up by one permutation, which reads the low four bits
// of each lane and no others, so codes need neither a mask nor widening.
#pragma once

#include <immintrin.h>

#include "core/simd.h"

namespace avx512 {
namespace {

struct Simd : SimdBase {
  using F = __m512;
  using I = __m512i;
  using Codes = __m512i;
  using Table = __m512;
  using Lanes = __m512i;
  static constexpr int L = 16;
  static constexpr bool kScalesTables = true, kSumsRows = true, kFusesFew = true;
  static constexpr int kTileRows = 12, kTileRows1 = 24, kWideRows = 6, kDotRows = 4, kFewTile = 4, kFewGroup = 6,
                       kFewRows = 12;
  static constexpr int kFusedGroup = 5, kFusedRows = 24, kDirectRows = 8, kMixedRows = 4;
  static constexpr int kGroup = 2, kInt8TileRows = 12, kInt8DotRows = 4, kInt8FewRows = 4, kRegisterRows = 8;
  static constexpr auto scales = decode_scales;

  EQQ_INLINE F load(const void* p) { return _mm512_loadu_ps(p); }
  EQQ_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  EQQ_INLINE F broadcast(float a) { return _mm512_set1_ps(a); }
  EQQ_INLINE F zero() { return _mm512_setzero_ps(); }
  EQQ_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  EQQ_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  EQQ_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  EQQ_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  EQQ_INLINE float sum(F a) { return _mm512_reduce_add_ps(a); }
  EQQ_INLINE void sum_rows(const F* a, float* out) {
    const F ab = add(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    const F cd = add(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    const F all = add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }
  EQQ_INLINE void transpose(F* a) {
    F b[16], c[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    // Quarter `l` of `c[4 g + q]` holds column `4 l + q` of rows `4 g` to `4 g + 3`.
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m512d low = _mm512_castps_pd(b[i + h]), high = _mm512_castps_pd(b[i + h + 2]);
        c[i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
        c[i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
      }
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const F even0 = _mm512_shuffle_f32x4(c[q], c[4 + q], 0x88), odd0 = _mm512_shuffle_f32x4(c[q], c[4 + q], 0xdd);
      const F even1 = _mm512_shuffle_f32x4(c[8 + q], c[12 + q], 0x88),
              odd1 = _mm512_shuffle_f32x4(c[8 + q], c[12 + q], 0xdd);
      a[q] = _mm512_shuffle_f32x4(even0, even1, 0x88);
      a[4 + q] = _mm512_shuffle_f32x4(odd0, odd1, 0x88);
      a[8 + q] = _mm512_shuffle_f32x4(even0, even1, 0xdd);
      a[12 + q] = _mm512_shuffle_f32x4(odd0, odd1, 0xdd);
    }
  }
  EQQ_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

  EQQ_INLINE I load_int(const void* p) { return _mm512_loadu_si512(p); }
  EQQ_INLINE I load_int(const uint8_t* p, int64_t n) {
    return _mm512_maskz_loadu_epi8(n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1, p);
  }
  EQQ_INLINE void store(void* p, I a) { _mm512_storeu_si512(p, a); }
  EQQ_INLINE I zero_int() { return _mm512_setzero_si512(); }
  EQQ_INLINE I broadcast_int(int32_t a) { return _mm512_set1_epi32(a); }
  EQQ_INLINE I add(I a, I b) { return _mm512_add_epi32(a, b); }
  EQQ_INLINE I mul(I a, I b) { return _mm512_mullo_epi32(a, b); }
  EQQ_INLINE int32_t sum(I a) { return _mm512_reduce_add_epi32(a); }
  EQQ_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  EQQ_INLINE I dot(I acc, I w, I x) { return _mm512_add_epi32(acc, _mm512_madd_epi16(w, x)); }

  EQQ_INLINE Codes codes(const uint8_t* p) { return load_int(p); }
  template <int n>
  EQQ_INLINE Codes shift(Codes a) {
    return n == 0 ? a : _mm512_srli_epi32(a, n);
  }
  EQQ_INLINE Codes shift(Codes a, int n) { return _mm512_srlv_epi32(a, broadcast_int(n)); }
  EQQ_INLINE Table table(const float* p) { return load(p); }
  EQQ_INLINE F lookup(const Table& t, Codes a) { return _mm512_permutexvar_ps(a, t); }
  EQQ_INLINE Table scale(const Table& t, F s) { return mul(t, s); }
  EQQ_INLINE Table offset(const Table& t, F z) { return sub(t, z); }

  EQQ_INLINE Lanes lanes(int, int n) {
    return n == 4 ? _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)
                  : _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  }
  EQQ_INLINE F spread(const float* p, Lanes lanes) {
    return _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(p)), lanes);
  }
  EQQ_INLINE I spread_int(const int32_t* p, Lanes lanes) {
    return _mm512_castps_si512(spread(reinterpret_cast<const float*>(p), lanes));
  }
  EQQ_INLINE F gather(const float* p, const int32_t* indices) { return _mm512_i32gather_ps(load_int(indices), p, 4); }
  EQQ_INLINE F masked(F a, const int32_t* m) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), load_int(m)));
  }

  EQQ_INLINE __m128i sixteen(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  EQQ_INLINE __m256i wide(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  EQQ_INLINE F integers(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(sixteen(p))); }
  EQQ_INLINE F bytes256(const uint8_t* p, const float* table) {
    return _mm512_i32gather_ps(_mm512_cvtepu8_epi32(sixteen(p)), table, 4);
  }
  EQQ_INLINE F bytes16(const uint8_t* p, const float* t) { return lookup(table(t), _mm512_cvtepu8_epi32(sixteen(p))); }
  // Floats of eight bits are floats of sixteen, but for the width and the bias of the exponent. That holds for
  // subnormal numbers too, and F16C takes them whatever the floating-point environment says.
  EQQ_INLINE F e4m3(const uint8_t* p) {
    const __m256i a = _mm256_cvtepi8_epi16(sixteen(p));
    const __m256i half = _mm256_and_si256(_mm256_slli_epi16(a, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
    // Code 127 is NaN, with either sign, and no infinity.
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(a, _mm256_set1_epi16(127)), _mm256_set1_epi16(127));
    return _mm512_mask_blend_ps(nan, _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f)),
                                _mm512_set1_ps(__builtin_nanf("")));
  }
  EQQ_INLINE F e5m2(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(sixteen(p)), 8));
  }
  EQQ_INLINE F ue4m4(const uint8_t* p) {
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(sixteen(p)), 6)),
                         _mm512_set1_ps(128.0f));
  }
  EQQ_INLINE F e8m0(const uint8_t* p) {
    const I a = _mm512_cvtepu8_epi32(sixteen(p));
    I bits = _mm512_slli_epi32(a, 23);
    bits =
        _mm512_mask_blend_epi32(_mm512_cmpeq_epi32_mask(a, _mm512_setzero_si512()), bits, _mm512_set1_epi32(1 << 22));
    bits = _mm512_mask_blend_epi32(_mm512_cmpeq_epi32_mask(a, _mm512_set1_epi32(255)), bits,
                                   _mm512_set1_epi32(0x7fc00000));
    return _mm512_castsi512_ps(bits);
  }
  EQQ_INLINE F bf16(const uint8_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(wide(p)), 16));
  }
  EQQ_INLINE F f16(const uint8_t* p) { return _mm512_cvtph_ps(wide(p)); }
  EQQ_INLINE float one_f16(uint16_t bits) { return _cvtsh_ss(bits); }
  EQQ_INLINE uint16_t one_to_f16(float value) { return _cvtss_sh(value, 0); }
};

}  // namespace
}  // namespace avx512
