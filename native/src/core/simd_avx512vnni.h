// AVX-512 with VNNI: `vpdpbusd` multiplies four bytes without a sign by four with one, and does not saturate.
#pragma once

#include "core/simd_avx512.h"

namespace avx512vnni {
namespace {

struct Simd : avx512::Simd {
  static constexpr int kGroup = 4;
  static constexpr bool kInRegisters = true, kPacks = true;

  // Written out, since GCC would copy sums from register to register in each step of a loop.
  EQQ_INLINE I dot(I acc, I w, I x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
    return acc;
  }

  template <int kBits>
  EQQ_INLINE I byte_codes(I bytes, int plane) {
    if (kBits == 8) return bytes;
    return _mm512_and_si512(_mm512_srli_epi32(bytes, static_cast<unsigned>(plane * kBits)),
                            _mm512_set1_epi8((1 << (kBits % 8)) - 1));
  }
  EQQ_INLINE I byte_table(const uint8_t* p) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  EQQ_INLINE I lookup_bytes(I table, I codes) { return _mm512_shuffle_epi8(table, codes); }
};

}  // namespace
}  // namespace avx512vnni
