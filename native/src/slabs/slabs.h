// Weights that kernels cannot read as they are: codes of 3, 5, 6 or 7 bits, which lie in several bytes; codes that
// stand for several values; scales that are codes with scales of their own; offsets of blocks.
//
// Such a weight is multiplied a slab at a time, some rows, or some columns where the product is transposed. Its packed
// codes and nested scales become bytes and floats in the memory of the thread, and stay in the cache. Then the kernel
// of the instruction set multiplies the slab, a weight like any other. Offsets are a product of their own, with sums of
// blocks of x, which is added to the result. All slabs meet the same packed x.
#pragma once

#include "core/isa.h"
#include "int8/int8.h"

// Kernels for slabs, compiled for some instruction sets. They take codes or blocks `first` to `last` of each of some
// rows, which lie without gaps in `out`; a vector more may be written there.
typedef struct SlabKernel {
  // Codes as bytes. `first` begins a segment.
  void (*join)(const Problem*, int64_t row, int64_t rows, int64_t first, int64_t last, uint8_t* out);
  // Zero points as bytes.
  void (*zeros)(const Problem*, int64_t row, int64_t rows, int64_t first, int64_t last, uint8_t* out);
  // Scales times the scale of the row, or offsets. `consecutive`: the table of their codes is integers, each one more
  // than the last. `room` has a float for each `scale` of these rows, if scales are codes.
  void (*scales)(const Problem*, bool offsets, bool consecutive, int64_t row, int64_t rows, int64_t first, int64_t last,
                 float* out, float* room);
  // Adds a multiple of scales to offsets.
  void (*add_multiple)(const float* scales, int64_t count, float factor, float* offsets);
  // Sums of the blocks of row `m` of x, which may be quantized.
  void (*sums)(const Problem*, int64_t batch, int64_t m, float* out);
  void (*sums_int8)(const Int8Problem*, int64_t batch, int64_t m, float* out);
  // Adds products with the offsets of a slab, a problem of one batch, to its results. `sums` belong to all rows of x.
  void (*add)(const Problem* slab, const float* offsets, const float* sums);
  // The same, transposed. `room` has two floats for each block.
  void (*add_transposed)(const Problem* slab, const float* offsets, float* room);
  // The first of the kernels that multiply some of these weights as they are, without slabs; or null.
  const MatmulKernel* packed;
  const Int8Kernel* packed_int8;  // likewise for quantized x
} SlabKernel;

// How a weight is divided into slabs.
class Slabs {
 public:
  // `integers`: x is of integers, so that the weight must stay such.
  Slabs(const Problem& problem, int64_t threads, bool integers = false);
  Slabs(const Slabs&) = delete;  // problems point to its table

  bool needed() const { return needed_; }
  int64_t count() const { return count_; }            // of a batch
  int64_t own_bytes() const { return own_bytes_; }    // of memory that a thread needs for one
  int64_t sums_bytes() const { return sums_bytes_; }  // of memory for sums of blocks of x

  // What kernels see of a problem, to plan it: a slab whose memory is not there yet, or the whole.
  Problem seen(Problem problem) const { return needed_ ? slab(problem, 0, 0, &problem) : problem; }
  // Slab `index` of a batch, in the memory of a thread: a problem for kernels.
  Problem slab(const Problem& problem, int64_t batch, int64_t index, void* own) const;
  // Decodes slab `index` into the memory of a thread.
  void fill(const SlabKernel& kernel, const Problem& problem, int64_t batch, int64_t index, void* own) const;
  // Adds the products with its offsets, once the slab is multiplied.
  void add(const SlabKernel& kernel, const Problem& problem, int64_t batch, int64_t index, void* own,
           const float* sums) const;
  // Multiplies rows of x with infinities again, number by number. Codes and offsets were multiplied separately: an
  // infinity times each may give infinities of opposite signs, whose sum is NaN though the weight has one sign.
  void add_infinite(const SlabKernel& kernel, const Problem& problem, int64_t batch, int64_t index, void* own,
                    const float* sums) const;

 private:
  bool needed_ = false, joins_ = false, decodes_ = false, consecutive_ = true;
  int64_t extent_ = 0, size_ = 0, count_ = 0, own_bytes_ = 0, sums_bytes_ = 0;
  int64_t zeros_ = 0, scales_ = 0, offsets_ = 0, room_ = 0;  // places in the memory of a thread; codes are the first
  float middle_ = 0, table_[256];

  int64_t first_block(const Problem& problem, int64_t index) const {
    return problem.transpose ? index * size_ / problem.block_size : 0;
  }
};

inline const Problem& weight_of(const Problem& problem) { return problem; }
inline const Problem& weight_of(const Int8Problem& problem) { return problem.p; }

inline void sum_blocks(const SlabKernel& kernel, const Problem& problem, int64_t batch, int64_t m, float* out) {
  kernel.sums(&problem, batch, m, out);
}
inline void sum_blocks(const SlabKernel& kernel, const Int8Problem& problem, int64_t batch, int64_t m, float* out) {
  kernel.sums_int8(&problem, batch, m, out);
}

// Whether x may have infinities.
inline bool has_floats(const Problem&) { return true; }
inline bool has_floats(const Int8Problem&) { return false; }

// The problem of one batch with another weight.
inline Problem with_weight(const Problem&, int64_t, const Problem& slab) { return slab; }
inline Int8Problem with_weight(const Int8Problem& problem, int64_t batch, const Problem& slab) {
  Int8Problem q = problem;
  q.p = slab;
  if (problem.form != kFloats) q.p.x = static_cast<const char*>(problem.p.x) + batch * problem.p.x_batch;
  if (problem.x_scale != nullptr) q.x_scale += batch * problem.p.m;
  if (problem.x_zero != nullptr) q.x_zero += batch * problem.p.m;
  return q;
}
