// AVX-512 with VNNI: integer products by `vpdpbusd`. All else is AVX-512.
#include "int8_vnni.h"

namespace {

using Kernels8 = Int8Kernels<Vnni>;

}  // namespace

extern const Int8Kernel kInt8Avx512Vnni = {Kernels8::plan, Kernels8::prepare, Kernels8::run};
extern const Isa kIsaAvx512Vnni = {"avx512vnni", &kMatmulAvx512, &kDecodeAvx512, &kInt8Avx512Vnni};
