// What integer products on AVX-512 share, with and without VNNI: all but the product.
#ifndef EQQUANT_INT8_AVX512_H_
#define EQQUANT_INT8_AVX512_H_

#include <immintrin.h>

#include "int8/kernels.h"

namespace {

struct Avx512Lanes {
  using I = __m512i;
  using F = __m512;
  static constexpr int L = 16, kTileRows = 12, kDotRows = 4, kFewRows = 4, kRegisterRows = 8;
  static constexpr bool kInRegisters = false;

  EQQ_INLINE I load(const void* p) { return _mm512_loadu_si512(p); }
  EQQ_INLINE void store(void* p, I a) { _mm512_storeu_si512(p, a); }
  EQQ_INLINE I zero() { return _mm512_setzero_si512(); }
  EQQ_INLINE I add(I a, I b) { return _mm512_add_epi32(a, b); }
  EQQ_INLINE I spread(int32_t a) { return _mm512_set1_epi32(a); }
  EQQ_INLINE I mul(I a, I b) { return _mm512_mullo_epi32(a, b); }
  EQQ_INLINE int32_t sum(I a) { return _mm512_reduce_add_epi32(a); }
  EQQ_INLINE I word(const uint8_t* p) {
    int32_t a;
    memcpy(&a, p, 4);
    return spread(a);
  }
  EQQ_INLINE F load_f(const float* p) { return _mm512_loadu_ps(p); }
  EQQ_INLINE F zero_f() { return _mm512_setzero_ps(); }
  EQQ_INLINE F add_f(F a, F b) { return _mm512_add_ps(a, b); }
  EQQ_INLINE I load_some(const uint8_t* p, int64_t n) {
    return _mm512_maskz_loadu_epi8(n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1, p);
  }
  template <int kBits>
  EQQ_INLINE I codes(I bytes, int plane) {
    if (kBits == 8) return bytes;
    return _mm512_and_si512(_mm512_srli_epi32(bytes, static_cast<unsigned>(plane * kBits)),
                            _mm512_set1_epi8((1 << (kBits % 8)) - 1));
  }
  EQQ_INLINE I table(const uint8_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  EQQ_INLINE I lookup(I table, I codes) { return _mm512_shuffle_epi8(table, codes); }
  EQQ_INLINE void store_f(float* p, F a) { _mm512_storeu_ps(p, a); }
  EQQ_INLINE F spread_f(float a) { return _mm512_set1_ps(a); }
  EQQ_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  EQQ_INLINE float sum_f(F a) { return _mm512_reduce_add_ps(a); }
  EQQ_INLINE F to_f(I a) { return _mm512_cvtepi32_ps(a); }
  EQQ_INLINE F lanes_f(const float* p, int n) {
    const I which = n == 4 ? _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3)
                           : _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    return _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(p)), which);
  }
  EQQ_INLINE I lanes(const int32_t* p, int n) {
    return _mm512_castps_si512(lanes_f(reinterpret_cast<const float*>(p), n));
  }
  EQQ_INLINE float from_half(uint16_t bits) { return _cvtsh_ss(bits); }
  EQQ_INLINE uint16_t to_half(float value) { return _cvtss_sh(value, 0); }
  static constexpr auto scales = decode_scales_avx512;
};

}  // namespace

#endif  // EQQUANT_INT8_AVX512_H_
