// AVX2, FMA and F16C. A table of sixteen floats is looked up byte by byte: `vpshufb` looks 32 codes up at once, in one
// table for each byte of a float, and the four results are interleaved to four vectors of floats.
#pragma once

#include <immintrin.h>

#include "core/simd.h"

namespace avx2 {
namespace {

struct Simd : SimdBase {
  using F = __m256;
  using I = __m256i;
  using Codes = __m256i;
  struct Table {
    F low, high;
    I bytes[4];  // byte 0 of each value, byte 1 of each, and so on
  };
  using Lanes = __m256i;
  static constexpr int L = 8;
  static constexpr bool kScalesTables = false;
  static constexpr int kTileRows = 6, kTileRows1 = 12, kWideRows = 2, kDotRows = 2, kFewTile = 4, kFewGroup = 2,
                       kFewRows = 6;
  static constexpr int kMixedRows = 2;
  static constexpr int kGroup = 2, kInt8TileRows = 4, kInt8DotRows = 4, kInt8FewRows = 4;
  static constexpr auto scales = decode_scales;

  EQQ_INLINE F load(const void* p) { return _mm256_loadu_ps(static_cast<const float*>(p)); }
  EQQ_INLINE void store(float* p, F a) { _mm256_storeu_ps(p, a); }
  EQQ_INLINE F broadcast(float a) { return _mm256_set1_ps(a); }
  EQQ_INLINE F zero() { return _mm256_setzero_ps(); }
  EQQ_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
  EQQ_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  EQQ_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  EQQ_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  EQQ_INLINE float sum(F a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  EQQ_INLINE void transpose(F* a) {
    F b[8], c[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 2) {
      b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
      b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    // Half `l` of `c[4 g + q]` holds column `4 l + q` of rows `4 g` to `4 g + 3`.
#pragma GCC unroll 8
    for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const __m256d low = _mm256_castps_pd(b[i + h]), high = _mm256_castps_pd(b[i + h + 2]);
        c[i + 2 * h] = _mm256_castpd_ps(_mm256_unpacklo_pd(low, high));
        c[i + 2 * h + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low, high));
      }
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      a[q] = _mm256_permute2f128_ps(c[q], c[4 + q], 0x20);
      a[4 + q] = _mm256_permute2f128_ps(c[q], c[4 + q], 0x31);
    }
  }
  EQQ_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

  EQQ_INLINE I load_int(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  EQQ_INLINE void store(void* p, I a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a); }
  EQQ_INLINE I zero_int() { return _mm256_setzero_si256(); }
  EQQ_INLINE I broadcast_int(int32_t a) { return _mm256_set1_epi32(a); }
  EQQ_INLINE I add(I a, I b) { return _mm256_add_epi32(a, b); }
  EQQ_INLINE I mul(I a, I b) { return _mm256_mullo_epi32(a, b); }
  EQQ_INLINE int32_t sum(I a) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
  }
  EQQ_INLINE F to_float(I a) { return _mm256_cvtepi32_ps(a); }
  // `vpmaddubsw` would saturate, so codes are widened to 16 bits, where `vpmaddwd` is exact.
  EQQ_INLINE I dot(I acc, I w, I x) { return _mm256_add_epi32(acc, _mm256_madd_epi16(w, x)); }

  // Codes in the order of lookups: of sixteen bytes 0, 4, 8 and 12, then 1, 5, 9 and 13, and so on.
  template <int n>
  struct Shifted {
    Codes bytes;
  };
  EQQ_INLINE I fourths() {
    return _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  }
  EQQ_INLINE Codes codes(const uint8_t* p) { return _mm256_shuffle_epi8(load_int(p), fourths()); }
  template <int n>
  EQQ_INLINE Shifted<n> shift(Codes a) {
    return {a};
  }
  EQQ_INLINE Codes shift(Codes a, int n) { return _mm256_srl_epi32(a, _mm_cvtsi32_si128(n)); }
  EQQ_INLINE Table split(F low, F high) {
    const I a = _mm256_shuffle_epi8(_mm256_castps_si256(low), fourths());
    const I b = _mm256_shuffle_epi8(_mm256_castps_si256(high), fourths());
    // Each half has four floats, with all their bytes 0 first, then all bytes 1, and so on.
    const I even = _mm256_permute2x128_si256(a, b, 0x20), odd = _mm256_permute2x128_si256(a, b, 0x31);
    const I first = _mm256_permute4x64_epi64(_mm256_unpacklo_epi32(even, odd), 0xd8);
    const I last = _mm256_permute4x64_epi64(_mm256_unpackhi_epi32(even, odd), 0xd8);
    return {low,
            high,
            {_mm256_permute4x64_epi64(first, 0x44), _mm256_permute4x64_epi64(first, 0xee),
             _mm256_permute4x64_epi64(last, 0x44), _mm256_permute4x64_epi64(last, 0xee)}};
  }
  EQQ_INLINE Table table(const float* p) { return split(load(p), load(p + 8)); }
  EQQ_INLINE Table scale(const Table& t, F s) { return split(mul(t.low, s), mul(t.high, s)); }
  EQQ_INLINE Table offset(const Table& t, F z) { return split(sub(t.low, z), sub(t.high, z)); }
  // The values of bytes `n / 8`, `n / 8 + 4`, ..., the codes of which begin at bit `n % 8`. Callers need all bytes of a
  // lane. All four begin with the same lookups, and the compiler does those once.
  template <int n>
  EQQ_INLINE F lookup(const Table& t, Shifted<n> a) {
    const I codes = _mm256_and_si256(n % 8 ? _mm256_srli_epi32(a.bytes, n % 8) : a.bytes, _mm256_set1_epi8(15));
    const I b0 = _mm256_shuffle_epi8(t.bytes[0], codes), b1 = _mm256_shuffle_epi8(t.bytes[1], codes);
    const I b2 = _mm256_shuffle_epi8(t.bytes[2], codes), b3 = _mm256_shuffle_epi8(t.bytes[3], codes);
    constexpr bool kSecond = n / 16, kOdd = n / 8 % 2;
    const I low = kSecond ? _mm256_unpackhi_epi8(b0, b1) : _mm256_unpacklo_epi8(b0, b1);
    const I high = kSecond ? _mm256_unpackhi_epi8(b2, b3) : _mm256_unpacklo_epi8(b2, b3);
    return _mm256_castsi256_ps(kOdd ? _mm256_unpackhi_epi16(low, high) : _mm256_unpacklo_epi16(low, high));
  }

  EQQ_INLINE Lanes lanes(int h, int n) {
    if (n == 2) return _mm256_set1_epi32(h);
    return h ? _mm256_setr_epi32(2, 2, 2, 2, 3, 3, 3, 3) : _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
  }
  EQQ_INLINE F spread(const float* p, Lanes lanes) {
    return _mm256_permutevar_ps(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)), lanes);
  }
  EQQ_INLINE F gather(const float* p, const int32_t* indices) { return _mm256_i32gather_ps(p, load_int(indices), 4); }
  EQQ_INLINE F masked(F a, const int32_t* m) { return _mm256_and_ps(a, _mm256_castsi256_ps(load_int(m))); }

  EQQ_INLINE __m128i eight(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
  EQQ_INLINE __m128i wide(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  EQQ_INLINE F integers(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight(p))); }
  EQQ_INLINE F bytes256(const uint8_t* p, const float* table) {
    return _mm256_i32gather_ps(table, _mm256_cvtepu8_epi32(eight(p)), 4);
  }
  EQQ_INLINE F bytes16(const uint8_t* p, const float* t) {
    const I codes = _mm256_cvtepu8_epi32(eight(p));
    const F low = _mm256_permutevar8x32_ps(load(t), codes), high = _mm256_permutevar8x32_ps(load(t + 8), codes);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
  }
  // Floats of eight bits are floats of sixteen, but for the width and the bias of the exponent. That holds for
  // subnormal numbers too, and F16C takes them whatever the floating-point environment says.
  EQQ_INLINE F e4m3(const uint8_t* p) {
    const __m128i a = _mm_cvtepi8_epi16(eight(p));
    const __m128i half = _mm_and_si128(_mm_slli_epi16(a, 7), _mm_set1_epi16(static_cast<int16_t>(0xbf80)));
    // Code 127 is NaN, with either sign, and no infinity.
    const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(a, _mm_set1_epi16(127)), _mm_set1_epi16(127));
    const F value = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
    return _mm256_or_ps(value, _mm256_castsi256_ps(_mm256_cvtepi16_epi32(nan)));
  }
  EQQ_INLINE F e5m2(const uint8_t* p) { return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(eight(p)), 8)); }
  EQQ_INLINE F ue4m4(const uint8_t* p) {
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(eight(p)), 6)), _mm256_set1_ps(128.0f));
  }
  EQQ_INLINE F e8m0(const uint8_t* p) {
    const I a = _mm256_cvtepu8_epi32(eight(p));
    I bits = _mm256_slli_epi32(a, 23);
    const I none = _mm256_cmpeq_epi32(a, _mm256_setzero_si256()), all = _mm256_cmpeq_epi32(a, _mm256_set1_epi32(255));
    bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(1 << 22), none);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc00000), all));
  }
  EQQ_INLINE F bf16(const uint8_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(wide(p)), 16));
  }
  EQQ_INLINE F f16(const uint8_t* p) { return _mm256_cvtph_ps(wide(p)); }
  EQQ_INLINE float one_f16(uint16_t bits) { return _cvtsh_ss(bits); }
  EQQ_INLINE uint16_t one_to_f16(float value) { return _cvtss_sh(value, 0); }
};

// Multiplies codes up to 127 as bytes. `vpmaddubsw` adds two products in 16 bits, and saturates: 2 * 127 * 128 fits,
// and 2 * 255 * 128 does not.
struct Bytes : Simd {
  static constexpr int kGroup = 4, kMostCode = 127, kInt8TileRows = 6;
  static constexpr bool kSumsIn16Bits = true;

  // Two products are at least -2 * 128 * largest, and a sum at least -2^15.
  EQQ_INLINE int64_t most_additions(int32_t largest) { return 128 / (largest > 0 ? largest : 1); }
  EQQ_INLINE I add_products(I sums, I w, I x) {
    sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(w, x));
    __asm__ volatile("" : "+x"(sums));  // else GCC computes all products of a tile first, and has no registers for them
    return sums;
  }
  EQQ_INLINE I add_sums(I acc, I sums) { return Simd::dot(acc, sums, _mm256_set1_epi16(1)); }
  EQQ_INLINE I dot(I acc, I w, I x) { return add_sums(acc, _mm256_maddubs_epi16(w, x)); }

  // A vector has 32 codes, so at most two blocks of 16.
  EQQ_INLINE Lanes lanes(int, int) { return Simd::lanes(0, 4); }
  EQQ_INLINE I spread_int(const int32_t* p, Lanes lanes) {
    return _mm256_castps_si256(spread(reinterpret_cast<const float*>(p), lanes));
  }
};

// Two registers as one vector of sixteen lanes, or of 64 bytes, for one row of `x`.
struct Pairs : Bytes {
  struct F {
    __m256 low, high;
  };
  struct I {
    __m256i low, high;
  };
  using Lanes = int;  // how many scales a vector has
  static constexpr int L = 16;
  static constexpr bool kInRegisters = true, kSumsIn16Bits = false;
  static constexpr int kRegisterRows = 2;

  EQQ_INLINE F broadcast(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
  EQQ_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  EQQ_INLINE F fma(F a, F b, F c) { return {Simd::fma(a.low, b.low, c.low), Simd::fma(a.high, b.high, c.high)}; }
  EQQ_INLINE float sum(F a) { return Simd::sum(Simd::add(a.low, a.high)); }

  EQQ_INLINE I load_int(const void* p) {
    return {Simd::load_int(p), Simd::load_int(static_cast<const uint8_t*>(p) + 32)};
  }
  EQQ_INLINE I load_int(const void* p, int64_t n) {
    uint8_t bytes[64] = {0};
    memcpy(bytes, p, n);
    return load_int(bytes);
  }
  EQQ_INLINE I zero_int() { return {Simd::zero_int(), Simd::zero_int()}; }
  EQQ_INLINE I broadcast_int(int32_t a) { return {Simd::broadcast_int(a), Simd::broadcast_int(a)}; }
  EQQ_INLINE I add(I a, I b) { return {Simd::add(a.low, b.low), Simd::add(a.high, b.high)}; }
  EQQ_INLINE I mul(I a, I b) { return {Simd::mul(a.low, b.low), Simd::mul(a.high, b.high)}; }
  EQQ_INLINE int32_t sum(I a) { return Simd::sum(Simd::add(a.low, a.high)); }
  EQQ_INLINE F to_float(I a) { return {Simd::to_float(a.low), Simd::to_float(a.high)}; }
  EQQ_INLINE I dot(I acc, I w, I x) {
    return {Bytes::dot(acc.low, w.low, x.low), Bytes::dot(acc.high, w.high, x.high)};
  }

  // Two scales are broadcast by the loads, which need no permutation.
  EQQ_INLINE Lanes lanes(int, int n) { return n; }
  EQQ_INLINE F spread(const float* p, Lanes n) {
    if (n == 2) return {Simd::broadcast(p[0]), Simd::broadcast(p[1])};
    return {Simd::spread(p, Simd::lanes(0, 4)), Simd::spread(p, Simd::lanes(1, 4))};
  }
  EQQ_INLINE I spread_int(const int32_t* p, Lanes n) {
    const float* all = reinterpret_cast<const float*>(p);
    return {_mm256_castps_si256(Simd::spread(all, Simd::lanes(0, n))),
            _mm256_castps_si256(Simd::spread(all, Simd::lanes(1, n)))};
  }

  template <int kBits>
  EQQ_INLINE I byte_codes(I bytes, int plane) {
    if (kBits == 8) return bytes;
    const __m128i shift = _mm_cvtsi32_si128(plane * kBits);
    const __m256i mask = _mm256_set1_epi8((1 << (kBits % 8)) - 1);
    return {_mm256_and_si256(_mm256_srl_epi32(bytes.low, shift), mask),
            _mm256_and_si256(_mm256_srl_epi32(bytes.high, shift), mask)};
  }
  EQQ_INLINE I byte_table(const uint8_t* p) {
    const __m256i table = _mm256_broadcastsi128_si256(wide(p));
    return {table, table};
  }
  EQQ_INLINE I lookup_bytes(I table, I codes) {
    return {_mm256_shuffle_epi8(table.low, codes.low), _mm256_shuffle_epi8(table.high, codes.high)};
  }
};

// The same with codes up to 255, which are multiplied in 16 bits: the even codes of a lane, and then the odd ones.
struct WidePairs : Pairs {
  static constexpr int kMostCode = 255;

  EQQ_INLINE __m256i dot(__m256i acc, __m256i w, __m256i x) {
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), odd = _mm256_srai_epi16(x, 8);
    acc = Simd::dot(acc, _mm256_and_si256(w, _mm256_set1_epi16(255)), even);
    return Simd::dot(acc, _mm256_srli_epi16(w, 8), odd);
  }
  EQQ_INLINE I dot(I acc, I w, I x) { return {dot(acc.low, w.low, x.low), dot(acc.high, w.high, x.high)}; }
};

}  // namespace
}  // namespace avx2

namespace {

template <>
struct IntegerProducts<avx2::Simd> {
  using SmallInRegisters = avx2::Pairs;
  using LargeInRegisters = avx2::WidePairs;
  using SmallUnpacked = avx2::Bytes;
};

}  // namespace
