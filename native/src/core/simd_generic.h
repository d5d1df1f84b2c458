// Plain C++ for every machine. Vectors are GCC's and Clang's own, which become whatever the compiler may use.
#pragma once

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "core/simd.h"

namespace generic {
namespace {

struct Simd : SimdBase {
  typedef float F __attribute__((vector_size(16), aligned(16)));
  typedef int32_t I __attribute__((vector_size(16), aligned(16)));
  typedef uint32_t Codes __attribute__((vector_size(16), aligned(16)));
  struct Table {
    float values[16];
  };
  using Lanes = int;
  static constexpr int L = 4;
  static constexpr bool kLooksUpBytes = true, kScalesTables = false;
  static constexpr int kTileRows = 4, kTileRows1 = 6, kWideRows = 2, kDotRows = 2, kFewTile = 4, kFewGroup = 2,
                       kFewRows = 3;
  static constexpr int kGroup = 2, kInt8TileRows = 4, kInt8DotRows = 2, kInt8FewRows = 3;
  static constexpr auto scales = decode_scales;

  EQQ_INLINE F load(const void* p) {
    F a;
    memcpy(&a, p, sizeof a);
    return a;
  }
  EQQ_INLINE void store(float* p, F a) { memcpy(p, &a, sizeof a); }
  EQQ_INLINE F broadcast(float a) { return F{a, a, a, a}; }
  EQQ_INLINE F zero() { return F{0, 0, 0, 0}; }
  EQQ_INLINE F add(F a, F b) { return a + b; }
  EQQ_INLINE F sub(F a, F b) { return a - b; }
  EQQ_INLINE F mul(F a, F b) { return a * b; }
  EQQ_INLINE F fma(F a, F b, F c) { return a * b + c; }
  EQQ_INLINE float sum(F a) { return (a[0] + a[2]) + (a[1] + a[3]); }
  EQQ_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

  EQQ_INLINE I load_int(const void* p) {
    I a;
    memcpy(&a, p, sizeof a);
    return a;
  }
  EQQ_INLINE void store(void* p, I a) { memcpy(p, &a, sizeof a); }
  EQQ_INLINE I zero_int() { return I{0, 0, 0, 0}; }
  EQQ_INLINE I broadcast_int(int32_t a) { return I{a, a, a, a}; }
  EQQ_INLINE I add(I a, I b) { return a + b; }
  EQQ_INLINE I mul(I a, I b) { return a * b; }
  EQQ_INLINE int32_t sum(I a) { return a[0] + a[1] + a[2] + a[3]; }
  EQQ_INLINE F to_float(I a) { return __builtin_convertvector(a, F); }
  // Every x86-64 machine has SSE2, whose one instruction for it is worth an exception.
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

  // The bytes of a lane are numbered from the low end.
  EQQ_INLINE Codes codes(const uint8_t* p) {
    Codes a;
    memcpy(&a, p, sizeof a);
    if (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__) return a;
    for (int i = 0; i < L; ++i)
      a[i] = p[4 * i] | static_cast<uint32_t>(p[4 * i + 1]) << 8 | static_cast<uint32_t>(p[4 * i + 2]) << 16 |
             static_cast<uint32_t>(p[4 * i + 3]) << 24;
    return a;
  }
  template <int n>
  EQQ_INLINE Codes shift(Codes a) {
    return a >> n;
  }
  EQQ_INLINE Codes shift(Codes a, int n) { return a >> static_cast<uint32_t>(n); }
  EQQ_INLINE Table table(const float* p) {
    Table t;
    memcpy(t.values, p, sizeof t.values);
    return t;
  }
  EQQ_INLINE F lookup(const Table& t, Codes a) {
    return F{t.values[a[0] & 15], t.values[a[1] & 15], t.values[a[2] & 15], t.values[a[3] & 15]};
  }
  EQQ_INLINE Table scale(const Table& t, F s) {
    Table r;
    for (int i = 0; i < 16; ++i) r.values[i] = t.values[i] * s[0];
    return r;
  }
  EQQ_INLINE Table offset(const Table& t, F z) {
    Table r;
    for (int i = 0; i < 16; ++i) r.values[i] = t.values[i] - z[0];
    return r;
  }

  EQQ_INLINE Lanes lanes(int h, int n) { return h * n / 4; }
  EQQ_INLINE F spread(const float* p, Lanes h) { return broadcast(p[h]); }
  EQQ_INLINE F gather(const float* p, const int32_t* indices) {
    return F{p[indices[0]], p[indices[1]], p[indices[2]], p[indices[3]]};
  }
  EQQ_INLINE F masked(F a, const int32_t* m) {
    return F{m[0] ? a[0] : 0, m[1] ? a[1] : 0, m[2] ? a[2] : 0, m[3] ? a[3] : 0};
  }

  EQQ_INLINE F integers(const uint8_t* p) {
    return F{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]), static_cast<float>(p[3])};
  }
  EQQ_INLINE F bytes256(const uint8_t* p, const float* table) {
    return F{table[p[0]], table[p[1]], table[p[2]], table[p[3]]};
  }
  EQQ_INLINE F bytes16(const uint8_t* p, const float* table) { return bytes256(p, table); }
  // A number without sign of `mantissa` bits of mantissa; `e4m3`, `e5m2` and so on differ in that and in the bias. No
  // subnormal float32 is ever made of it, so it does not matter if the machine flushes them.
  EQQ_INLINE float minifloat(uint32_t code, int mantissa, int bias) {
    const uint32_t exponent = code >> mantissa;
    if (exponent == 0) return static_cast<float>(code) * from_bits((127 + 1 - bias - mantissa) << 23);
    return from_bits((code << (23 - mantissa)) + (static_cast<uint32_t>(127 - bias) << 23));
  }
  EQQ_INLINE float one_e4m3(uint8_t code) {
    const float value = (code & 127) == 127 ? __builtin_nanf("") : minifloat(code & 127, 3, 7);
    return code & 128 ? -value : value;
  }
  EQQ_INLINE float one_f16(uint16_t bits) {
    const uint32_t magnitude = bits & 0x7fff;
    const float value =
        magnitude >= 0x7c00 ? from_bits(0x7f800000 | (magnitude & 0x3ff) << 13) : minifloat(magnitude, 10, 15);
    return bits & 0x8000 ? -value : value;
  }
  EQQ_INLINE float one_e5m2(uint8_t code) { return one_f16(static_cast<uint16_t>(code << 8)); }
  EQQ_INLINE float one_e8m0(uint8_t code) {
    return from_bits(code == 0 ? 1u << 22 : code == 255 ? 0x7fc00000u : static_cast<uint32_t>(code) << 23);
  }
  EQQ_INLINE F e4m3(const uint8_t* p) { return F{one_e4m3(p[0]), one_e4m3(p[1]), one_e4m3(p[2]), one_e4m3(p[3])}; }
  EQQ_INLINE F e5m2(const uint8_t* p) { return F{one_e5m2(p[0]), one_e5m2(p[1]), one_e5m2(p[2]), one_e5m2(p[3])}; }
  EQQ_INLINE F e8m0(const uint8_t* p) { return F{one_e8m0(p[0]), one_e8m0(p[1]), one_e8m0(p[2]), one_e8m0(p[3])}; }
  EQQ_INLINE F ue4m4(const uint8_t* p) {
    return F{minifloat(p[0], 4, 8), minifloat(p[1], 4, 8), minifloat(p[2], 4, 8), minifloat(p[3], 4, 8)};
  }
  EQQ_INLINE uint16_t sixteen(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }
  EQQ_INLINE F bf16(const uint8_t* p) {
    return F{one_bf16(sixteen(p)), one_bf16(sixteen(p + 2)), one_bf16(sixteen(p + 4)), one_bf16(sixteen(p + 6))};
  }
  EQQ_INLINE F f16(const uint8_t* p) {
    return F{one_f16(sixteen(p)), one_f16(sixteen(p + 2)), one_f16(sixteen(p + 4)), one_f16(sixteen(p + 6))};
  }
  EQQ_INLINE uint16_t one_to_f16(float value) {
    const uint32_t bits = to_bits(value), magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);  // at least 65520, which rounds up
    if (magnitude < 0x38800000) {                                              // subnormal: in steps of 2^-24
      // Adding a half rounds at that step, and leaves the steps in the low bits.
      return static_cast<uint16_t>(sign | (to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000));
    }
    return static_cast<uint16_t>(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
  }
};

}  // namespace
}  // namespace generic
