// The algorithms of `encode.h`, compiled for each instruction set; without fused products, which XLA's have not.
#include <string.h>

#include "core/vectors.h"
#include "encode/encode.h"
#include "encode/trellis.h"

namespace {

constexpr int kPart = 512;  // codes at a time: whole segments of every packing

EQQ_INLINE void load_part(const EncodeProblem& p, int64_t at, int64_t count, float* out) {
  if (p.x_type == kFloat32) {
    memcpy(out, static_cast<const float*>(p.x) + at, count * sizeof(float));
    return;
  }
  const uint16_t* x = static_cast<const uint16_t*>(p.x) + at;
  if (p.x_type == kBFloat16) {
    uint32_t bits[kPart];
    for (int64_t i = 0; i < count; ++i) bits[i] = static_cast<uint32_t>(x[i]) << 16;
    memcpy(out, bits, count * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < count; ++i) out[i] = half_to_float(x[i]);
}

// Values in the units of codes.
EQQ_INLINE void scale_part(const EncodeProblem& p, int64_t row, int64_t first, int64_t count, float* v) {
  for (int64_t i = 0; i < count;) {
    const int64_t block = (first + i) / p.block_size, at = row * p.blocks + block;
    int64_t last = (block + 1) * p.block_size - first;
    if (last > count) last = count;
    const float divisor = p.divisor[at];
    if (p.offset != nullptr) {
      const float offset = p.offset[at];
      for (int64_t j = i; j < last; ++j) v[j] -= offset;
    }
    if (divisor == 0) {
      for (int64_t j = i; j < last; ++j) v[j] = 0;
    } else if (p.factor != nullptr && divisor == 1) {
      const float factor = p.factor[at];
      for (int64_t j = i; j < last; ++j) v[j] *= factor;
    } else {
      for (int64_t j = i; j < last; ++j) v[j] /= divisor;
    }
    if (p.shift != nullptr) {
      const float shift = p.shift[at];
      for (int64_t j = i; j < last; ++j) v[j] += shift;
    }
    i = last;
  }
}

// The codes of values in units of codes, a vector at a time.
EQQ_INLINE void code_part(const EncodeProblem& p, int64_t count, const float* v, uint8_t* out) {
  const float top = static_cast<float>((1 << p.bits) - 1);
  for (int64_t i = 0; i < count; i += kLanes) {
    Floats x = load_floats(v + i);
    Ints code;
    if (p.rule == kSteps) {
      const Ints bits = load_vector<Ints>(&x);
      const Ints order = bits ^ ((bits >> 31) & 0x7fffffff);
      code = Ints{} + p.codes[0];
      for (int64_t t = 0; t < p.num_steps; ++t) {
        const Ints beyond = order >= (Ints{} + p.steps[t]);
        code ^= beyond & (p.codes[t + 1] ^ p.codes[t]);
      }
    } else {
      const Floats bias = Floats{} + p.bias, zero = Floats{}, most = Floats{} + top;
      if (p.rule == kEven) {
        // Clipped first, which changes no result, so that adding this number rounds to whole ones.
        const Floats low = zero - bias, high = most - bias, magic = Floats{} + 12582912.0f;
        x = x > low ? x : low;
        x = x < high ? x : high;
        code = __builtin_convertvector(((x + magic) - magic) + bias, Ints);
      } else {
        x = x + bias;
        x = x > zero ? x : zero;
        x = x < most ? x : most;
        code = __builtin_convertvector(x, Ints);
      }
      x = load_floats(v + i);
    }
    code = x == x ? code : Ints{} + p.nan;
    store_vector(out + i, __builtin_convertvector(code, Bytes));
  }
}

// Packs one part of the width of a code; returns how many bytes that takes.
EQQ_INLINE int64_t pack_width(const uint8_t* codes, int64_t count, int shift, int width, uint8_t* out) {
  const int planes = 8 / width, mask = (1 << width) - 1;
  int64_t done = 0, bytes = 0;
  while (done < count) {
    const int64_t rest = count - done, plane = rest >= kPlane * planes ? int64_t{kPlane} : (rest + planes - 1) / planes;
    uint8_t* to = out + bytes;
    for (int64_t j = 0; j < plane; ++j) to[j] = static_cast<uint8_t>(codes[done + j] >> shift & mask);
    for (int t = 1; t < planes; ++t) {
      const uint8_t* from = codes + done + t * plane;
      const int64_t some = rest - t * plane < plane ? rest - t * plane : plane;  // the rest is padding, of zeros
      for (int64_t j = 0; j < some; ++j) to[j] |= static_cast<uint8_t>((from[j] >> shift & mask) << (t * width));
    }
    done += plane * planes;
    bytes += plane;
  }
  return bytes;
}

EQQ_INLINE int64_t pack_part(const uint8_t* codes, int64_t count, int bits, uint8_t* out) {
  if (bits == 8) {
    memcpy(out, codes, count);
    return count;
  }
  if ((bits & (bits - 1)) == 0) return pack_width(codes, count, 0, bits, out);
  const int64_t segment = kPlane * (8 / (bits & -bits));
  int64_t bytes = 0;
  for (int64_t i = 0; i < count; i += segment) {
    const int64_t some = count - i < segment ? count - i : segment;
    int shift = 0;
    for (int width = 4; width > 0; width /= 2)
      if (bits & width) {
        bytes += pack_width(codes + i, some, shift, width, out + bytes);
        shift += width;
      }
  }
  return bytes;
}

void encode_rows(const EncodeProblem* problem, int64_t first_row, int64_t last_row) {
  const EncodeProblem& p = *problem;
  alignas(64) float v[kPart] = {};
  alignas(64) uint8_t codes[kPart];
  for (int64_t row = first_row; row < last_row; ++row) {
    uint8_t* out = p.y + row * p.words;
    for (int64_t first = 0; first < p.k; first += kPart) {
      const int64_t count = p.k - first < kPart ? p.k - first : int64_t{kPart};
      load_part(p, row * p.k + first, count, v);
      scale_part(p, row, first, count, v);
      code_part(p, count, v, codes);
      out += pack_part(codes, count, p.bits, out);
    }
  }
}

EQQ_INLINE float as_float(int32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
EQQ_INLINE int32_t as_int(float value) {
  int32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The bits of the largest magnitude, as integers, among which NaN and infinity are the largest.
EQQ_INLINE int32_t largest_bits(const float* x, int64_t k) {
  Ints most = {};
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    Ints bits = load_vector<Ints>(x + i);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  int32_t largest = k >= kLanes ? largest_of(most) : 0;
  for (; i < k; ++i) {
    const int32_t bits = as_int(x[i]) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// The largest of the values and zero; with `low` the least.
EQQ_INLINE float extreme(const float* x, int64_t k, bool low) {
  // In this order the largest integers are the largest floats; zero is 0. Turned around it is the least ones.
  const int32_t flip = low ? static_cast<int32_t>(0x80000000) : 0;
  Ints most = {};
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    Ints bits = load_vector<Ints>(x + i);
    bits ^= flip;
    most = bits > most ? bits : most;  // negative floats are negative integers, which zero exceeds
  }
  int32_t largest = k >= kLanes ? largest_of(most) : 0;
  for (; i < k; ++i) {
    const int32_t bits = as_int(x[i]) ^ flip;
    largest = bits > largest ? bits : largest;
  }
  return largest == 0 ? 0.0f : as_float(largest ^ flip);
}

EQQ_INLINE float reduce_row(const float* x, int64_t k, int32_t kind) {
  const int32_t bits = largest_bits(x, k);
  const float largest = as_float(bits);
  if (k == 0) return 0;
  if (bits >= 0x7f800000) return __builtin_nanf("");
  if (kind == kLargest) return largest;
  if (kind == kAtLargest) {
    if (bits < 0x00800000) return x[0];  // to XLA subnormal numbers are zeros, all alike
    const float high = extreme(x, k, false), low = extreme(x, k, true);
    if (high != -low) return high > -low ? high : low;
    for (int64_t i = 0; i < k; ++i)  // the first of both signs
      if ((as_int(x[i]) & 0x7fffffff) == bits) return x[i];
  }
  return extreme(x, k, kind == kLow);
}

void reduce_rows(const ReduceProblem* p, int64_t first_row, int64_t last_row) {
  for (int64_t row = first_row; row < last_row; ++row) p->y[row] = reduce_row(p->x + row * p->k, p->k, p->kind);
}

}  // namespace

namespace EQQUANT_ISA {
extern const EncodeKernel kEncode = {encode_rows, reduce_rows, encode_trellis};
}
