// Sums and quotients of lengths, for files that are compiled with flags of their own: nothing here is seen by another.
#pragma once

#include <stdint.h>

#define EQQ_INLINE static inline __attribute__((always_inline))
#define EQQ_NOINLINE static __attribute__((noinline))

namespace {

EQQ_INLINE int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
EQQ_INLINE int64_t round_up(int64_t a, int64_t b) { return div_up(a, b) * b; }
EQQ_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
EQQ_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// `choose(Count<n>())` of a template for `n` from `kLeast` to `kMost`: other values take the nearest.
template <int kCount>
struct Count {
  static constexpr int value = kCount;
};
template <int kMost, int kLeast = 1, class Choose>
EQQ_INLINE auto by_count(int64_t n, const Choose& choose) {
  if constexpr (kMost > kLeast)
    if (n < kMost) return by_count<kMost - 1, kLeast>(n, choose);
  return choose(Count<kMost>());
}

}  // namespace
