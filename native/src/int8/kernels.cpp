// Products of integers: CMake includes this file behind the header of each instruction set.
#include "int8/kernels.h"
#ifdef __AVX512VNNI__
#include "int8/pack_avx512.h"
#endif

namespace EQQUANT_ISA {

extern const Int8Kernel kInt8 = {Int8Kernels<Simd>::plan, Int8Kernels<Simd>::prepare, Int8Kernels<Simd>::run};

}  // namespace EQQUANT_ISA
