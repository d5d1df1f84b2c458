// NEON, which every aarch64 machine has. A table of sixteen floats is looked up byte by byte: `tbl` looks sixteen codes
// up at once, in one table for each byte of a float, and the four results are transposed to four vectors of floats.
#pragma once

#include <arm_neon.h>

#include "core/simd.h"

namespace neon {
namespace {

struct Simd : SimdBase {
  using F = float32x4_t;
  using I = int32x4_t;
  using Codes = uint8x16_t;
  struct Table {
    F values[4];
    uint8x16_t bytes[4];  // byte 0 of each value, byte 1 of each, and so on
  };
  using Lanes = int;
  static constexpr int L = 4;
  static constexpr bool kScalesTables = false;
  static constexpr int kTileRows = 10, kTileRows1 = 20, kWideRows = 5, kDotRows = 2, kFewTile = 4, kFewGroup = 5,
                       kFewRows = 12;
  static constexpr int kGroup = 2, kInt8TileRows = 8, kInt8DotRows = 4, kInt8FewRows = 4;
  static constexpr auto scales = decode_scales;

  EQQ_INLINE F load(const void* p) { return vreinterpretq_f32_u8(vld1q_u8(static_cast<const uint8_t*>(p))); }
  EQQ_INLINE void store(float* p, F a) { vst1q_f32(p, a); }
  EQQ_INLINE F broadcast(float a) { return vdupq_n_f32(a); }
  EQQ_INLINE F zero() { return vdupq_n_f32(0.0f); }
  EQQ_INLINE F add(F a, F b) { return vaddq_f32(a, b); }
  EQQ_INLINE F sub(F a, F b) { return vsubq_f32(a, b); }
  EQQ_INLINE F mul(F a, F b) { return vmulq_f32(a, b); }
  EQQ_INLINE F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  EQQ_INLINE float sum(F a) { return vaddvq_f32(a); }
  EQQ_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

  EQQ_INLINE I load_int(const void* p) { return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(p))); }
  EQQ_INLINE void store(void* p, I a) { vst1q_u8(static_cast<uint8_t*>(p), vreinterpretq_u8_s32(a)); }
  EQQ_INLINE I zero_int() { return vdupq_n_s32(0); }
  EQQ_INLINE I broadcast_int(int32_t a) { return vdupq_n_s32(a); }
  EQQ_INLINE I add(I a, I b) { return vaddq_s32(a, b); }
  EQQ_INLINE I mul(I a, I b) { return vmulq_s32(a, b); }
  EQQ_INLINE int32_t sum(I a) { return vaddvq_s32(a); }
  EQQ_INLINE F to_float(I a) { return vcvtq_f32_s32(a); }
  EQQ_INLINE I dot(I acc, I w, I x) {
    const int16x8_t a = vreinterpretq_s16_s32(w), b = vreinterpretq_s16_s32(x);
    return vaddq_s32(acc, vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b)));
  }

  // Sixteen bytes, and how far lanes of 32 bits are to be shifted: `lookup` shifts, since it looks bytes up, not lanes.
  template <int n>
  struct Shifted {
    Codes bytes;
  };
  EQQ_INLINE Codes codes(const uint8_t* p) { return vld1q_u8(p); }
  template <int n>
  EQQ_INLINE Shifted<n> shift(Codes a) {
    return {a};
  }
  EQQ_INLINE Codes shift(Codes a, int n) { return vshlq_u8(a, vdupq_n_s8(static_cast<int8_t>(-n))); }
  EQQ_INLINE Table split(F a, F b, F c, F d) {
    const uint16x8_t ab = vreinterpretq_u16_f32(a), low = vuzp1q_u16(ab, vreinterpretq_u16_f32(b));
    const uint16x8_t high = vuzp2q_u16(ab, vreinterpretq_u16_f32(b)), cd = vreinterpretq_u16_f32(c);
    const uint8x16_t low0 = vreinterpretq_u8_u16(low), high0 = vreinterpretq_u8_u16(high);
    const uint8x16_t low1 = vreinterpretq_u8_u16(vuzp1q_u16(cd, vreinterpretq_u16_f32(d)));
    const uint8x16_t high1 = vreinterpretq_u8_u16(vuzp2q_u16(cd, vreinterpretq_u16_f32(d)));
    return {{a, b, c, d},
            {vuzp1q_u8(low0, low1), vuzp2q_u8(low0, low1), vuzp1q_u8(high0, high1), vuzp2q_u8(high0, high1)}};
  }
  EQQ_INLINE Table table(const float* p) { return split(load(p), load(p + 4), load(p + 8), load(p + 12)); }
  EQQ_INLINE Table scale(const Table& t, F s) {
    return split(mul(t.values[0], s), mul(t.values[1], s), mul(t.values[2], s), mul(t.values[3], s));
  }
  EQQ_INLINE Table offset(const Table& t, F z) {
    return split(sub(t.values[0], z), sub(t.values[1], z), sub(t.values[2], z), sub(t.values[3], z));
  }
  // The values of bytes `n / 8`, `n / 8 + 4`, ..., the codes of which begin at bit `n % 8`. Callers need all bytes of a
  // lane. All four begin with the same lookups, and the compiler does those once.
  template <int n>
  EQQ_INLINE F lookup(const Table& t, Shifted<n> a) {
    const uint8x16_t codes = vandq_u8(n % 8 ? vshrq_n_u8(a.bytes, n % 8 ? n % 8 : 1) : a.bytes, vdupq_n_u8(15));
    const uint8x16_t b0 = vqtbl1q_u8(t.bytes[0], codes), b1 = vqtbl1q_u8(t.bytes[1], codes);
    const uint8x16_t b2 = vqtbl1q_u8(t.bytes[2], codes), b3 = vqtbl1q_u8(t.bytes[3], codes);
    constexpr bool kOdd = n / 8 % 2;
    const uint16x8_t low = vreinterpretq_u16_u8(kOdd ? vtrn2q_u8(b0, b1) : vtrn1q_u8(b0, b1));
    const uint16x8_t high = vreinterpretq_u16_u8(kOdd ? vtrn2q_u8(b2, b3) : vtrn1q_u8(b2, b3));
    return vreinterpretq_f32_u16(n / 16 ? vtrn2q_u16(low, high) : vtrn1q_u16(low, high));
  }

  EQQ_INLINE Lanes lanes(int h, int n) { return h * n / 4; }
  EQQ_INLINE F spread(const float* p, Lanes h) { return vld1q_dup_f32(p + h); }
  EQQ_INLINE F gather(const float* p, const int32_t* i) { return F{p[i[0]], p[i[1]], p[i[2]], p[i[3]]}; }
  EQQ_INLINE F masked(F a, const int32_t* m) {
    return vreinterpretq_f32_s32(vandq_s32(vreinterpretq_s32_f32(a), vld1q_s32(m)));
  }

  EQQ_INLINE uint8x8_t four(const uint8_t* p) {
    uint32_t word;
    memcpy(&word, p, 4);
    return vcreate_u8(word);
  }
  EQQ_INLINE uint16x4_t wide(const uint8_t* p) { return vreinterpret_u16_u8(vld1_u8(p)); }
  EQQ_INLINE uint16x4_t widened(const uint8_t* p) { return vget_low_u16(vmovl_u8(four(p))); }
  EQQ_INLINE F halves(uint16x4_t a) { return vcvt_f32_f16(vreinterpret_f16_u16(a)); }
  EQQ_INLINE F integers(const uint8_t* p) { return vcvtq_f32_u32(vmovl_u16(widened(p))); }
  EQQ_INLINE F bytes256(const uint8_t* p, const float* table) {
    return F{table[p[0]], table[p[1]], table[p[2]], table[p[3]]};
  }
  EQQ_INLINE F bytes16(const uint8_t* p, const float* table) { return bytes256(p, table); }
  // Floats of eight bits are floats of sixteen, but for the width and the bias of the exponent. That holds for
  // subnormal numbers too, and their conversion takes them whatever the floating-point environment says.
  EQQ_INLINE F e4m3(const uint8_t* p) {
    const int16x4_t a = vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four(p))));
    const uint16x4_t half = vand_u16(vreinterpret_u16_s16(vshl_n_s16(a, 7)), vdup_n_u16(0xbf80));
    // Code 127 is NaN, with either sign, and no infinity.
    const uint16x4_t nan = vceq_s16(vand_s16(a, vdup_n_s16(127)), vdup_n_s16(127));
    const int32x4_t nans = vmovl_s16(vreinterpret_s16_u16(nan));
    return vreinterpretq_f32_s32(vorrq_s32(vreinterpretq_s32_f32(vmulq_n_f32(halves(half), 256.0f)), nans));
  }
  EQQ_INLINE F e5m2(const uint8_t* p) { return halves(vshl_n_u16(widened(p), 8)); }
  EQQ_INLINE F ue4m4(const uint8_t* p) { return vmulq_n_f32(halves(vshl_n_u16(widened(p), 6)), 128.0f); }
  EQQ_INLINE F e8m0(const uint8_t* p) {
    const uint32x4_t a = vmovl_u16(widened(p));
    uint32x4_t bits = vshlq_n_u32(a, 23);
    bits = vbslq_u32(vceqzq_u32(a), vdupq_n_u32(1u << 22), bits);
    return vreinterpretq_f32_u32(vbslq_u32(vceqq_u32(a, vdupq_n_u32(255)), vdupq_n_u32(0x7fc00000u), bits));
  }
  EQQ_INLINE F bf16(const uint8_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(wide(p), 16)); }
  EQQ_INLINE F f16(const uint8_t* p) { return halves(wide(p)); }
  EQQ_INLINE float one_f16(uint16_t bits) {
    __fp16 value;
    memcpy(&value, &bits, 2);
    return value;
  }
  EQQ_INLINE uint16_t one_to_f16(float value) {
    const __fp16 half = static_cast<__fp16>(value);
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
  }
};

}  // namespace
}  // namespace neon
