// AVX-512 with VNNI: integers, and floats times integers, by `vpdpbusd`. All else is AVX-512.
#include "int8/int8_vnni.h"

namespace {

using Kernels8 = Int8Kernels<Vnni>;

}  // namespace

extern const Int8Kernel kInt8Avx512Vnni = {Kernels8::plan, Kernels8::prepare, Kernels8::run};
extern const Isa kIsaAvx512Vnni = {"avx512vnni", &kMatmulVnni, &kDecodeAvx512, &kInt8Avx512Vnni};
