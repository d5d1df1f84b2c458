// Rows of the weight as they are multiplied, a step at a time, with scales and biases of codes.
#pragma once

#include "int8/layout.h"

namespace {

template <class V>
struct Int8Weight {
  using I = typename V::I;
  using F = typename V::F;
  static constexpr int L = V::L;
  static constexpr int64_t kBytes = 4 / V::kGroup;  // of a code
  static constexpr int64_t kCodes = L * V::kGroup;  // of a vector
  static constexpr bool kCorrects = V::kGroup == 4;

  // How bytes become integers, as they are multiplied.
  EQQ_INLINE Integers integers(const Problem& p) {
    Integers v = integers_of(p);
    v.lowest += V::kBias;
    return v;
  }

  // Whether the vocabulary multiplies the codes of a weight.
  EQQ_INLINE bool fits(const Problem& p) { return V::kMostCode == 255 || largest_code(p) <= V::kMostCode; }

  // How many bytes may be added up in 16 bits: of a row, or of a panel of `x`; 0 without such sums.
  EQQ_INLINE int64_t bytes_in_16(const Problem& p) {
    if constexpr (V::kSumsIn16Bits) return 4 * L * V::most_additions(largest_code(p));
    return 0;
  }

  // Vectors of sums by lanes in a row of `x`.
  EQQ_INLINE int64_t lane_vectors(const Runs& r) { return row_codes(r) / max64(min64(r.size, row_codes(r)), kCodes); }

  // A step of a row as the kernels multiply it. Bytes beyond the end of a run may be anything, since `x` is zero there.
  // `direct`: it may be the weight itself. `out` and `room` have `kStepRoom` bytes.
  static const uint8_t* decode(const Problem& p, const Runs& r, const Integers& v, const Step& s, int64_t row,
                               const int32_t* offset, bool direct, uint8_t* room, uint8_t* out) {
    const int64_t from = step_start(r, s), last = s.run + s.runs - 1;
    const int64_t end = min64(run_start(r, last) + run_length(r, p.k, last), from + (s.runs == 1 ? s.length : p.k));
    if (end <= from) return out;  // a last run that is short may end in an earlier step
    if (kBytes == 1 && in_a_row(r, s)) {
      const uint8_t* codes = some_codes(p, v, row, from, end, out);
      if (p.bits < 8 || (direct && from + round_up(step_codes(s), 64) <= p.k)) return codes;
      memcpy(out, codes, end - from);
      return out;
    }
    const uint8_t* codes = some_codes(p, v, row, from, end, room);
    for (int64_t i = 0; i < s.runs; ++i) {
      const int64_t start = run_start(r, s.run + i) + s.offset - from;
      const int64_t count = min64(s.length, run_length(r, p.k, s.run + i) - s.offset);
      if (kBytes == 1) {
        memcpy(out + i * s.length, codes + start, count);
      } else {
        widen(codes + start, count, static_cast<int16_t>(offset[i]), reinterpret_cast<int16_t*>(out) + i * s.length);
      }
    }
    return out;
  }

  static void widen(const uint8_t* codes, int64_t count, int16_t offset, int16_t* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int16_t>(codes[i] + offset);
  }

  // The biases of the codes of blocks `first` to `last`.
  static void offsets(const Problem& p, const Integers& v, int64_t row, int64_t first, int64_t last, int32_t* out) {
    unpack_zero_points(p, row, first, last, out);
    for (int64_t i = 0; i < last - first; ++i) out[i] = v.lowest - out[i];
  }

  // Fetches scales and zero points of the runs of a step, of some rows.
  EQQ_INLINE void fetch_scales(const Problem& p, const Runs& r, const Step& s, int64_t row, int64_t rows) {
    const int64_t block = s.run / r.per_block, item = scale_bytes(p.scale_kind);
    for (int64_t i = row; i < row + rows; ++i) {
      const char* scales = static_cast<const char*>(p.scale) + (i * p.blocks + block) * item;
      for (int64_t at = 0; at < s.runs * item; at += 64) __builtin_prefetch(scales + at);
      if (p.zero_point != nullptr) __builtin_prefetch(p.zero_point + i * p.zero_words + block * p.bits / 8);
    }
  }

  // Scales of the runs of a step, and what codes are off.
  static void step_scales(const Problem& p, const Runs& r, const Integers& v, const Step& s, int64_t row, float* scale,
                          int32_t* offset) {
    const int64_t first = s.run / r.per_block, last = (s.run + s.runs - 1) / r.per_block + 1;
    if (s.ends) {
      V::scales(&p, row, first, last, scale);
      for (int64_t i = s.runs; i < s.runs + 4; ++i) scale[i] = 0;  // multiplies zero
    }
    if (p.zero_point != nullptr) {
      offsets(p, v, row, first, first + s.runs, offset);
      for (int64_t i = s.runs; i < s.runs + 4; ++i) offset[i] = 0;
    } else {
      for (int64_t i = 0; i < s.runs; ++i) offset[i] = v.lowest;
    }
  }

  // Four bytes in every lane.
  EQQ_INLINE I word(const uint8_t* p) {
    int32_t a;
    memcpy(&a, p, 4);
    return V::broadcast_int(a);
  }

  // Values of `n` blocks, each in its share of the lanes.
  EQQ_INLINE I several(const int32_t* p, int64_t n) {
    if constexpr (kCodes > 16)
      if (n > 1) return V::spread_int(p, V::lanes(0, static_cast<int>(n)));
    return V::broadcast_int(*p);
  }
  EQQ_INLINE F several(const float* p, int64_t n) {
    if constexpr (kCodes > 16)
      if (n > 1) return V::spread(p, V::lanes(0, static_cast<int>(n)));
    return V::broadcast(*p);
  }
};

}  // namespace
