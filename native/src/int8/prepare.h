// Preparation: `x` is quantized and packed, and its codes are summed.
#pragma once

#include "int8/one_row.h"
#include "int8/x.h"

namespace {

template <class V>
struct Int8Prepare {
  using X = Int8X<V>;
  using W = Int8Weight<V>;
  static constexpr int L = V::L;

  static void prepare(const Int8Problem* problem, const Plan* plan, void* memory, int64_t part) {
    const Problem& p = problem->p;
    const Runs r = runs_of(p);
    const Integers v = W::integers(p);
    const Int8Detail d = detail_of<Int8Detail>(plan);
    char* shared = static_cast<char*>(memory);
    const int64_t batch = part / d.panels, first = part % d.panels * L;
    const int64_t width = d.method == kFewMethod ? 1 : L;  // of a panel
    const int64_t rows = d.method == kFewMethod ? d.m_padded : width;
    const int64_t ones = d.method == kFewMethod && problem->affine ? p.m : -1;
    float* scales = reinterpret_cast<float*>(shared) + batch * d.m_padded;
    int32_t* shifts = reinterpret_cast<int32_t*>(shared) + (p.batch + batch) * d.m_padded;
    typename X::Row all[L + 8];
    int32_t* sums = reinterpret_cast<int32_t*>(shared + d.sums) + batch * (r.count + 1) * d.m_padded;
    uint8_t* x = reinterpret_cast<uint8_t*>(shared + d.x) + (batch * d.m_padded + first) * row_codes(r) * W::kBytes;
    const int32_t factor = p.zero_point != nullptr ? 1 : v.lowest;
    if constexpr (V::kPacks) {
      if (d.method == kPanelMethod) {
        Int8Pack<V>::pack(*problem, r, batch, first, scales + first, shifts + first, x);
        Int8Pack<V>::run_sums(r, factor, x, d.m_padded, sums + first);
        return;
      }
    }
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t m = first + i;
      all[i] = typename X::Row{0, 0, 0};
      if (m < p.m) all[i] = X::row_at(*problem, batch * p.m + m, batch * p.x_batch + m * p.x_row);
      scales[m] = all[i].scale;
      shifts[m] = all[i].shift;
    }
    // Some codes of all rows, and then the next, so that stores stay in L1.
    for (int64_t run = 0; run < r.count; ++run) {
      const int64_t length = run_length(r, p.k, run), start = run_start(r, run);
      for (int64_t i = 0; i < rows; ++i) sums[run * d.m_padded + first + i] = 0;
      for (int64_t at = 0; at < r.size; at += 256) {
        const int64_t room = min64(256, r.size - at), count = max64(min64(room, length - at), 0);
        for (int64_t i = 0; i < rows; ++i) {
          const int64_t m = first + i;
          int8_t codes[256];
          if (count < room || m >= p.m) memset(codes, 0, room);
          if (m < p.m && count > 0)
            X::read_codes(*problem, batch * p.x_batch + m * p.x_row + (start + at) * p.x_column, count, all[i], codes);
          if (m == ones) memset(codes, 1, count);
          int32_t sum = 0;
          for (int64_t j = 0; j < room; ++j) sum += codes[j];
          sums[run * d.m_padded + m] += factor * sum;
          const int64_t position = run * r.size + at;
          // Groups of a row are `width` groups apart, and rows of `x` one after the other if that is one.
          uint8_t* out = d.method == kFewMethod ? x + (i * row_codes(r) + position) * W::kBytes
                                                : x + position * width * W::kBytes + 4 * i;
          if (W::kBytes == 1) {
            for (int64_t j = 0; j < room; j += 4) memcpy(out + j * width, codes + j, 4);
          } else {
            for (int64_t j = 0; j < room; j += 2) {
              const int16_t two[2] = {codes[j], codes[j + 1]};
              memcpy(out + j * 2 * width, two, 4);
            }
          }
        }
      }
    }
    if (d.method != kFewMethod) return;
    // The row ends in whole vectors.
    const int64_t rest = row_codes(r) - r.padded;
    for (int64_t i = 0; i < rows; ++i) memset(x + (i * row_codes(r) + r.padded) * W::kBytes, 0, rest * W::kBytes);
    if constexpr (W::kCorrects) {
      if (!by_lanes(r)) return;
      int32_t* lanes = reinterpret_cast<int32_t*>(shared + d.lanes) + batch * rows * W::lane_vectors(r) * L;
      for (int64_t i = 0; i < rows; ++i) lane_sums(r, factor, x + i * row_codes(r), lanes + i * W::lane_vectors(r) * L);
      if constexpr (V::kInRegisters)
        if (d.tail > 0) {
          const int64_t bytes = Int8OneRow<V>::tail_bytes(*problem, r);
          Int8OneRow<V>::pack_tail(p, factor, x, reinterpret_cast<uint8_t*>(shared + d.tail) + batch * bytes);
        }
    }
  }

  // The sums of each lane over the vectors of a run; or of each vector, if it has several runs.
  static void lane_sums(const Runs& r, int32_t factor, const uint8_t* x, int32_t* out) {
    const int64_t vectors = max64(min64(r.size, row_codes(r)) / W::kCodes, 1);
    for (int64_t i = 0; i < W::lane_vectors(r); ++i, out += L) {
      for (int64_t l = 0; l < L; ++l) out[l] = 0;
      for (int64_t j = 0; j < vectors; ++j, x += W::kCodes)
        for (int64_t l = 0; l < L; ++l) out[l] += factor * sum_of_four(x + 4 * l);
    }
  }
};

}  // namespace
