// Attention to a cache of keys and values, most places of which may still be empty: a block of queries reads the places
// from the first to the last that any of them sees.
//
//   s(b, h, r, t) = scale * sum over d of queries(b, h, r, d) keys(b, h, t, d)
//   s(b, h, r, t) = cap * tanh(s(b, h, r, t) / cap), with a cap
//   y(b, h, r, d) = sum over t of softmax over t of s(b, h, r, t) times values(b, h, t, d)
//
// Row `r` belongs to token `r % tokens`: rows of several heads that share keys follow each other. Its token at position
// `i` sees places `i - window + 1` to `i` as far as they are filled, and without a window all up to `i`. A row that
// sees no place is zero.
//
// Keys and values are decoded a tile at a time, once for a block of queries. The places of a block are taken in steps,
// whose sums are scaled as the largest score grows. Few blocks are divided into parts: each has sums of its own, which
// are merged at the end. So results do not depend on the number of threads, and few heads with many places keep all
// threads busy.
#pragma once

#include <stddef.h>

#include "core/isa.h"

// Keys or values, rows of `size` numbers: floats, or a weight.
typedef struct CacheRows {
  const void* floats;  // of `type`
  int32_t type;        // FloatType
  Problem packed;      // the weight, all rows of which are one batch; has no bits if rows are floats
} CacheRows;

static inline bool is_packed(const CacheRows& rows) { return rows.packed.bits > 0; }

typedef struct AttentionProblem {
  const void* queries;       // (batch, heads, rows, size), of `type`
  void* y;                   // as queries
  CacheRows keys, values;    // (batch, heads, places, size)
  const int32_t* positions;  // (batch, tokens)
  const int32_t* length;     // (batch,): how many places are filled
  const int32_t* window;     // (batch,): how many places a token sees, its own included; 0 or less for all
  int64_t batch, heads, rows, tokens, places, size;
  float scale, cap;  // `cap` 0 for none
  int32_t type;      // FloatType
} AttentionProblem;

// Rows of a weight as arrays without gaps: a byte for each code; for each block a scale, and a zero point and an offset
// or null. A vector more of the codes may be read.
typedef struct DecodedParts {
  const uint8_t *codes, *zeros;
  const float *scales, *offsets;
} DecodedParts;

// Loops over rows of floats, compiled for some instruction sets.
typedef struct AttentionKernel {
  // Floats of 16 bits as float32.
  void (*widen)(const void* from, int32_t type, int64_t count, float* out);
  // Rows of a weight as float32. `out` has room for a vector more.
  void (*decode)(const DecodedParts* parts, const Problem* weight, int64_t rows, float* out);
  // The products of queries with some keys.
  void (*products)(const float* queries, int64_t rows, const float* keys, int64_t places, int64_t size, float* out,
                   int64_t out_row);
  // Scales products and caps them; returns the largest, but at least `top`. NaN is not larger than a number.
  float (*scores)(float* products, int64_t places, float scale, float cap, float top);
  // Replaces scores by exp(score - top); returns their sum.
  float (*exponentials)(float* scores, int64_t places, float top);
  // Adds the values of some places, each times its share, to the `sums` of some rows.
  void (*mix)(const float* shares, int64_t share_row, int64_t rows, const float* values, int64_t places, int64_t size,
              float* sums, int64_t sum_row);
} AttentionKernel;

constexpr int64_t kStepPlaces = 512;  // whose scores are in memory at a time
constexpr int64_t kTilePlaces = 64;   // that are decoded at a time
constexpr int64_t kBlockRows = 64;    // of queries
constexpr int64_t kFewUnits = 64;     // units that keep most machines busy
constexpr int64_t kFusedRows = 3;     // the most queries with which codes are decoded in registers

// The error of a problem, as a sentence in `text`; or null. Reads no array.
const char* check_attention(const AttentionProblem& problem, char* text, size_t room);

// How attention is divided: each head into blocks of queries, and each block into parts of the places that it sees.
typedef struct AttentionPlan {
  int64_t blocks;     // of a head
  int64_t parts;      // of a block
  int64_t places;     // of a part: whole steps
  int64_t own_bytes;  // of scratch memory for each thread
  double work;        // numbers of keys, more for many queries
} AttentionPlan;
AttentionPlan plan_attention(const AttentionProblem& problem);

// The sums of a row of a part: the largest score, the sum of exp(score - largest), and `size` sums of values.
inline int64_t row_sums(const AttentionProblem& problem) { return problem.size + 2; }
inline int64_t block_sums(const AttentionProblem& problem) {
  return min64(problem.rows, kBlockRows) * row_sums(problem);
}

// Computes the sums of a part of a block; where a block has one part, writes its results instead. Whether there was
// enough memory.
bool attend_unit(const Isa& isa, const AttentionProblem& problem, const AttentionPlan& plan, int64_t unit,
                 void* scratch, float* sums);
// Merges the sums of the parts of a block, and writes its results.
void merge_parts(const AttentionProblem& problem, const AttentionPlan& plan, int64_t block, float* sums);
