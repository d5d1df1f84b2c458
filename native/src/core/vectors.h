// Vectors of the compiler's, as wide as registers are: the vocabulary of `encode` and `slabs`. These move memory
// and do a little arithmetic on the way, without permutations or lookups, which compilers write from one source as well
// as intrinsics would, on every machine.
#pragma once

#include <stdint.h>
#include <string.h>

#include "core/ints.h"

namespace {

// Wider vectors would go through memory.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
// Sixty-four bytes. Shifted as eight integers, they are masked as bytes.
typedef uint64_t Segment __attribute__((vector_size(64), aligned(1), may_alias));

template <typename Vector>
EQQ_INLINE Vector load_vector(const void* p) {
  Vector a;
  memcpy(&a, p, sizeof a);
  return a;
}
EQQ_INLINE Floats load_floats(const float* p) { return load_vector<Floats>(p); }
template <typename Vector>
EQQ_INLINE void store_vector(void* p, Vector a) {
  memcpy(p, &a, sizeof a);
}

// What `combine` makes of all lanes, in halves: of vectors, and at last of four numbers.
template <typename T, int kCount, typename Vector, typename Combine>
EQQ_INLINE T reduce_vector(const Vector& a, const Combine& combine) {
  if constexpr (kCount == 4) {
    return combine(combine(a[0], a[2]), combine(a[1], a[3]));
  } else {
    typedef T Half __attribute__((vector_size(2 * kCount)));
    Half h[2];
    memcpy(h, &a, sizeof h);
    return reduce_vector<T, kCount / 2>(combine(h[0], h[1]), combine);
  }
}
EQQ_INLINE float sum_of(const Floats& a) {
  return reduce_vector<float, kLanes>(a, [](auto x, auto y) __attribute__((always_inline)) { return x + y; });
}
EQQ_INLINE int32_t largest_of(const Ints& a) {
  return reduce_vector<int32_t, kLanes>(a, [](auto x, auto y) __attribute__((always_inline)) { return x > y ? x : y; });
}

}  // namespace
