// Data of the named tests: numbers, and the bits in which kernels get them. Expected values are computed from the
// numbers, in float64, so nothing here unpacks or decodes.
#ifndef EQQUANT_TESTS_UNIT_DATA_H_
#define EQQUANT_TESTS_UNIT_DATA_H_

#include <math.h>
#include <string.h>

#include <algorithm>
#include <random>
#include <vector>

#include "codecs.h"
#include "unit.h"

using Random = std::mt19937;  // its numbers are the same everywhere, unlike the distributions'

// A whole number from `least` to `most`.
inline int64_t whole(Random& random, int64_t least, int64_t most) {
  return least + static_cast<int64_t>(random() % static_cast<uint64_t>(most - least + 1));
}

// Tasks run at once, in the thread that schedules them: units and the memory of workers are as for several threads,
// and a test is deterministic. `fuzz.cpp` has real threads.
struct Pool {
  template <typename Task>
  void Schedule(Task task) {
    task();
  }
};
constexpr int64_t kThreads = 2;

// Fails where a check of a problem found something wrong with it.
inline void expect_accepted(const char* wrong) {
  if (wrong != nullptr) fail("the problem is refused: %s", wrong);
}

// The matrix of a stack that a batch has; beyond the ends, the nearest one.
inline int64_t matrix_of(const std::vector<int32_t>& selected, int64_t batch, int64_t stack) {
  return selected.empty() ? batch : std::min<int64_t>(std::max(selected[batch], 0), stack - 1);
}

inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

// A float of few bits by its definition, without infinities and NaN.
inline double minifloat(uint32_t code, int exponent_bits, int mantissa_bits, int bias) {
  const double mantissa = ldexp(code & ((1u << mantissa_bits) - 1), -mantissa_bits);
  const int exponent = static_cast<int>(code >> mantissa_bits & ((1u << exponent_bits) - 1));
  const double magnitude = exponent == 0 ? ldexp(mantissa, 1 - bias) : ldexp(1 + mantissa, exponent - bias);
  return code >> (exponent_bits + mantissa_bits) & 1 ? -magnitude : magnitude;
}

// A float whose largest exponent means infinity or NaN.
inline double ieee_float(uint32_t code, int exponent_bits, int mantissa_bits) {
  const uint32_t exponents = ((1u << exponent_bits) - 1) << mantissa_bits;
  if ((code & exponents) != exponents)
    return minifloat(code, exponent_bits, mantissa_bits, (1 << (exponent_bits - 1)) - 1);
  if (code & ((1u << mantissa_bits) - 1)) return NAN;
  return code >> (exponent_bits + mantissa_bits) & 1 ? -INFINITY : INFINITY;
}
inline double half_value(uint16_t bits) { return ieee_float(bits, 5, 10); }
inline double bfloat16_value(uint16_t bits) { return ieee_float(bits, 8, 7); }
inline double e4m3_value(uint8_t code) { return (code & 127) == 127 ? NAN : minifloat(code, 4, 3, 7); }
inline double e5m2_value(uint8_t code) { return ieee_float(code, 5, 2); }

// What the bits of a scale mean.
inline double scale_value(int kind, uint32_t bits) {
  switch (kind) {
    case kScaleFloat32: return float_of(bits);
    case kScaleFloat16: return half_value(static_cast<uint16_t>(bits));
    case kScaleBFloat16: return bfloat16_value(static_cast<uint16_t>(bits));
    case kScaleE8M0: return bits == 255 ? NAN : ldexp(1, static_cast<int>(bits) - 127);
    case kScaleE4M3: return e4m3_value(static_cast<uint8_t>(bits));
    case kScaleE5M2: return e5m2_value(static_cast<uint8_t>(bits));
    default: return minifloat(bits, 4, 4, 8);
  }
}

constexpr const char* kScaleNames[] = {"float32", "float16", "bfloat16", "e8m0", "e4m3", "e5m2", "ue4m4"};
constexpr const char* kTypeNames[] = {"float32", "bfloat16", "float16"};

// Bits of a scale between 1/2 and 4.
inline uint32_t some_scale(Random& random, int kind) {
  const uint32_t some = static_cast<uint32_t>(whole(random, 0, 127));
  switch (kind) {
    case kScaleFloat32: return bits_of(1 + static_cast<float>(some) / 100);
    case kScaleFloat16: return 0x3800 + 8 * some + 3;
    case kScaleBFloat16: return 0x3f00 + some;
    case kScaleE8M0: return 126 + some % 3;
    case kScaleE4M3: return 0x30 + some % 24;
    case kScaleE5M2: return 0x38 + some % 12;
    default: return 0x70 + some % 48;
  }
}

// A number in 16 bits, which hold it exactly.
inline uint16_t sixteen_bits(int type, double number) {
  const uint32_t bits = bits_of(static_cast<float>(number));
  if (type == kBFloat16) return static_cast<uint16_t>(bits >> 16);
  const uint32_t sign = bits >> 16 & 0x8000;
  if (isnan(number)) return 0x7e00;
  if (isinf(number)) return static_cast<uint16_t>(sign | 0x7c00);
  return static_cast<uint16_t>(number == 0 ? sign : sign | ((bits >> 13 & 0x3ffff) - (112 << 10)));
}

inline int64_t float_bytes(int type) { return type == kFloat32 ? 4 : 2; }

inline void store_float(int type, double number, uint8_t* to) {
  const float four = static_cast<float>(number);
  const uint16_t two = sixteen_bits(type, number);
  memcpy(to, type == kFloat32 ? static_cast<const void*>(&four) : &two, float_bytes(type));
}
inline double load_float(int type, const uint8_t* from) {
  uint32_t bits = 0;
  memcpy(&bits, from, float_bytes(type));
  return type == kFloat32  ? float_of(bits)
       : type == kBFloat16 ? bfloat16_value(static_cast<uint16_t>(bits))
                           : half_value(static_cast<uint16_t>(bits));
}

// How far a number is rounded to a type, at most.
inline double rounding(int type, double number) {
  if (type == kFloat32) return 0;
  return fabs(number) * (type == kFloat16 ? 0x1p-11 : 0x1p-8) + (type == kFloat16 ? 0x1p-25 : 0);
}

// Appends some bits of each code, of width 1, 2, 4 or 8, packed by planes: see `problem.h`.
inline void pack_planes(const int* codes, int64_t count, int shift, int width, std::vector<uint8_t>* out) {
  const int planes = 8 / width, mask = (1 << width) - 1;
  for (int64_t first = 0; first < count; first += 64 * planes) {
    const int64_t length = std::min<int64_t>(count - first, 64 * planes), plane = (length + planes - 1) / planes;
    std::vector<uint8_t> bytes(plane);
    for (int64_t i = 0; i < length; ++i)
      bytes[i % plane] |= static_cast<uint8_t>((codes[first + i] >> shift & mask) << (i / plane * width));
    out->insert(out->end(), bytes.begin(), bytes.end());
  }
}

// Packs rows of codes of any width: 3, 5, 6 and 7 bits in parts, the widest with the low bits.
inline std::vector<uint8_t> pack(const std::vector<int>& codes, int64_t length, int bits) {
  const int64_t segment = bits == 8 ? length : 64 * (8 / (bits & -bits));
  std::vector<uint8_t> out;
  for (size_t row = 0; row < codes.size(); row += length)
    for (int64_t first = 0, count; first < length; first += count) {
      count = std::min(segment, length - first);
      int shift = 0;
      for (int width = 8; width > 0; width /= 2) {
        if ((bits & width) == 0) continue;
        pack_planes(&codes[row + first], count, shift, width, &out);
        shift += width;
      }
    }
  out.shrink_to_fit();  // so that the sanitizer sees its end
  return out;
}

// What codes stand for.
enum Table {
  kAnyFloats,    // no two alike
  kIntegers,     // consecutive
  kHalves,       // the values of FP4, in an order of ours
  kFromZero,     // consecutive integers, from zero on
  kAnyIntegers,  // of eight bits, not in order
  kE4M3,
  kE5M2,
};

// The shape and the format of a weight.
struct Form {
  int64_t n = 13, k = 165, block = 32, stack = 1;
  int bits = 4;
  Table table = kAnyFloats;
  int scale_kind = kScaleFloat32;
  bool zero_points = false, row_scales = false, offsets = false;
  int scale_bits = 0;            // of scales that are codes
  int64_t scale_block = 4;       // how many of these share a scale
  bool scale_integers = false;   // which they mean, each one more than the last
  const Codec* codec = nullptr;  // of codes that stand for several values

  void set_codec(const NamedCodec& a) {
    codec = &a.codec;
    bits = a.bits;
    table = kIntegers;
  }
};

// A weight of random codes and scales: numbers, and the arrays that kernels read.
struct Weight {
  explicit Weight(const Form& form)
      : form(form), blocks((form.k + form.block - 1) / form.block), rows(form.stack * form.n) {
    Random random(1);
    make_table(random);
    codes.resize(rows * form.k);
    for (int& code : codes) code = static_cast<int>(whole(random, 0, (1 << form.bits) - 1));
    // The largest codes of FP8 are infinities and NaN.
    for (int& code : codes)
      if (form.table >= kE4M3 && (code & 127) >= 112) code &= ~64;
    if (form.zero_points) {
      zeros.resize(rows * blocks);
      for (int& zero : zeros) zero = static_cast<int>(whole(random, 0, (1 << form.bits) - 1));
    }
    if (form.row_scales) {
      row_scales.resize(rows);
      for (float& scale : row_scales) scale = static_cast<float>(whole(random, 64, 127)) / 96;
    }
    if (form.codec != nullptr) take_any_bytes(random);
    make_scales(random, &scales, &scale_bytes_, &scale_codes_);
    if (form.offsets) make_scales(random, &offsets, &offset_bytes_, &offset_codes_);
    pack_codes();
  }

  // Call it after changing codes or zero points.
  void pack_codes() {
    if (form.codec == nullptr) codes_ = pack(codes, form.k, form.bits);
    if (form.zero_points) zeros_ = pack(zeros, blocks, form.bits);
  }
  // Changes the scale of a block, which is no code, to the value of some bits.
  void set_scale(int64_t row, int64_t block, uint32_t bits) {
    scales[row * blocks + block] = scale_value(form.scale_kind, bits);
    const int64_t width = scale_bytes(form.scale_kind);
    memcpy(&scale_bytes_[(row * blocks + block) * width], &bits, width);
  }

  // The value of a code, less the zero point; and the scale, times the scale of the row.
  double value(int64_t row, int64_t k) const {
    return table[codes[row * form.k + k]] - (form.zero_points ? zeros[row * blocks + k / form.block] : 0);
  }
  double scale(int64_t row, int64_t k) const {
    return scales[row * blocks + k / form.block] * (form.row_scales ? row_scales[row] : 1);
  }
  double offset(int64_t row, int64_t k) const { return form.offsets ? offsets[row * blocks + k / form.block] : 0; }

  // The part of a problem that is the weight.
  void describe(Problem* p) const {
    p->codes = codes_.data();
    p->scale = scale_bytes_.data();
    p->table = table.data();
    p->n = form.n;
    p->k = form.k;
    p->bits = form.bits;
    p->codec = form.codec;
    p->words = row_bytes(p);
    p->blocks = blocks;
    p->block_size = form.block;
    p->scale_kind = form.scale_kind;
    const bool bytes = form.bits == 8 || is_split(form.bits);
    p->values = (form.table == kIntegers || form.table == kFromZero) && bytes ? kValueInteger
              : form.table == kE4M3                                           ? kValueE4M3
              : form.table == kE5M2                                           ? kValueE5M2
                                                                              : kValueTable;
    if (form.zero_points) {
      p->zero_point = zeros_.data();
      p->zero_words = packed_bytes(blocks, form.bits);
    }
    if (form.row_scales) p->row_scale = row_scales.data();
    if (form.offsets) p->offset = offset_bytes_.data();
    if (form.scale_bits == 0) return;
    p->scale_bits = form.scale_bits;
    p->scale_table = scale_table.data();
    p->scale_codes = scale_codes_.data();
    p->scale_words = packed_bytes(blocks, form.scale_bits);
    p->scale_block_size = form.scale_block;
    p->scale_blocks = (blocks + form.scale_block - 1) / form.scale_block;
    if (form.offsets) p->offset_codes = offset_codes_.data();
  }

  Form form;
  int64_t blocks, rows;  // of a row; of all matrices
  std::vector<float> table, row_scales, scale_table;
  std::vector<int> codes, zeros;        // (rows, k), (rows, blocks)
  std::vector<double> scales, offsets;  // (rows, blocks)

 private:
  // Any bytes are codes of a codec.
  void take_any_bytes(Random& random) {
    Problem p = {};
    p.k = form.k;
    p.codec = form.codec;
    codes_.resize(rows * row_bytes(&p));
    for (uint8_t& byte : codes_) byte = static_cast<uint8_t>(random());
    codes_.shrink_to_fit();
    for (int64_t i = 0; i < rows * form.k; ++i)
      codes[i] = code_at(form.codec, &codes_[i / form.k * row_bytes(&p)], form.k, form.bits, i % form.k);
  }

  void make_table(Random& random) {
    const int count = 1 << form.bits;
    const int middle = form.codec != nullptr && form.codec->kind == kTrellis ? 126 : count / 2;
    const float halves[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6};
    table.resize(count);
    for (int i = 0; i < count; ++i) {
      switch (form.table) {
        case kAnyFloats: table[i] = static_cast<float>(whole(random, -999, 999) + 0.37) / 333; break;
        case kIntegers: table[i] = static_cast<float>(i - middle); break;
        case kFromZero: table[i] = static_cast<float>(i); break;
        case kHalves: table[i] = halves[i % 16]; break;
        case kAnyIntegers: table[i] = static_cast<float>((i * 77 + 5) % 256 - 128); break;
        case kE4M3: table[i] = static_cast<float>(e4m3_value(static_cast<uint8_t>(i))); break;
        case kE5M2: table[i] = static_cast<float>(e5m2_value(static_cast<uint8_t>(i))); break;
      }
    }
  }

  void make_scales(Random& random, std::vector<double>* numbers, std::vector<uint8_t>* bytes,
                   std::vector<uint8_t>* packed) {
    const int64_t width = scale_bytes(form.scale_kind);
    const int64_t outer = form.scale_bits > 0 ? (blocks + form.scale_block - 1) / form.scale_block : blocks;
    std::vector<double> floats(rows * outer);
    bytes->resize(rows * outer * width);
    for (int64_t i = 0; i < rows * outer; ++i) {
      const uint32_t bits = some_scale(random, form.scale_kind);
      floats[i] = scale_value(form.scale_kind, bits);
      memcpy(&(*bytes)[i * width], &bits, width);
    }
    *numbers = floats;
    if (form.scale_bits == 0) return;
    scale_table.resize(int64_t{1} << form.scale_bits);
    for (size_t i = 0; i < scale_table.size(); ++i)
      scale_table[i] = form.scale_integers ? static_cast<float>(i) - 3  // a zero and negative ones among them
                                           : static_cast<float>(i + 1) / static_cast<float>(scale_table.size());
    std::vector<int> inner(rows * blocks);
    numbers->resize(rows * blocks);
    for (int64_t i = 0; i < rows * blocks; ++i) {
      inner[i] = static_cast<int>(whole(random, 0, (1 << form.scale_bits) - 1));
      (*numbers)[i] =
          static_cast<float>(scale_table[inner[i]] * floats[i / blocks * outer + i % blocks / form.scale_block]);
    }
    *packed = pack(inner, blocks, form.scale_bits);
  }

  std::vector<uint8_t> codes_, zeros_, scale_bytes_, offset_bytes_, scale_codes_, offset_codes_;
};

// Where the numbers of x and y lie. Between rows there may be gaps.
struct Layout {
  bool x_by_columns = false, y_by_columns = false;
  int64_t gap = 0;

  void describe(int64_t inner, int64_t outer, Problem* p) const {
    p->x_row = x_by_columns ? 1 : inner + gap;
    p->x_column = x_by_columns ? p->m + gap : 1;
    p->x_batch = x_by_columns ? inner * p->x_column : p->m * p->x_row;
    p->y_row = y_by_columns ? 1 : outer + gap;
    p->y_column = y_by_columns ? p->m + gap : 1;
    p->y_batch = y_by_columns ? outer * p->y_column : p->m * p->y_row;
  }
};

// Results of a problem that is described, with a byte in all that nobody wrote.
struct Results {
  explicit Results(Problem* p) : item(float_bytes(p->x_type)), bytes(p->batch * p->y_batch * item, kUnwritten) {
    p->y = bytes.data();
  }

  // A number, which is read once.
  double take(const Problem& p, int64_t batch, int64_t row, int64_t column) {
    uint8_t* at = &bytes[item * (batch * p.y_batch + row * p.y_row + column * p.y_column)];
    const double number = load_float(p.x_type, at);
    memset(at, kUnwritten, item);
    return number;
  }
  // Once all numbers are read.
  void expect_gaps() const {
    for (size_t i = 0; i < bytes.size(); ++i)
      if (bytes[i] != kUnwritten) fail("byte %zu of a gap of y is written", i);
  }

  static constexpr uint8_t kUnwritten = 0xa5;
  int64_t item;
  std::vector<uint8_t> bytes;
};

#endif  // EQQUANT_TESTS_UNIT_DATA_H_
