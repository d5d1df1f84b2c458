// Integer products by `vpdpbusd`, which multiplies four bytes without a sign by four with one, and does not saturate.
#ifndef EQQUANT_INT8_VNNI_H_
#define EQQUANT_INT8_VNNI_H_

#include "int8/int8_avx512.h"
#include "int8/int8_rows.h"

namespace {

struct Vnni : Avx512Lanes {
  static constexpr int kGroup = 4;
  static constexpr bool kInRegisters = true, kPacks = true;
  // In so many words, since GCC would copy sums from register to register in each step of a loop.
  EQQ_INLINE I dot(I acc, I w, I x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
    return acc;
  }

  template <class X>
  static void pack(const Int8Problem& q, const Runs& r, int64_t batch, int64_t first, float* scales, int32_t* shifts,
                   uint8_t* out) {
    pack_rows<X>(q, r, {batch, first, 0, 1, true, scales, shifts, out}, [](int64_t, int64_t) {});
  }
  // Sums of the runs of a panel, times a factor; those of a run are `stride` behind those of the one before.
  static void run_sums(const Runs& r, int32_t factor, const uint8_t* x, int64_t stride, int32_t* out) {
    for (int64_t run = 0; run < r.count; ++run, out += stride) {
      I sum = zero();
      for (int64_t i = 0; i < r.size; i += 4, x += 4 * L) sum = dot(sum, _mm512_set1_epi8(1), load(x));
      store(out, mul(sum, spread(factor)));
    }
  }
  // Writes sums of `count` rows of the weight, `stride` apart, times the scales of x.
  template <class X>
  static void put(const Problem& p, int64_t base, const float* sums, int64_t stride, const float* x_scale,
                  int64_t count, int64_t lanes) {
    F square[16];
    const F scale = load_f(x_scale);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) square[i] = i < count ? _mm512_mul_ps(load_f(sums + i * stride), scale) : zero_f();
    write_square(p, base, count, lanes, square);
  }
};

}  // namespace

#endif  // EQQUANT_INT8_VNNI_H_
