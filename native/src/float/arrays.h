// Loads of `x` and stores of `y`, in float32, bfloat16 or float16.
#pragma once

#include "float/layout.h"

namespace {

template <class V>
struct Arrays {
  using F = typename V::F;
  static constexpr int L = V::L;

  EQQ_INLINE void transpose(F* a) {
    if constexpr (L == 4) {
      const F b[4] = {a[0], a[1], a[2], a[3]};
      for (int i = 0; i < 4; ++i) a[i] = F{b[0][i], b[1][i], b[2][i], b[3][i]};
    } else {
      V::transpose(a);
    }
  }

  template <int kType>
  EQQ_INLINE F load_x(const void* x, int64_t at) {
    if (kType == kFloat32) return V::load(static_cast<const float*>(x) + at);
    const uint8_t* bits = static_cast<const uint8_t*>(x) + 2 * at;
    return kType == kBFloat16 ? V::bf16(bits) : V::f16(bits);
  }

  template <int kType>
  EQQ_INLINE float read(const void* x, int64_t at) {
    if (kType == kFloat32) return static_cast<const float*>(x)[at];
    const uint16_t bits = static_cast<const uint16_t*>(x)[at];
    return kType == kBFloat16 ? V::one_bf16(bits) : V::one_f16(bits);
  }

  EQQ_INLINE void write(const Problem& p, int64_t at, float value) {
    if (p.x_type == kFloat32) {
      static_cast<float*>(p.y)[at] = value;
    } else {
      static_cast<uint16_t*>(p.y)[at] = p.x_type == kBFloat16 ? V::one_to_bf16(value) : V::one_to_f16(value);
    }
  }
};

}  // namespace
