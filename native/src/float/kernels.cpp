// Products of floats and decoding: CMake includes this file behind the header of each instruction set.
#include "float/kernels.h"
#include "float/dense.h"

namespace EQQUANT_ISA {

extern const MatmulKernel kMatmul = {
    Kernels<Simd>::plan, Kernels<Simd>::prepare, Kernels<Simd>::run, Simd::accepts, nullptr, Simd::kOtherMatmul};
extern const MatmulKernel kDecode = {Dense<Simd>::plan, Dense<Simd>::prepare, Dense<Simd>::run, Simd::accepts,
                                     nullptr,           Simd::kOtherDecode};

void decode_scales(const Problem* p, int64_t row, int64_t first, int64_t last, float* out) {
  Decode<Simd>::decode_scales(*p, row, first, last, out);
}

}  // namespace EQQUANT_ISA
