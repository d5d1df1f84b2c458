// The registers of `IntegerRow` with AVX2: `vpmaddubsw` adds two products of bytes in 16 bits. Codes have at most six
// bits, so that even sums of four products fit.
#pragma once

#include "core/simd_avx2.h"
#include "slabs/unpack.h"

namespace {

struct RowRegisters {
  using I = __m256i;
  using F = __m256;
  struct Codes {
    I low, high;  // the halves of a plane
  };
  using Integers = const int16_t*;  // integer scales of a span
  static constexpr int kTogether = 2;
  using Start = int16_t;
  static constexpr bool kPlain = true;

  template <int kPerPlane>
  static RowRegisters make() {
    return {};
  }

  EQQ_INLINE I load(const void* p) { return _mm256_loadu_si256(static_cast<const I*>(p)); }
  EQQ_INLINE Codes load_codes(const uint8_t* bytes) { return {load(bytes), load(bytes + 32)}; }

  template <int kBits>
  EQQ_INLINE Codes codes_of_plane(const uint8_t* bytes, int plane) {
    typedef uint64_t Half __attribute__((vector_size(32)));
    return {(I)unpack_plane<kBits, Half>(bytes, plane), (I)unpack_plane<kBits, Half>(bytes + 32, plane)};
  }

  template <int kPerPlane>
  EQQ_INLINE Integers load_integers(const int16_t* integers) {
    return integers;
  }

  // The integer scales of a half plane of a span, repeated for each product.
  template <int kPerPlane>
  EQQ_INLINE I scales_of_half(const int16_t* integers, int64_t half) {
    if (kPerPlane == 2) return _mm256_set1_epi16(integers[half]);
    int32_t two;
    memcpy(&two, integers + 2 * half, 4);
    return _mm256_shuffle_epi8(_mm256_set1_epi32(two),
                               _mm256_set_m128i(_mm_set1_epi16(0x0302), _mm_set1_epi16(0x0100)));
  }

  // `kHalf`: whether each half of a plane has a scale of its own.
  template <int kX, int kPerPlane, bool kHalf>
  struct Sums {
    static constexpr int kSums = kHalf ? 2 : 1;
    I slices[kSums][kX];
    F total;

    EQQ_INLINE void begin(Sums& a) {
      a.total = _mm256_setzero_ps();
      clear(a);
    }
    EQQ_INLINE void clear(Sums& a) {
#pragma GCC unroll 8
      for (int half = 0; half < kSums; ++half)
#pragma GCC unroll 4
        for (int i = 0; i < kX; ++i) a.slices[half][i] = _mm256_setzero_si256();
    }
    // Products in 16 bits, from their start on.
    EQQ_INLINE I products(I codes, const uint8_t* x) {
      return _mm256_add_epi16(_mm256_maddubs_epi16(codes, load(x)), load(x + 64));
    }
    EQQ_INLINE void add_pairs(I& sum, I pairs, I factors) {
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, factors));
    }
    EQQ_INLINE void add(Sums& a, const RowRegisters&, Codes codes, Integers integers, int64_t plane, const uint8_t* x) {
      const I ones = _mm256_set1_epi16(1);
      I low_scales = ones, high_scales = ones;
      if constexpr (kPerPlane > 0) {
        low_scales = scales_of_half<kPerPlane>(integers, 2 * plane);
        high_scales = scales_of_half<kPerPlane>(integers, 2 * plane + 1);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kX; ++i, x += 128) {
        const I low = products(codes.low, x), high = products(codes.high, x + 32);
        if constexpr (kPerPlane > 0 || kHalf) {
          add_pairs(a.slices[0][i], low, low_scales);
          add_pairs(a.slices[kSums - 1][i], high, high_scales);
        } else {
          add_pairs(a.slices[0][i], _mm256_add_epi16(low, high), ones);
        }
      }
    }
    EQQ_INLINE void end_span(Sums& a, const float* scale, float of_x) {
#pragma GCC unroll 2
      for (int half = 0; half < kSums; ++half) {
        F sum = _mm256_cvtepi32_ps(a.slices[half][kX - 1]);
#pragma GCC unroll 4
        for (int i = kX - 2; i >= 0; --i)
          sum = _mm256_fmadd_ps(sum, _mm256_set1_ps(256), _mm256_cvtepi32_ps(a.slices[half][i]));
        a.total = _mm256_fmadd_ps(_mm256_mul_ps(sum, _mm256_set1_ps(of_x)), _mm256_set1_ps(scale[half]), a.total);
      }
      clear(a);
    }
    EQQ_INLINE float sum(const Sums& a) { return avx2::Simd::sum(a.total); }
  };
};

}  // namespace
