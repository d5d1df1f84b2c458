// Integer products in plain C++. Every x86-64 machine has SSE2, whose one instruction for it is worth an exception.
#include "int8/kernels.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace {

struct Generic8 {
  typedef int32_t I __attribute__((vector_size(16), aligned(16)));
  typedef float F __attribute__((vector_size(16), aligned(16)));
  static constexpr int L = 4, kGroup = 2, kTileRows = 4, kDotRows = 2, kFewRows = 3;
  static constexpr bool kInRegisters = false, kPacks = false;

  EQQ_INLINE I dot(I acc, I w, I x) {
#ifdef __SSE2__
    return acc + reinterpret_cast<I>(_mm_madd_epi16(reinterpret_cast<__m128i>(w), reinterpret_cast<__m128i>(x)));
#else
    int16_t ws[8], xs[8];
    memcpy(ws, &w, sizeof w);
    memcpy(xs, &x, sizeof x);
    for (int i = 0; i < 4; ++i) acc[i] += ws[2 * i] * xs[2 * i] + ws[2 * i + 1] * xs[2 * i + 1];
    return acc;
#endif
  }
  EQQ_INLINE I load(const void* p) {
    I a;
    memcpy(&a, p, sizeof a);
    return a;
  }
  EQQ_INLINE void store(void* p, I a) { memcpy(p, &a, sizeof a); }
  EQQ_INLINE I zero() { return I{0, 0, 0, 0}; }
  EQQ_INLINE I add(I a, I b) { return a + b; }
  EQQ_INLINE I spread(int32_t a) { return I{a, a, a, a}; }
  EQQ_INLINE I mul(I a, I b) { return a * b; }
  EQQ_INLINE int32_t sum(I a) { return a[0] + a[1] + a[2] + a[3]; }
  EQQ_INLINE I word(const uint8_t* p) {
    int32_t a;
    memcpy(&a, p, 4);
    return spread(a);
  }
  EQQ_INLINE F load_f(const float* p) {
    F a;
    memcpy(&a, p, sizeof a);
    return a;
  }
  EQQ_INLINE void store_f(float* p, F a) { memcpy(p, &a, sizeof a); }
  EQQ_INLINE F spread_f(float a) { return F{a, a, a, a}; }
  EQQ_INLINE F fma(F a, F b, F c) { return a * b + c; }
  EQQ_INLINE float sum_f(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }
  EQQ_INLINE F to_f(I a) { return __builtin_convertvector(a, F); }
  EQQ_INLINE float from_half(uint16_t bits) { return half_to_float(bits); }
  EQQ_INLINE uint16_t to_half(float value) { return float_to_half(value); }
  static constexpr auto scales = decode_scales_generic;
};

using Kernels8 = Int8Kernels<Generic8>;

}  // namespace

extern const Int8Kernel kInt8Generic = {Kernels8::plan, Kernels8::prepare, Kernels8::run};
