// Products with the offsets of blocks: each meets the sum of a block of x.
#pragma once

#include "core/problem.h"
#include "core/vectors.h"
#include "int8/x.h"

namespace {

constexpr int64_t kPart = 64;  // numbers that are added one after the other, so that few roundings add up

void add_multiple(const float* scales, int64_t count, float factor, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] += factor * scales[i];
}

void sums_of_row(const Problem* problem, int64_t batch, int64_t m, float* out) {
  const Problem& p = *problem;
  const float* x = static_cast<const float*>(p.x) + batch * p.x_batch + m * p.x_row;
  for (int64_t block = 0; block < p.blocks; ++block) {
    const int64_t first = block * p.block_size, last = min64(first + p.block_size, p.k);
    float sum = 0;
    int64_t i = first;
    if (p.x_column == 1 && last - first >= kLanes) {
      Floats all = {};
      while (i + kLanes <= last) {
        Floats some = {};
        for (const int64_t end = min64(i + kPart * kLanes, last); i + kLanes <= end; i += kLanes)
          some += load_floats(x + i);
        all += some;
      }
      sum = sum_of(all);
    }
    while (i < last) {
      float part = 0;
      for (const int64_t end = min64(i + kPart, last); i < end; ++i) part += x[i * p.x_column];
      sum += part;
    }
    out[block] = sum;
  }
}

void sums_of_int8_row(const Int8Problem* problem, int64_t batch, int64_t m, float* out) {
  using X = Int8X<EQQUANT_ISA::Simd>;
  const Problem& p = problem->p;
  const int64_t at = batch * p.x_batch + m * p.x_row;
  const typename X::Row row = X::row_at(*problem, batch * p.m + m, at);
  for (int64_t block = 0; block < p.blocks; ++block) {
    const int64_t first = block * p.block_size, last = min64(first + p.block_size, p.k);
    int64_t sum = (first - last) * row.shift;
    for (int64_t k = first; k < last; k += 256) {
      const int64_t count = min64(256, last - k);
      int8_t codes[256];
      X::read_codes(*problem, at + k * p.x_column, count, row, codes);
      int32_t part = 0;
      for (int64_t i = 0; i < count; ++i) part += codes[i];
      sum += part;
    }
    out[block] = static_cast<float>(sum) * row.scale;
  }
}

// Products of `kRows` rows of offsets with one row of sums of x.
template <int kRows>
EQQ_INLINE void multiply_sums(const float* const* rows, const float* sums, int64_t blocks, float* out) {
  Floats all[kRows] = {};
  int64_t i = 0;
  for (; i + kLanes <= blocks; i += kLanes) {
    const Floats some = load_floats(sums + i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) all[r] += load_floats(rows[r] + i) * some;
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) out[r] = sum_of(all[r]);
  for (; i < blocks; ++i)
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) out[r] += rows[r][i] * sums[i];
}

void add_products(const Problem* slab, const float* offsets, const float* sums) {
  constexpr int kRows = 4;
  const Problem& q = *slab;
  float* y = static_cast<float*>(q.y);
  for (int64_t n = 0; n < q.n; n += kRows) {
    const int64_t count = min64(kRows, q.n - n);
    const float* rows[kRows];
    for (int r = 0; r < kRows; ++r) rows[r] = offsets + (n + min64(r, count - 1)) * q.blocks;
    for (int64_t m = 0; m < q.m; ++m) {
      float some[kRows];
      multiply_sums<kRows>(rows, sums + m * q.blocks, q.blocks, some);
      for (int64_t r = 0; r < count; ++r) y[m * q.y_row + (n + r) * q.y_column] += some[r];
    }
  }
}

void add_products_transposed(const Problem* slab, const float* offsets, float* room) {
  const Problem& q = *slab;
  float* part = room + q.blocks;
  for (int64_t m = 0; m < q.m; ++m) {
    const float* x = static_cast<const float*>(q.x) + m * q.x_row;
    float* y = static_cast<float*>(q.y) + m * q.y_row;
    for (int64_t block = 0; block < q.blocks; ++block) room[block] = 0;
    for (int64_t first = 0; first < q.n; first += kPart) {
      for (int64_t block = 0; block < q.blocks; ++block) part[block] = 0;
      for (int64_t n = first; n < min64(first + kPart, q.n); ++n) {
        const float factor = x[n * q.x_column], *row = offsets + n * q.blocks;
        for (int64_t block = 0; block < q.blocks; ++block) part[block] += factor * row[block];
      }
      for (int64_t block = 0; block < q.blocks; ++block) room[block] += part[block];
    }
    for (int64_t k = 0; k < q.k; ++k) y[k * q.y_column] += room[k / q.block_size];
  }
}

}  // namespace
