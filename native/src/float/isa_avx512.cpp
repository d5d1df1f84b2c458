// AVX-512 without extensions.
#include "float/avx512.h"
#include "int8/int8.h"

extern const MatmulKernel kMatmulAvx512 = {Kernels<Avx512>::plan, Kernels<Avx512>::prepare, Kernels<Avx512>::run};
extern const MatmulKernel kDecodeAvx512 = {Dense<Avx512>::plan, Dense<Avx512>::prepare, Dense<Avx512>::run};
extern const Isa kIsaAvx512 = {"avx512", &kMatmulAvx512, &kDecodeAvx512, &kInt8Avx512};

void decode_scales_avx512(const Problem* p, int64_t row, int64_t first, int64_t last, float* out) {
  Decode<Avx512>::decode_scales(*p, row, first, last, out);
}
