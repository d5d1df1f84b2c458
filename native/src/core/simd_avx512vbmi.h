// AVX-512 with VNNI and VBMI. Its permutations of bytes look up 64 codes of eight bits in two halves of 128, one byte
// of the floats after the other; a float of eight bits needs two, since it is exact in bfloat16. Gathering takes ten
// times as long. All else is as in AVX-512.
#pragma once

#include "core/simd_avx512.h"

namespace avx512vbmi {
namespace {

struct Simd : avx512::Simd {
  static constexpr bool kTablesOfBytes = true;
  static bool accepts(const Problem* p) { return p->bits == 8 && p->values != kValueInteger; }
  static constexpr const MatmulKernel *kOtherMatmul = &avx512::kMatmul, *kOtherDecode = &avx512::kDecode;

  EQQ_INLINE I look_up(I codes, __mmask64 upper, const uint8_t* table) {
    const I low = _mm512_permutex2var_epi8(load_int(table), codes, load_int(table + 64));
    const I high = _mm512_permutex2var_epi8(load_int(table + 128), codes, load_int(table + 192));
    return _mm512_mask_blend_epi8(upper, low, high);
  }

  template <int kBytes>
  EQQ_INLINE void decode64(const uint8_t* p, const uint8_t* planes, F* out) {
    // Groups of four codes go where interleaving, which keeps to quarters of a vector, brings them to their order.
    const I order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const I codes = _mm512_permutexvar_epi32(order, load_int(p));
    I b2, b3, low0 = _mm512_setzero_si512(), low1 = low0;
    if (kBytes == 4) {
      const __mmask64 upper = _mm512_movepi8_mask(codes);
      const I b0 = look_up(codes, upper, planes), b1 = look_up(codes, upper, planes + 256);
      b2 = look_up(codes, upper, planes + 512);
      b3 = look_up(codes, upper, planes + 768);
      low0 = _mm512_unpacklo_epi8(b0, b1);
      low1 = _mm512_unpackhi_epi8(b0, b1);
    } else {
      // The upper bit is the sign.
      b2 = _mm512_permutex2var_epi8(load_int(planes + 512), codes, load_int(planes + 576));
      b3 = _mm512_permutex2var_epi8(load_int(planes + 768), codes, load_int(planes + 832));
      b3 = _mm512_ternarylogic_epi32(b3, codes, _mm512_set1_epi8(-128), 0xf8);
    }
    const I high0 = _mm512_unpacklo_epi8(b2, b3), high1 = _mm512_unpackhi_epi8(b2, b3);
    out[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low0, high0));
    out[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low0, high0));
    out[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(low1, high1));
    out[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(low1, high1));
  }
};

}  // namespace
}  // namespace avx512vbmi
