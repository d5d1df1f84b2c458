// NEON with the dot products of ARMv8.2: `sdot` multiplies four bytes by four, all with a sign.
#pragma once

#include "core/simd_neon.h"

namespace dotprod {
namespace {

struct Simd : neon::Simd {
  static constexpr int kGroup = 4, kBias = 128;

  // Codes of the weight have no sign until `kBias` is subtracted.
  EQQ_INLINE I dot(I acc, I w, I x) {
    const uint8x16_t codes = veorq_u8(vreinterpretq_u8_s32(w), vdupq_n_u8(kBias));
    return vdotq_s32(acc, vreinterpretq_s8_u8(codes), vreinterpretq_s8_s32(x));
  }
};

}  // namespace
}  // namespace dotprod
