// One row of x times a trellis, in floats: rows of the weight are decoded and multiplied in registers.
#pragma once

#include "core/runs.h"
#include "float/arrays.h"
#include "slabs/trellis.h"

namespace {

#if defined(__AVX2__)

struct TrellisRow {
  using A = Arrays<EQQUANT_ISA::Simd>;
  using S = EQQUANT_ISA::Simd;
  using V = TrellisVector;
  static constexpr int64_t kRowsOfUnit = 16;

  static int64_t padded(const Problem& p) { return round_up(p.k, kTrellisSegment); }

  static bool accepts(const Problem* problem) {
    const Problem& p = *problem;
    return p.codec != nullptr && p.codec->kind == kTrellis && p.m == 1 && !p.transpose && p.k > 0 &&
           p.zero_point == nullptr && p.scale_codes == nullptr && p.offset == nullptr &&
           (p.blocks == 1 || p.block_size % kTrellisSegment == 0);
  }

  static void plan(const Problem* problem, int64_t, Plan* plan) {
    const Problem& p = *problem;
    plan->shared_bytes = round_up(4 * p.batch * padded(p), 64);
    plan->own_bytes = round_up(4 * p.blocks, 64) + 64;
    plan->parts = p.batch;
    plan->units = p.batch * div_up(p.n, kRowsOfUnit);
  }

  // x in the order in which codes are decoded, with zeros beyond its end.
  template <int kType>
  EQQ_INLINE void pack(const Problem& p, int64_t batch, float* out) {
    constexpr int kHalf = V::kValues / 2;
    for (int64_t i = 0; i < padded(p); ++i) {
      const int in_segment = static_cast<int>(i % kTrellisSegment), vector = in_segment / V::kValues,
                lane = in_segment % kHalf, upper = in_segment / kHalf % 2;
      const int64_t k = i - in_segment + Trellis<1>::value_at(vector, lane / 4 * 8 + upper * 4 + lane % 4);
      out[i] = k < p.k ? A::template read<kType>(p.x, batch * p.x_batch + k * p.x_column) : 0;
    }
  }
  static void prepare(const Problem* problem, const Plan*, void* shared, int64_t batch) {
    const Problem& p = *problem;
    float* out = static_cast<float*>(shared) + batch * padded(p);
    switch (p.x_type) {
      case kFloat32: return pack<kFloat32>(p, batch, out);
      case kBFloat16: return pack<kBFloat16>(p, batch, out);
      default: return pack<kFloat16>(p, batch, out);
    }
  }

  template <int kBits, int kIndex = 0>
  EQQ_INLINE void multiply_segment(const Trellis<kBits>& t, const uint8_t* segment, V::F middle, const float* x,
                                   V::F* acc) {
    if constexpr (kIndex * V::kValues < kTrellisSegment) {
      acc[kIndex % 2] =
          V::multiply(trellis_sums<kBits, kIndex>(t, segment), middle, x + kIndex * V::kValues, acc[kIndex % 2]);
      multiply_segment<kBits, kIndex + 1>(t, segment, middle, x, acc);
    }
  }

  template <int kBits>
  static void multiply_rows(const Problem& p, int64_t row, int64_t count, const float* x, float* scales, float* out) {
    constexpr int64_t kSize = 16 * kBits;
    const Trellis<kBits> trellis(p.codec->multipliers);
    const V::F middle = S::broadcast(kLarge - p.table[0]);
    const int64_t block = p.blocks == 1 ? padded(p) : p.block_size;
    for (int64_t r = 0; r < count; ++r) {
      const uint8_t* bytes = p.codes + (row + r) * p.words;
      EQQUANT_ISA::decode_scales(&p, row + r, 0, p.blocks, scales);
      V::F total = S::zero();
      for (int64_t k = 0; k < p.k;) {
        V::F acc[2] = {S::zero(), S::zero()};
        const int64_t end = min64(p.k, k - k % block + block);
        const float scale = scales[k / block];
        for (; end - k >= kTrellisSegment; k += kTrellisSegment, bytes += kSize) {
          S::prefetch(bytes + kTrellisAhead);
          multiply_segment<kBits>(trellis, bytes, middle, x + k, acc);
        }
        if (k < end) {
          uint8_t circle[kSize];
          repeat_circle<kBits>(bytes, end - k, circle);
          multiply_segment<kBits>(trellis, circle, middle, x + k, acc);
          k = end;
        }
        total = S::fma(S::add(acc[0], acc[1]), S::broadcast(scale), total);
      }
      out[r] = S::sum(total);
    }
  }

  EQQ_INLINE const float* packed_x(const Problem& p, const void* shared, int64_t batch) {
    return static_cast<const float*>(shared) + batch * padded(p);
  }
};

// Multiplies the rows of a unit by `multiply_rows` of a kernel, `TrellisRow` or another that has its plan.
template <typename Kernel>
void run_trellis(const Problem* problem, const Plan*, const void* shared, void* own, int64_t unit) {
  constexpr int64_t kRows = TrellisRow::kRowsOfUnit;
  const Problem& p = *problem;
  const int64_t units = div_up(p.n, kRows), batch = unit / units, first = unit % units * kRows;
  const int64_t count = min64(kRows, p.n - first);
  float results[kRows];
  by_count<4>(p.codec->bits, [&](auto bits) {
    Kernel::template multiply_rows<decltype(bits)::value>(
        p, first_row(&p, batch) + first, count, Kernel::packed_x(p, shared, batch), static_cast<float*>(own), results);
  });
  for (int64_t r = 0; r < count; ++r) TrellisRow::A::write(p, batch * p.y_batch + (first + r) * p.y_column, results[r]);
}

constexpr MatmulKernel kTrellisRow = {TrellisRow::plan, TrellisRow::prepare, run_trellis<TrellisRow>,
                                      TrellisRow::accepts};
#if !defined(__AVX512VBMI__)
constexpr const MatmulKernel* kPackedTrellis = &kTrellisRow;
#endif

#else

constexpr const MatmulKernel* kPackedTrellis = nullptr;

#endif

}  // namespace
