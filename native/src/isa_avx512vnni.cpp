// AVX-512 with VNNI: integer products by `vpdpbusd`, which multiplies four bytes without a sign by four with one, and
// does not saturate. All else is AVX-512.
#include "int8_avx512.h"

namespace {

struct Vnni : Avx512Lanes {
  static constexpr int kGroup = 4;
  static constexpr bool kInRegisters = true;
  EQQ_INLINE I dot(I acc, I w, I x) { return _mm512_dpbusd_epi32(acc, w, x); }
};

using Kernels8 = Int8Kernels<Vnni>;

}  // namespace

extern const Int8Kernel kInt8Avx512Vnni = {Kernels8::plan, Kernels8::prepare, Kernels8::run};
extern const Isa kIsaAvx512Vnni = {"avx512vnni", &kMatmulAvx512, &kDecodeAvx512, &kInt8Avx512Vnni};
