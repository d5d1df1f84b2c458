// Rows of `x` as codes of a sign, and elements of `y`.
#pragma once

#include "core/runs.h"
#include "int8/int8.h"

namespace {

// The sum of four signed bytes.
EQQ_INLINE int32_t sum_of_four(const uint8_t* codes) {
  uint32_t word;
  memcpy(&word, codes, 4);
  word ^= 0x80808080;  // adds 128 to each, so that none is negative
  const uint32_t pairs = (word & 0xff00ff) + (word >> 8 & 0xff00ff);
  return static_cast<int32_t>((pairs & 0xffff) + (pairs >> 16)) - 4 * 128;
}

template <class V>
struct Int8X {
  // Returns `count` floats of `x`: where they lie if they are float32 and contiguous, or else converted, in `out`.
  static const float* read_floats(const Problem& p, int64_t at, int64_t count, float* out) {
    if (p.x_type == kFloat32) {
      const float* x = static_cast<const float*>(p.x) + at;
      if (p.x_column == 1) return x;
      for (int64_t i = 0; i < count; ++i) out[i] = x[i * p.x_column];
      return out;
    }
    const uint16_t* x = static_cast<const uint16_t*>(p.x) + at;
    if (p.x_type == kBFloat16) {
      for (int64_t i = 0; i < count; ++i) out[i] = V::one_bf16(x[i * p.x_column]);
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] = V::one_f16(x[i * p.x_column]);
    }
    return out;
  }

  // How a row of `x` becomes codes of a sign.
  struct Row {
    float scale;    // NaN if one of the floats is not finite
    float zero;     // its code, without a sign
    int32_t shift;  // what codes of a sign are too much
  };

  // Whether its floats become codes that are not all alike: a scale may be zero or NaN.
  EQQ_INLINE bool has_codes(const Row& row) { return __builtin_fabsf(row.scale) > 0; }

  EQQ_INLINE bool finds_scales(const Int8Problem& q) { return q.x_scale == nullptr; }

  // That of row `m`, by the largest magnitude of its floats, as an integer; and by their range, if it must be found.
  EQQ_INLINE Row row_of(const Int8Problem& q, int64_t m, uint32_t most, float low, float high) {
    Row row = {V::from_bits(most) / 127, 0, 0};
    if (!finds_scales(q)) {
      row.scale = q.x_scale[m];
      if (q.affine) row.zero = q.x_zero[m];
    } else if (q.affine) {
      // As XLA computes `high / 255 - low / 255`, mostly: it fuses either product.
      row.scale = __builtin_fmaf(high, 1 / 255.0f, -(low * (1 / 255.0f)));
      if (row.scale != 0) {
        const float zero = -low / row.scale + 12582912.0f;
        row.zero = zero > 12582912.0f + 255 ? 255 : zero - 12582912.0f;
      }
    }
    if (q.affine && most < 0x7f800000) row.shift = static_cast<int32_t>(row.zero) - 128;  // else `zero` may be NaN
    if (most >= 0x7f800000) row = {V::from_bits(0x7fc00000), 0, 0};
    return row;
  }

  // The same, of a row that begins at `at`.
  static Row row_at(const Int8Problem& q, int64_t m, int64_t at) {
    const Problem& p = q.p;
    if (q.form != kFloats) return row_of(q, m, 0, 0, 0);
    float room[256];
    uint32_t most = 0;  // magnitudes compare as integers
    float low = 0, high = 0;
    for (int64_t k = 0; k < p.k; k += 256) {
      const int64_t count = min64(256, p.k - k);
      const float* values = read_floats(p, at + k * p.x_column, count, room);
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t magnitude = V::to_bits(values[i]) & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
      }
      if (!q.affine || !finds_scales(q)) continue;
      for (int64_t i = 0; i < count; ++i) {
        low = values[i] < low ? values[i] : low;
        high = values[i] > high ? values[i] : high;
      }
    }
    return row_of(q, m, most, low, high);
  }

  // `count` codes of a row, at most 256.
  static void read_codes(const Int8Problem& q, int64_t at, int64_t count, const Row& row, int8_t* out) {
    const Problem& p = q.p;
    if (q.form != kFloats) {
      const uint8_t* x = static_cast<const uint8_t*>(p.x) + at;
      const uint8_t flip = q.form == kUnsigned ? 128 : 0;
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int8_t>(x[i * p.x_column] ^ flip);
      return;
    }
    if (!has_codes(row)) {
      memset(out, 0, count);
      return;
    }
    float room[256];
    const float* values = read_floats(p, at, count, room);
    const float least = q.affine ? 0 : -128, most = q.affine ? 255 : 127;
    const uint32_t flip = q.affine ? 128 : 0;
    // Adding 1.5 * 2^23 rounds to an integer, half to even, and leaves it in the low bits.
    for (int64_t i = 0; i < count; ++i) {
      float v = values[i] / row.scale + row.zero;
      v = v > most ? most : v;
      v = v < least ? least : v;
      out[i] = static_cast<int8_t>(V::to_bits(v + 12582912.0f) - flip);
    }
  }

  EQQ_INLINE void write(const Problem& p, int64_t at, float value) {
    if (p.x_type == kFloat32) {
      static_cast<float*>(p.y)[at] = value;
    } else if (p.x_type == kFloat16) {
      static_cast<uint16_t*>(p.y)[at] = V::one_to_f16(value);
    } else {
      static_cast<uint16_t*>(p.y)[at] = V::one_to_bf16(value);
    }
  }
};

}  // namespace
