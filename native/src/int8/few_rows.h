// A few rows of `x`: lanes run along k.
#pragma once

#include "int8/weight.h"
#include "int8/x.h"

namespace {

template <class V>
struct Int8FewRows {
  using X = Int8X<V>;
  using W = Int8Weight<V>;
  using I = typename V::I;
  using F = typename V::F;
  static constexpr int L = V::L;

  // Adds the products of bytes `from` to `to` of each row of the weight and each row of `x` to their sums.
  template <int kRows, int kM, class Add>
  EQQ_INLINE void add_vectors(const uint8_t* const* w, const uint8_t* x, int64_t x_row, int64_t from, int64_t to,
                              I (*sums)[kM], Add add) {
    for (int64_t at = from; at < to; at += 4 * L) {
      I ws[kRows];
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) ws[i] = V::load_int(w[i] + at);
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) {
        const I xs = V::load_int(x + m * x_row + at);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) sums[i][m] = add(sums[i][m], ws[i], xs);
      }
    }
  }

  // Adds the same products, through sums of 16 bits if the set has them.
  template <int kRows, int kM>
  EQQ_INLINE void add_products(const uint8_t* const* w, const uint8_t* x, int64_t x_row, int64_t from, int64_t to,
                               int64_t bytes_in_16, I (*acc)[kM]) {
    if constexpr (V::kSumsIn16Bits) {
      while (from < to) {
        const int64_t stop = min64(to, from + bytes_in_16);
        I sums16[kRows][kM];
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
          for (int m = 0; m < kM; ++m) sums16[i][m] = V::zero_int();
        add_vectors<kRows, kM>(w, x, x_row, from, stop, sums16,
                               [](I sum, I w, I x) { return V::add_products(sum, w, x); });
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
          for (int m = 0; m < kM; ++m) acc[i][m] = V::add_sums(acc[i][m], sums16[i][m]);
        from = stop;
      }
    } else {
      add_vectors<kRows, kM>(w, x, x_row, from, to, acc, [](I sum, I w, I x) { return V::dot(sum, w, x); });
    }
  }

  struct Dot {
    const uint8_t* w[8];
    const uint8_t* x;
    int64_t x_row;         // bytes
    const int32_t* lanes;  // sums of lanes, if they correct
    int64_t lane_row;
    const int32_t* shift;  // of rows of `x`, if they have zero points
    const float* scale;    // `kRunRoom` apart
    const int32_t* offset;
    int64_t runs, size;   // of the step
    int64_t bytes_in_16;  // of a row, which are added up in 16 bits, if `kSumsIn16Bits`
    void* sums;           // vectors of rows and rows of `x`: floats if summed by lanes, else integers
  };

  template <int kRows, int kM, bool kZero, bool kShift>
  static void dot_lanes(const Dot& a) {
    F sums[kRows][kM];
    float* memory = static_cast<float*>(a.sums);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) sums[i][m] = V::load(memory + (i * kM + m) * L);
    constexpr int kAll = kM + kShift;  // and the row of ones
    const int64_t vectors = a.size < W::kCodes ? 1 : a.size / W::kCodes,
                  together = a.size < W::kCodes ? W::kCodes / a.size : 1;
    int64_t at = 0;
    for (int64_t run = 0, v = 0; run < a.runs; run += together, ++v) {
      I acc[kRows][kAll];
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        I offset = V::zero_int();
        if (W::kCorrects && kZero) offset = W::several(a.offset + i * kRunRoom + run, together);
#pragma GCC unroll 8
        for (int m = 0; m < kAll; ++m) {
          acc[i][m] = V::zero_int();
          if (W::kCorrects) acc[i][m] = V::load_int(a.lanes + m * a.lane_row + v * L);
          if (W::kCorrects && kZero) acc[i][m] = V::mul(acc[i][m], offset);
        }
      }
      add_products<kRows, kAll>(a.w, a.x, a.x_row, at, at + 4 * L * vectors, a.bytes_in_16, acc);
      at += 4 * L * vectors;
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const F scale = W::several(a.scale + i * kRunRoom + run, together);
#pragma GCC unroll 8
        for (int m = 0; m < kM; ++m) {
          if (kShift) acc[i][m] = V::add(acc[i][m], V::mul(acc[i][kM], V::broadcast_int(-a.shift[m])));
          sums[i][m] = V::fma(V::to_float(acc[i][m]), scale, sums[i][m]);
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) V::store(memory + (i * kM + m) * L, sums[i][m]);
  }

  // The same of half of the rows at a time: there are not registers for all sums.
  template <int kRows, int kM, bool kZero, bool kShift>
  static void dot_halves(const Dot& a) {
    constexpr int kHalf = kRows / 2;
    Dot b = a;
    dot_lanes<kHalf, kM, kZero, kShift>(b);
    for (int i = 0; i < kHalf; ++i) b.w[i] = a.w[kHalf + i];
    b.scale += kHalf * kRunRoom;
    b.offset += kHalf * kRunRoom;
    b.sums = static_cast<float*>(b.sums) + kHalf * kM * L;
    dot_lanes<kHalf, kM, kZero, kShift>(b);
  }

  template <int kRows, int kM>
  static void dot_whole(const Dot& a) {
    I acc[kRows][kM];
    int32_t* memory = static_cast<int32_t*>(a.sums);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) acc[i][m] = V::load_int(memory + (i * kM + m) * L);
    add_products<kRows, kM>(a.w, a.x, a.x_row, 0, a.size * W::kBytes, a.bytes_in_16, acc);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) V::store(memory + (i * kM + m) * L, acc[i][m]);
  }

  using DotStep = void (*)(const Dot&);
  template <bool kZero, bool kShift>
  EQQ_INLINE DotStep lanes_of(int64_t m) {
    return by_count<4>(m, [](auto count) -> DotStep {
      constexpr int kM = decltype(count)::value, kRows = V::kInt8DotRows;
      if constexpr (kM <= 2) return dot_lanes<kRows, kM, kZero, kShift>;
      return dot_halves<kRows, kM, kZero, kShift>;
    });
  }
  // `m`: with the row of ones, if there is one.
  EQQ_INLINE DotStep whole_of(int64_t m) {
    return by_count<5>(m, [](auto count) -> DotStep { return dot_whole<V::kInt8DotRows, decltype(count)::value>; });
  }

  // Products of a step whose runs are added up as integers, one after the other; a run that ends is scaled.
  static void add_runs(const Problem& p, const Int8Detail& d, const Step& s, DotStep step, Dot& a, int64_t rows,
                       int64_t all, const int32_t* x_sums, float* totals) {
    int32_t* partial = static_cast<int32_t*>(a.sums);
    const bool zero = p.zero_point != nullptr;
    for (int64_t run = 0; run < s.runs; ++run) {
      step(a);
      for (int64_t j = 0; j < V::kInt8DotRows; ++j) a.w[j] += s.length * W::kBytes;
      a.x += s.length * W::kBytes;
      if (!s.ends) continue;
      for (int64_t j = 0; j < rows; ++j) {
        int32_t ones = 0;
        for (int64_t m = all - 1; m >= 0; --m) {
          int32_t sum = V::sum(V::load_int(partial + (j * all + m) * L));
          const int32_t x_sum = x_sums[(s.run + run) * d.m_padded + m];
          if (W::kCorrects) sum += zero ? a.offset[j * kRunRoom + run] * x_sum : x_sum;
          if (m == p.m) {
            ones = sum;
          } else {
            totals[j * p.m + m] += static_cast<float>(sum - a.shift[m] * ones) * a.scale[j * kRunRoom + run];
          }
        }
      }
      memset(partial, 0, 4 * V::kInt8DotRows * all * L);
    }
  }

  static void run(const Int8Problem& problem, const Int8Detail& d, const char* shared, char* own, int64_t batch,
                  int64_t first, int64_t count) {
    constexpr int kRows = V::kInt8DotRows;
    static_assert(V::kInt8FewRows <= 4 && kRows <= 8, "");
    const Problem& p = problem.p;
    const Runs r = runs_of(p);
    const Integers v = W::integers(p);
    const bool lanes = by_lanes(r), zero = p.zero_point != nullptr;
    const int64_t all = p.m + problem.affine;  // rows of `x`, and the one of ones
    DotStep step = whole_of(all);
    if (lanes) step = zero ? lanes_of<true, false>(p.m) : lanes_of<false, false>(p.m);
    if (lanes && problem.affine) step = zero ? lanes_of<true, true>(p.m) : lanes_of<false, true>(p.m);
    float* scale = reinterpret_cast<float*>(own + d.scale_at);
    int32_t* offset = reinterpret_cast<int32_t*>(scale + (kRows + 1) * kRunRoom + 16);
    int32_t* partial = reinterpret_cast<int32_t*>(own + d.partial_at);
    float* sums = reinterpret_cast<float*>(own + d.sum_at);
    float* totals = sums + kRows * all * L;
    const float* x_scale = reinterpret_cast<const float*>(shared) + batch * d.m_padded;
    const int32_t* x_sums = reinterpret_cast<const int32_t*>(shared + d.sums) + batch * (r.count + 1) * d.m_padded;
    uint8_t* rooms = reinterpret_cast<uint8_t*>(own);
    Dot a;
    a.x_row = row_codes(r) * W::kBytes;
    a.lane_row = W::lane_vectors(r) * L;
    a.shift = reinterpret_cast<const int32_t*>(shared) + (p.batch + batch) * d.m_padded;
    a.scale = scale;
    a.offset = offset;
    a.bytes_in_16 = W::bytes_in_16(p);
    for (int64_t i = 0; i < count; i += kRows) {
      const int64_t rows = min64(kRows, count - i), row = first_row(&p, batch) + first + i;
      memset(partial, 0, 4 * kRows * all * L);
      memset(sums, 0, 4 * kRows * all * (L + 1));
      Step s = first_step(r);
      for (bool more = r.count > 0; more; more = next_step(r, s)) {
        const int64_t position = s.run * r.size + s.offset;
        const int64_t bytes = step_start(r, s) * p.bits / 8, end = bytes + step_codes(s) * p.bits / 8;
        for (int64_t j = 0; j < kRows; ++j) {
          const int64_t at = row + min64(j, rows - 1);
          for (int64_t b = bytes; b < end; b += 64) __builtin_prefetch(p.codes + (at + kRows) * p.words + b);
          W::step_scales(p, r, v, s, at, scale + j * kRunRoom, offset + j * kRunRoom);
          a.w[j] =
              W::decode(p, r, v, s, at, offset + j * kRunRoom, true, rooms + kRows * kStepRoom, rooms + j * kStepRoom);
        }
        a.x = reinterpret_cast<const uint8_t*>(shared + d.x) + (batch * all * row_codes(r) + position) * W::kBytes;
        a.runs = s.runs;
        a.size = s.length;
        a.sums = lanes ? static_cast<void*>(sums) : partial;
        a.lanes = nullptr;
        if (W::kCorrects && lanes)
          a.lanes = reinterpret_cast<const int32_t*>(shared + d.lanes) + batch * all * a.lane_row +
                    position / max64(r.size, W::kCodes) * L;
        if (lanes) {
          step(a);
          continue;
        }
        add_runs(p, d, s, step, a, rows, all, x_sums, totals);
      }
      for (int64_t j = 0; j < rows; ++j)
        for (int64_t m = 0; m < p.m; ++m) {
          const float sum = lanes ? V::sum(V::load(sums + (j * p.m + m) * L)) : totals[j * p.m + m];
          X::write(p, batch * p.y_batch + m * p.y_row + (first + i + j) * p.y_column, sum * x_scale[m]);
        }
    }
  }
};

}  // namespace
