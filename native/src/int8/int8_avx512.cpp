// Integer products on AVX-512 without VNNI: `vpmaddwd` on 16-bit integers, as on AVX2.
#include "int8/int8_avx512.h"

namespace {

struct Avx512Int8 : Avx512Lanes {
  static constexpr int kGroup = 2;
  static constexpr bool kPacks = false;
  EQQ_INLINE I dot(I acc, I w, I x) { return _mm512_add_epi32(acc, _mm512_madd_epi16(w, x)); }
};

using Kernels8 = Int8Kernels<Avx512Int8>;

}  // namespace

extern const Int8Kernel kInt8Avx512 = {Kernels8::plan, Kernels8::prepare, Kernels8::run};
