// Integer products on AVX2. `vpmaddubsw` would saturate, so codes are widened to 16 bits, where `vpmaddwd` is exact.
#include <immintrin.h>

#include "int8/kernels.h"

namespace {

struct Avx2Int8 {
  using I = __m256i;
  using F = __m256;
  static constexpr int L = 8, kGroup = 2, kTileRows = 4, kDotRows = 4, kFewRows = 4;
  static constexpr bool kInRegisters = false, kPacks = false;

  EQQ_INLINE I dot(I acc, I w, I x) { return _mm256_add_epi32(acc, _mm256_madd_epi16(w, x)); }
  EQQ_INLINE I load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  EQQ_INLINE void store(void* p, I a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a); }
  EQQ_INLINE I zero() { return _mm256_setzero_si256(); }
  EQQ_INLINE I add(I a, I b) { return _mm256_add_epi32(a, b); }
  EQQ_INLINE I spread(int32_t a) { return _mm256_set1_epi32(a); }
  EQQ_INLINE I mul(I a, I b) { return _mm256_mullo_epi32(a, b); }
  EQQ_INLINE int32_t sum(I a) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
  }
  EQQ_INLINE I word(const uint8_t* p) {
    int32_t a;
    memcpy(&a, p, 4);
    return spread(a);
  }
  EQQ_INLINE F load_f(const float* p) { return _mm256_loadu_ps(p); }
  EQQ_INLINE void store_f(float* p, F a) { _mm256_storeu_ps(p, a); }
  EQQ_INLINE F spread_f(float a) { return _mm256_set1_ps(a); }
  EQQ_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  EQQ_INLINE float sum_f(F a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  EQQ_INLINE F to_f(I a) { return _mm256_cvtepi32_ps(a); }
  EQQ_INLINE float from_half(uint16_t bits) { return _cvtsh_ss(bits); }
  EQQ_INLINE uint16_t to_half(float value) { return _cvtss_sh(value, 0); }
  static constexpr auto scales = decode_scales_avx2;
};

using Kernels8 = Int8Kernels<Avx2Int8>;

}  // namespace

extern const Int8Kernel kInt8Avx2 = {Kernels8::plan, Kernels8::prepare, Kernels8::run};
