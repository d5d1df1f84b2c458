// Quantizing: what scales are chosen from, and codes of values, packed.
//
//   encode:   code(n, k) = code of ((x(n, k) - offset) * factor / divisor + shift), each of a block;
//             the code of 0 + shift where the divisor is 0
//   reduce:   one value of each row: its largest magnitude, ...; NaN where the row holds a NaN or an infinity
//   trellis:  packed trellis codes of each row
#pragma once

#include <stddef.h>

#include "core/isa.h"

// How a value becomes a code.
enum EncodeRule {
  kSteps = 0,  // by its place among `steps`
  kEven = 1,   // the nearest whole number, ties to even, plus `bias`
  kUp = 2,     // the value plus `bias`, without its fraction
};

typedef struct EncodeProblem {
  const void* x;         // (n, k), of `x_type`
  uint8_t* y;            // (n, words)
  const float* divisor;  // (n, blocks)
  const float* factor;   // (n, blocks), or null for one
  const float* offset;   // (n, blocks), or null for zero
  const float* shift;    // (n, blocks), or null for zero

  int64_t n, k, words, blocks, block_size;
  int32_t bits;  // 1 to 8; codes of 3, 5, 6 and 7 bits are packed in parts
  int32_t x_type;

  int32_t rule;
  int32_t nan;           // the code of NaN
  float bias;            // of kEven and kUp
  const int32_t* steps;  // of kSteps: the least value of each further code, in the order of `float_order`, ascending
  const int32_t* codes;  // the code below the first step, and from each on
  int64_t num_steps;
} EncodeProblem;

enum ReduceKind {
  kLargest = 0,    // magnitude
  kAtLargest = 1,  // the value of largest magnitude; of several the first
  kLow = 2,        // the least value, at most zero
  kHigh = 3,       // the largest value, at least zero
};

typedef struct ReduceProblem {
  const float* x;  // (n, k)
  float* y;        // (n,)
  int64_t n, k;
  int32_t kind;
} ReduceProblem;

// How many windows there are, and at most groups of them.
enum { kTrellisWindows = 1 << 12, kTrellisMostGroups = kTrellisWindows / 2 };

// Trellis codes of rows; `eqquant/_numerics/trellis.py` says more.
typedef struct TrellisProblem {
  const float* values;        // (n, k), in units of the scales; finite
  const float* weights;       // (n, k), of squared errors
  const float* feedback;      // (n / rows, k, k): how much of an error is subtracted from another value; or null
  uint8_t* y;                 // (n, words)
  int64_t n, rows, k, words;  // `rows`: how many rows share a matrix of `feedback`; `words`: bytes of a row of codes
  int32_t bits;               // 1 to 4
  uint32_t multipliers;       // of the hash
} TrellisProblem;

// The memory of a thread. `changes`, at the end, is needed only with feedback.
typedef struct TrellisMemory {
  float table[kTrellisWindows], costs[kTrellisWindows], errors[kTrellisWindows];
  float best[kTrellisMostGroups], targets[kTrellisMostGroups];
  uint8_t choices[kTrellisSegment * kTrellisMostGroups];
  float changes[2 * kTrellisMostGroups * kTrellisSegment];
} TrellisMemory;

static inline int64_t trellis_bytes(const TrellisProblem& p) {
  return p.feedback == nullptr ? offsetof(TrellisMemory, changes) : sizeof(TrellisMemory);
}

// As `MatmulKernel`; units need no preparation, and most of them no memory.
typedef struct EncodeKernel {
  void (*encode)(const EncodeProblem*, int64_t first_row, int64_t last_row);
  void (*reduce)(const ReduceProblem*, int64_t first_row, int64_t last_row);
  void (*trellis)(const TrellisProblem*, int64_t first_row, int64_t last_row, TrellisMemory*);
} EncodeKernel;

// The kernel for an instruction set.
static inline const EncodeKernel& encode_kernel(const Isa& isa) { return *isa.encode; }

// The error of a problem, as a sentence in `text`; or null. Reads no array.
const char* check_encode(const EncodeProblem& problem, char* text, size_t room);
const char* check_trellis(const TrellisProblem& problem, char* text, size_t room);
