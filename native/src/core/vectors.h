// Vectors of the compiler's, as wide as the widest registers: the vocabulary of `encode` and `slabs`. These move memory
// and do a little arithmetic on the way, without permutations or lookups, which compilers write from one source as well
// as intrinsics would, on every machine.
#pragma once

#include <stdint.h>
#include <string.h>

#include "core/ints.h"

namespace {

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
// The bytes of a register: sums over a loop in wider vectors would go through memory.
#if defined(__AVX512F__)
constexpr int kRegister = 64;
#elif defined(__AVX__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif
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
template <typename T, typename Vector, typename Combine>
EQQ_INLINE T reduce_vector(const Vector& a, const Combine& combine) {
  typedef T Half __attribute__((vector_size(32)));
  typedef T Quarter __attribute__((vector_size(16)));
  Half h[2];
  memcpy(h, &a, sizeof h);
  h[0] = combine(h[0], h[1]);
  Quarter q[2];
  memcpy(q, h, sizeof q);
  q[0] = combine(q[0], q[1]);
  return combine(combine(q[0][0], q[0][2]), combine(q[0][1], q[0][3]));
}
EQQ_INLINE float sum_of(const Floats& a) {
  return reduce_vector<float>(a, [](auto x, auto y) __attribute__((always_inline)) { return x + y; });
}
EQQ_INLINE int32_t largest_of(const Ints& a) {
  return reduce_vector<int32_t>(a, [](auto x, auto y) __attribute__((always_inline)) { return x > y ? x : y; });
}

}  // namespace
