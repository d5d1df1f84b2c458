// The registers of `IntegerRow` with AVX-512.
#pragma once

#include "core/arrays_avx512.h"
#include "slabs/unpack.h"

namespace {

struct RowRegisters {
  using I = __m512i;
  using F = __m512;
  using Codes = I;
  using Integers = I;  // integer scales of a span
  // So many products of bytes are added up in an integer of this type.
  static constexpr int kTogether = 4;
  using Start = int32_t;
  static constexpr bool kPlain = false;

  I places[4];

  // `kPerPlane`: integer scales of a plane, or 0.
  template <int kPerPlane>
  static RowRegisters make() {
    RowRegisters r;
    for (int64_t i = 0; i < 4; ++i) r.places[i] = places_of(i, kPerPlane);
    return r;
  }

  // Which integer scale the lower half of each lane takes, of `count` in a plane. Upper halves take element 31, a zero.
  static I places_of(int64_t plane, int64_t count) {
    alignas(64) int16_t places[32];
    for (int64_t lane = 0; lane < 16; ++lane) {
      places[2 * lane] = static_cast<int16_t>(plane * count + lane * count / 16);
      places[2 * lane + 1] = 31;
    }
    return _mm512_load_si512(places);
  }

  EQQ_INLINE Codes load_codes(const uint8_t* bytes) { return _mm512_loadu_si512(bytes); }
  template <int kBits>
  EQQ_INLINE Codes codes_of_plane(const uint8_t* bytes, int plane) {
    const Segment codes = unpack_plane<kBits>(bytes, plane);
    I all;
    memcpy(&all, &codes, sizeof all);
    return all;
  }

  template <int kPerPlane>
  EQQ_INLINE Integers load_integers(const int16_t* integers) {
    return kPerPlane == 4 ? _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(integers)))
         : kPerPlane == 2 ? _mm512_zextsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(integers)))
                          : _mm512_setzero_si512();
  }

  // The sums of a span, and the total of the row so far.
  template <int kX, int kPerPlane, bool kHalf>
  struct Sums {
    I slices[kX];
    F total;

    EQQ_INLINE void begin(Sums& a) {
      a.total = _mm512_setzero_ps();
      clear(a);
    }
    EQQ_INLINE void clear(Sums& a) {
      for (int i = 0; i < kX; ++i) a.slices[i] = _mm512_setzero_si512();
    }
    // Adds the products of a plane of codes, the one of this number in its span.
    EQQ_INLINE void add(Sums& a, const RowRegisters& r, Codes codes, Integers integers, int64_t plane,
                        const uint8_t* x) {
      const I scales = _mm512_permutexvar_epi16(r.places[plane], integers);
#pragma GCC unroll 4
      for (int i = 0; i < kX; ++i) {
        const I bytes = _mm512_loadu_si512(x + 128 * i), start = _mm512_loadu_si512(x + 128 * i + 64);
        a.slices[i] = kPerPlane > 0 ? _mm512_dpwssd_epi32(a.slices[i], _mm512_dpbusd_epi32(start, codes, bytes), scales)
                                    : _mm512_dpbusd_epi32(_mm512_add_epi32(a.slices[i], start), codes, bytes);
      }
    }
    EQQ_INLINE void end_span(Sums& a, const float* scale, float of_x) {
      F sum = _mm512_cvtepi32_ps(a.slices[kX - 1]);
#pragma GCC unroll 4
      for (int i = kX - 2; i >= 0; --i)
        sum = _mm512_fmadd_ps(sum, _mm512_set1_ps(256), _mm512_cvtepi32_ps(a.slices[i]));
      F scales = _mm512_set1_ps(*scale);
      if (kHalf) scales = _mm512_mask_broadcastss_ps(scales, 0xff00, _mm_load_ss(scale + 1));
      a.total = _mm512_fmadd_ps(_mm512_mul_ps(sum, _mm512_set1_ps(of_x)), scales, a.total);
      clear(a);
    }
    EQQ_INLINE float sum(const Sums& a) { return _mm512_reduce_add_ps(a.total); }
  };
};

}  // namespace
