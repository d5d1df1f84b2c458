// Integer products by `vpdpbusd`, which multiplies four bytes without a sign by four with one, and does not saturate.
#ifndef EQQUANT_INT8_VNNI_H_
#define EQQUANT_INT8_VNNI_H_

#include "int8_avx512.h"

namespace {

struct Vnni : Avx512Lanes {
  static constexpr int kGroup = 4;
  static constexpr bool kInRegisters = true;
  EQQ_INLINE I dot(I acc, I w, I x) { return _mm512_dpbusd_epi32(acc, w, x); }
};

}  // namespace

#endif  // EQQUANT_INT8_VNNI_H_
