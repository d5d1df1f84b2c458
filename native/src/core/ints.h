// Sums and quotients of lengths, for files that are compiled with flags of their own: nothing here is seen by another.
#ifndef EQQUANT_INTS_H_
#define EQQUANT_INTS_H_

#include <stdint.h>

#define EQQ_INLINE static inline __attribute__((always_inline))

namespace {

EQQ_INLINE int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
EQQ_INLINE int64_t round_up(int64_t a, int64_t b) { return div_up(a, b) * b; }
EQQ_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
EQQ_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace

#endif  // EQQUANT_INTS_H_
