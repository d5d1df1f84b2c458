// One quantized product, as plain C data. Every instruction set gets it; nothing of XLA is known here.
//
//   y(b, m, n) = sum over k of x(b, m, k) w(b, n, k)          or with `transpose`
//   y(b, m, k) = sum over n of x(b, m, n) w(b, n, k),         where
//   w(b, n, k) = (table[code] - zero_point) * (scale * row_scale) + offset.
//
// Most kernels see no offsets, no scales that are codes themselves, and only codes of one value that lie in one byte:
// `slabs.h`, whose own kernels read some of these weights as they are.
//
// With `selected`, `w(b)` is array `selected[b]` of a stack, which is read where it lies.
//
// Decoding is a problem without `x`: `m` is 0, `y` is (batch, n, k) without gaps, and `x_type` is the type of `y`.
#pragma once

#include <stdint.h>

enum FloatType { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// The meaning of the bits of scales.
enum ScaleKind {
  kScaleFloat32 = 0,
  kScaleFloat16 = 1,
  kScaleBFloat16 = 2,
  kScaleE8M0 = 3,
  kScaleE4M3 = 4,
  kScaleE5M2 = 5,
  kScaleUE4M4 = 6,
};

static inline int64_t scale_bytes(int kind) { return kind == kScaleFloat32 ? 4 : kind <= kScaleBFloat16 ? 2 : 1; }

// The values of codes of eight bits, where something is faster than a lookup.
enum ValueKind { kValueTable = 0, kValueInteger = 1, kValueE4M3 = 2, kValueE5M2 = 3 };

// Codes that share a byte stand a plane apart: byte `j` of a segment of 64 bytes holds code `j` of each of `8 / bits`
// planes of 64 codes, plane 0 in the low bits. A last, shorter segment is split into equal planes the same way. Codes
// of another width are split into parts of these, the widest in the low bits. A segment is as long as one of the
// narrowest part, and holds the bytes of one part after the other.
enum { kPlane = 64 };

// Whether each value of the codes of so many bits is one more than the last.
static inline bool is_consecutive(const float* table, int bits) {
  for (int i = 1; i < 1 << bits; ++i)
    if (table[i] != table[i - 1] + 1) return false;
  return true;
}

static inline bool is_split(int bits) { return (bits & (bits - 1)) != 0; }

// How many codes are packed together.
static inline int64_t segment_codes(int bits) {
  return bits % 2 ? kPlane * 8 : bits % 4 ? kPlane * 4 : bits % 8 ? kPlane * 2 : kPlane;
}

// The bytes of `length` codes.
static inline int64_t packed_bytes(int64_t length, int bits) {
  int64_t bytes = 0;
  for (int width = 8; width > 0; width /= 2)
    if (bits & width) bytes += (length * width + 7) / 8;
  return bytes;
}

// How rows are packed whose codes stand for several values. They decode to a byte for each value, the code of an
// integer.
enum CodecKind { kTrellis = 0, kGrid = 1 };

// The values of a segment. The last segment of a row may be shorter; of a trellis, rounded up to whole units.
constexpr int kTrellisSegment = 128, kTrellisUnit = 16, kGridSegment = 256;

// The codes of a part of a segment: indices of vectors; signs of eight values, also of seven where the number of
// negative ones is even; whether values are one less, otherwise one more.
enum PartKind { kIndex = 0, kSigns = 1, kEvenSigns = 2, kDown = 3 };
enum { kMostParts = 4, kMostIndexBits = 12 };

typedef struct CodecPart {
  int32_t kind, bits;
  int32_t low;     // of an index: these are its bits from bit `low` on
  int32_t values;  // how many values have one code together
} CodecPart;

typedef struct Codec {
  int32_t kind;
  // A trellis: value `t` of a segment is `hash_window` of the 12 bits from `t * bits` on, in a circle.
  int32_t bits;
  uint32_t multipliers;
  // A grid: the parts of a segment lie one after the other, packed as codes of single values are.
  int32_t size;  // of a vector: 8 or 4 values
  int32_t num_parts;
  CodecPart parts[kMostParts];
  const int8_t* vectors;  // one for each index; a code is the value less the first of the table
} Codec;

// The sum of four numbers of six bits.
static inline uint8_t hash_window(uint32_t window, uint32_t multipliers) {
  const uint32_t product = window * multipliers & 0xffff, high = product * (multipliers >> 16) >> 16;
  const uint32_t pairs = (product & 0x3f3f) + (high & 0x3f3f);
  return static_cast<uint8_t>(pairs + (pairs >> 8));
}

static inline int64_t codec_segment(const Codec* codec) {
  return codec->kind == kTrellis ? kTrellisSegment : kGridSegment;
}

// The bytes of a segment, or of a shorter one.
static inline int64_t segment_bytes(const Codec* codec, int64_t length) {
  if (codec->kind == kTrellis) return (length + kTrellisUnit - 1) / kTrellisUnit * kTrellisUnit * codec->bits / 8;
  int64_t bytes = 0;
  for (int i = 0; i < codec->num_parts; ++i)
    bytes += packed_bytes((length + codec->parts[i].values - 1) / codec->parts[i].values, codec->parts[i].bits);
  return bytes;
}

typedef struct Problem {
  const void* x;              // (batch, m, inner) by strides
  void* y;                    // (batch, m, outer) by strides, of the type of x
  const uint8_t* codes;       // (batch, n, words)
  const void* scale;          // (batch, n, blocks)
  const float* row_scale;     // (batch, n), or null
  const uint8_t* zero_point;  // (batch, n, zero_words), packed as codes are; or null
  const float* table;         // 2^bits values
  const int32_t* selected;    // (batch,), or null; then codes, scales and so on are (stack, n, ...)
  const void* offset;         // (batch, n, blocks), as scales; or null
  // Scales that are codes, `scale_table[code] * scale`, and offsets likewise: (batch, n, scale_words), or null.
  const uint8_t *scale_codes, *offset_codes;
  const float* scale_table;  // 2^scale_bits values
  const Codec* codec;        // or null; then `bits` is of what rows decode to, and `values` are integers

  int64_t batch, m, n, k;
  int64_t stack;       // with `selected`
  int64_t words;       // bytes of a row of codes; with columns, of the whole matrix
  int64_t blocks;      // scales of a row: k / block_size, rounded up
  int64_t zero_words;  // bytes of the zero points of a row
  int64_t block_size;  // at most k
  // With quantized scales: bytes of the scales of a row, how many share one of `scale`, and how many of these a row
  // has.
  int64_t scale_words, scale_block_size, scale_blocks;

  // In elements. One stride of a matrix is 1: its rows or its columns are contiguous.
  int64_t x_batch, x_row, x_column;
  int64_t y_batch, y_row, y_column;

  int32_t bits;        // 1 to 8
  int32_t scale_bits;  // of the codes of scales: 1 to 8
  int32_t values;      // ValueKind; kValueTable for 1, 2 and 4 bits
  int32_t scale_kind;  // ScaleKind
  int32_t x_type;      // FloatType
  int32_t transpose;   // 0 or 1
  int32_t clip;        // when decoding, whether results are clipped to the finite range of their type
  int32_t coarse;      // whether 16 bits of x are enough: results have no more, or the caller wants no more
} Problem;

// The bytes of a row of codes.
static inline int64_t row_bytes(const Problem* p) {
  if (p->codec == 0) return packed_bytes(p->k, p->bits);
  const int64_t segment = codec_segment(p->codec);
  return p->k / segment * segment_bytes(p->codec, segment) + segment_bytes(p->codec, p->k % segment);
}

// Unpacks codes `first` to `last` of a row of `words` bytes, of 1, 2, 4 or 8 bits.
template <typename T>
static inline void unpack_codes(const uint8_t* packed, int64_t words, int bits, int64_t first, int64_t last, T* out) {
  const int64_t planes = 8 / bits, segment = kPlane * planes;
  while (first < last) {
    const int64_t word = first / segment * kPlane, within = first % segment;
    const int64_t plane = words - word < kPlane ? words - word : int64_t{kPlane};
    const int64_t at = within % plane, left = plane - at < last - first ? plane - at : last - first;
    const int shift = static_cast<int>(within / plane) * bits, mask = (1 << bits) - 1;
    for (int64_t i = 0; i < left; ++i) out[i] = static_cast<T>(packed[word + at + i] >> shift & mask);
    out += left;
    first += left;
  }
}

// Likewise the zero points of blocks of a row.
template <typename T>
static inline void unpack_zero_points(const Problem& p, int64_t row, int64_t first, int64_t last, T* out) {
  unpack_codes(p.zero_point + row * p.zero_words, p.zero_words, p.bits, first, last, out);
}

// The first row of the weight of a batch. Like `jax.lax.dynamic_slice`, takes the nearest of a stack.
static inline int64_t first_row(const Problem* p, int64_t batch) {
  if (p->selected == 0) return batch * p->n;
  const int64_t at = p->selected[batch];
  return (at < 0 ? 0 : at < p->stack ? at : p->stack - 1) * p->n;
}
