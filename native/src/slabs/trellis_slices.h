// One row of x times a trellis, in integers: as `trellis_row.h`, but x is rounded to 24 bits, whose three bytes, called
// slices, are multiplied by the pairs of bytes that codes are sums of. Products and their sums are exact. This is
// Ozaki's scheme, https://arxiv.org/abs/2306.11975.
#pragma once

#include "slabs/trellis_row.h"

#if defined(__AVX512VBMI__)
#include "core/arrays_avx512.h"

namespace {

struct TrellisSlices {
  using I = __m512i;
  static constexpr int kSlices = 3;
  static constexpr int64_t kLeast = 256;      // shorter rows take `TrellisRow`, whose sums then have few roundings
  static constexpr int64_t kMost = 1 << 19;   // sums of products of bytes fit in 32 bits
  static constexpr float kLargest = 8355000;  // the integer for the amax, with room for rounding
  static constexpr float kRange = 0x1p64f;    // the amax is at most this, and at least its reciprocal
  static constexpr float kPeak = 8;           // the amax is at most so many times the root mean square

  // The header of the row of x of a batch; its slices follow in memory.
  struct alignas(64) Row {
    int64_t sum;  // of the integers
    float scale;  // x is about an integer times this
    bool fits;    // whether 24 bits are precise enough; otherwise `TrellisRow` takes the product
  };

  static int64_t stride(const Problem& p) { return sizeof(Row) + 2 * kSlices * TrellisRow::padded(p); }
  EQQ_INLINE const Row& packed_x(const Problem& p, const void* shared, int64_t batch) {
    return *reinterpret_cast<const Row*>(static_cast<const char*>(shared) + batch * stride(p));
  }

  static bool accepts(const Problem* p) {
    return TrellisRow::accepts(p) && p->blocks == 1 && p->x_column == 1 && p->k >= kLeast && p->k <= kMost;
  }
  static bool accepts_packed(const Problem* p, const Plan*, const void* shared) {
    for (int64_t batch = 0; batch < p->batch; ++batch)
      if (!packed_x(*p, shared, batch).fits) return false;
    return true;
  }

  static void plan(const Problem* problem, int64_t threads, Plan* plan) {
    TrellisRow::plan(problem, threads, plan);
    plan->shared_bytes = problem->batch * stride(*problem);
  }

  static void prepare(const Problem* problem, const Plan*, void* shared, int64_t batch) {
    const Problem& p = *problem;
    Row& row = *reinterpret_cast<Row*>(static_cast<char*>(shared) + batch * stride(p));
    const auto load = [&](int64_t k) __attribute__((always_inline)) {
      return load_some(p.x, p.x_type, batch * p.x_batch + k, first_few(p.k - k));
    };
    I most = _mm512_setzero_si512();
    __m512 squares = _mm512_setzero_ps();
    for (int64_t k = 0; k < p.k; k += 16) {
      const __m512 values = load(k);
      most = larger_magnitudes(most, values);
      squares = _mm512_fmadd_ps(values, values, squares);
    }
    const float amax = TrellisRow::S::from_bits(_mm512_reduce_max_epu32(most));
    const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(p.k);
    row.fits = amax <= kRange && amax >= 1 / kRange && amax * amax <= kPeak * kPeak * mean;
    if (!row.fits) return;
    row.scale = amax / kLargest;
    const __m512 factor = _mm512_set1_ps(kLargest / amax);
    const I flip = _mm512_set1_epi32(0x808080);  // a carry makes signed bytes of unsigned ones
    I sum = _mm512_setzero_si512();
    int8_t* out = reinterpret_cast<int8_t*>(&row + 1);
    for (int64_t first = 0; first < TrellisRow::padded(p); first += 64, out += 2 * kSlices * 64) {
      alignas(64) int8_t bytes[kSlices][64];
      for (int i = 0; i < 4; ++i) {
        const int64_t k = first + 16 * i;
        const I whole = k < p.k ? _mm512_cvtps_epi32(_mm512_mul_ps(load(k), factor)) : _mm512_setzero_si512();
        sum = _mm512_add_epi64(sum, _mm512_cvtepi32_epi64(_mm512_castsi512_si256(whole)));
        sum = _mm512_add_epi64(sum, _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(whole, 1)));
        const I slices = _mm512_xor_si512(_mm512_add_epi32(whole, flip), flip);
        for (int slice = 0; slice < kSlices; ++slice)
          _mm_store_si128(reinterpret_cast<__m128i*>(bytes[slice] + 16 * i),
                          _mm512_cvtepi32_epi8(_mm512_srl_epi32(slices, _mm_cvtsi32_si128(8 * slice))));
      }
      // Each twice, in the order of `Trellis`: of 64 values each other eight are in one vector.
      for (int slice = 0; slice < kSlices; ++slice) {
        const I all = _mm512_load_si512(bytes[slice]);
        _mm512_store_si512(out + 64 * slice, _mm512_unpacklo_epi8(all, all));
        _mm512_store_si512(out + 64 * (kSlices + slice), _mm512_unpackhi_epi8(all, all));
      }
    }
    row.sum = _mm512_reduce_add_epi64(sum);
  }

  template <int kBits, int kIndex = 0>
  EQQ_INLINE void multiply_segment(const Trellis<kBits>& t, const uint8_t* segment, const int8_t* x, I* acc) {
    if constexpr (kIndex * TrellisVector::kValues < kTrellisSegment) {
      const I pairs = Trellis<kBits>::template pairs<kIndex>(t, segment);
#pragma GCC unroll 4
      for (int slice = 0; slice < kSlices; ++slice)
        acc[slice] = _mm512_dpbusd_epi32(acc[slice], pairs, _mm512_load_si512(x + 64 * (kSlices * kIndex + slice)));
      multiply_segment<kBits, kIndex + 1>(t, segment, x, acc);
    }
  }

  EQQ_INLINE int64_t sum_of_lanes(I a) {
    return _mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_cvtepi32_epi64(_mm512_castsi512_si256(a)),
                                                    _mm512_cvtepi32_epi64(_mm512_extracti64x4_epi64(a, 1))));
  }

  template <int kBits>
  static void multiply_rows(const Problem& p, int64_t row, int64_t count, const Row& of_x, float* scale, float* out) {
    constexpr int64_t kSize = 16 * kBits;
    const Trellis<kBits> trellis(p.codec->multipliers);
    const int64_t first_value = static_cast<int64_t>(p.table[0]) * of_x.sum;
    for (int64_t r = 0; r < count; ++r) {
      const uint8_t* bytes = p.codes + (row + r) * p.words;
      const int8_t* x = reinterpret_cast<const int8_t*>(&of_x + 1);
      EQQUANT_ISA::decode_scales(&p, row + r, 0, 1, scale);
      I acc[kSlices] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
      int64_t left = p.k;
      for (; left >= kTrellisSegment; left -= kTrellisSegment, bytes += kSize, x += 2 * kSlices * kTrellisSegment) {
        TrellisRow::S::prefetch(bytes + kTrellisAhead);
        multiply_segment<kBits>(trellis, bytes, x, acc);
      }
      if (left > 0) {
        uint8_t circle[kSize];
        repeat_circle<kBits>(bytes, left, circle);
        multiply_segment<kBits>(trellis, circle, x, acc);
      }
      int64_t total = first_value;
      for (int slice = 0; slice < kSlices; ++slice) total += sum_of_lanes(acc[slice]) * (int64_t{1} << 8 * slice);
      out[r] = static_cast<float>(static_cast<double>(total) * of_x.scale) * *scale;
    }
  }
};

constexpr MatmulKernel kTrellisSlices = {TrellisSlices::plan,           TrellisSlices::prepare,
                                         run_trellis<TrellisSlices>,    TrellisSlices::accepts,
                                         TrellisSlices::accepts_packed, &kTrellisRow};
constexpr const MatmulKernel* kPackedTrellis = &kTrellisSlices;

}  // namespace

#endif
