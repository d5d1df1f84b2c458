// The grid of `Codec`: vectors of eight or four values that codes index, with signs, or moved by one. These are the IQ
// types of GGUF (`eqquant/_formats/iq.py`).
#pragma once

#include <string.h>

#include "core/problem.h"
#include "slabs/unpack.h"

namespace {

constexpr int kGridCodes = kGridSegment / 4;  // of a segment, at most
constexpr uint64_t kOnes = 0x0101010101010101;
typedef uint8_t GridBytes __attribute__((vector_size(32)));

template <typename T>
EQQ_INLINE uint64_t load_bytes(const uint8_t* p) {
  T bytes;
  memcpy(&bytes, p, sizeof bytes);
  return bytes;
}

// Unpacks `kCount` codes of a part, those of a whole segment: eight at a time, in registers.
template <int kBits, int kCount>
EQQ_INLINE void unpack_eights(const uint8_t* bytes, uint8_t* out) {
#pragma GCC unroll 8
  for (int i = 0; i < kCount; i += 8) {
    uint64_t all = 0;
    int start = 0, done = 0;
#pragma GCC unroll 4
    for (int width = 8; width > 0; width /= 2) {
      if ((kBits & width) == 0) continue;
      const int plane = kCount * width / 8;
      uint64_t some;
      if (plane >= 8) {
        some = load_bytes<uint64_t>(bytes + start + i % plane) >> (i / plane * width);
      } else {  // one bit of 32 codes
        const uint64_t four = load_bytes<uint32_t>(bytes + start);
        some = four >> (i / 4) | four >> (i / 4 + 1) << 32;
      }
      all |= (some & kOnes * ((1 << width) - 1)) << done;
      start += plane;
      done += width;
    }
    memcpy(out + i, &all, sizeof all);
  }
}

// Unpacks the `count` codes of a part. `out` has room for a plane more.
EQQ_NOINLINE void unpack_codes_of_part(const uint8_t* bytes, const uint8_t* limit, int64_t count, int bits,
                                       uint8_t* out) {
  if (count == 8 && bits == 1) {
    for (int i = 0; i < 8; ++i) out[i] = bytes[0] >> i & 1;
    return;
  }
  if (count != 64 && count != 32) return unpack(bytes, limit, count, bits, 0, count, 1, out, 0);
  by_count<8>(bits, [=](auto width) {
    constexpr int kBits = decltype(width)::value;
    count == 64 ? unpack_eights<kBits, 64>(bytes, out) : unpack_eights<kBits, 32>(bytes, out);
  });
}

// The codes of a segment.
struct GridCodes {
  uint8_t index[2][kGridCodes + kPlane];  // of vectors: the low eight bits, and the others
  uint8_t moves[kGridCodes + kPlane];     // signs of eight values; of kDown: 1 where values are one less
  int down_shift;                         // of kDown: values `8 i` to `8 i + 7` have code `i >> down_shift` of `moves`
};

// Adds the eighth sign of each byte: the number of negative values is even.
EQQ_INLINE void add_last_signs(uint8_t* signs) {
  for (int i = 0; i < kGridSegment / 8; i += 8) {
    const uint64_t seven = load_bytes<uint64_t>(signs + i);
    uint64_t sum = seven ^ seven >> 4;  // the lowest bit of a byte becomes the sum of all
    sum ^= sum >> 2;
    sum ^= sum >> 1;
    const uint64_t eight = seven | (sum & kOnes) << 7;
    memcpy(signs + i, &eight, sizeof eight);
  }
}

// Unpacks the parts of a segment of `length` values; returns the end of the segment.
EQQ_INLINE const uint8_t* unpack_parts(const Codec& codec, const uint8_t* bytes, const uint8_t* limit, int64_t length,
                                       GridCodes* out) {
  for (int i = 0; i < codec.num_parts; ++i) {
    const CodecPart& part = codec.parts[i];
    const int64_t count = (length + part.values - 1) >> __builtin_ctz(part.values);
    unpack_codes_of_part(bytes, limit, count, part.bits, part.kind == kIndex ? out->index[part.low != 0] : out->moves);
    bytes += packed_bytes(count, part.bits);
    if (part.kind == kDown) out->down_shift = part.values == 8 ? 0 : 2;
    if (part.kind == kEvenSigns) add_last_signs(out->moves);
  }
  return bytes;
}

// Keeps an index in a register of its own: compilers would compute addresses in vectors, and take them out again.
EQQ_INLINE int64_t in_register(int64_t index) {
  __asm__("" : "+r"(index));
  return index;
}

// GridBytes of 32 values: 255 for a negative one, 0 for another. `signs` has a bit for each.
EQQ_INLINE GridBytes spread_signs(const uint8_t* signs) {
  constexpr uint64_t kBits = 0x8040201008040201;
#if defined(__AVX2__)
  const __m256i places = _mm256_set_epi64x(3 * kOnes, 2 * kOnes, kOnes, 0), bits = _mm256_set1_epi64x(kBits);
  const __m256i four = _mm256_set1_epi32(static_cast<int>(load_bytes<uint32_t>(signs)));
  const __m256i spread = _mm256_and_si256(_mm256_shuffle_epi8(four, places), bits);
  return reinterpret_cast<GridBytes>(_mm256_cmpeq_epi8(spread, bits));
#else
  uint64_t bytes[4];
  for (int i = 0; i < 4; ++i) bytes[i] = ((signs[i] * kOnes & kBits) + 0x7f * kOnes) >> 7 & kOnes;
  return load_vector<GridBytes>(bytes) * 255;
#endif
}

// Decodes `count` values of a segment; up to seven more are written. First vectors are copied; then signs are applied
// in registers, to many values at once.
template <int kSize, bool kWide, bool kSigned>
EQQ_INLINE void decode_vectors(const int8_t* vectors, int lowest, const GridCodes& codes, int64_t count, uint8_t* out) {
  constexpr int kBytes = sizeof(GridBytes);
  alignas(64) uint8_t values[kGridSegment];
  uint16_t indices[kGridCodes];
  for (int i = 0; i < kGridSegment / kSize; ++i)
    indices[i] = static_cast<uint16_t>(codes.index[0][i] | (kWide ? codes.index[1][i] << 8 : 0));
#pragma GCC unroll 8
  for (int i = 0; i < kGridSegment / kSize; ++i)
    memcpy(values + kSize * i, vectors + kSize * in_register(indices[i]), kSize);
  for (int64_t i = 0; i < count; i += kBytes) {
    GridBytes code = load_vector<GridBytes>(values + i);
    if constexpr (kSigned) {
      const GridBytes negative = spread_signs(codes.moves + i / 8);
      code = (code ^ negative) - negative;
    } else {
      uint64_t moves[kBytes / 8];
      for (int j = 0; j < kBytes / 8; ++j)
        moves[j] = kOnes * static_cast<uint8_t>(1 - 2 * codes.moves[(i / 8 + j) >> codes.down_shift]);
      code += load_vector<GridBytes>(moves);
    }
    code -= static_cast<uint8_t>(lowest);
    if (i + kBytes <= count) {
      memcpy(out + i, &code, kBytes);
    } else {
      memcpy(out + i, &code, round_up(count - i, 8));
    }
  }
}

// Decodes values `first` to `last` of a row of `length`, where `first` begins a segment; up to seven more are written.
// `kWide`: indices have more than eight bits. `kSigned`: vectors have signs; others are moved by one.
template <int kSize, bool kWide, bool kSigned>
EQQ_INLINE void decode_grid_row(const Codec& codec, int lowest, const uint8_t* packed, const uint8_t* limit,
                                int64_t length, int64_t first, int64_t last, uint8_t* out) {
  GridCodes codes = {};
  const uint8_t* bytes = packed + first / kGridSegment * segment_bytes(&codec, kGridSegment);
  for (; first < last; first += kGridSegment, out += kGridSegment) {
    __builtin_prefetch(bytes + kAhead);
    bytes = unpack_parts(codec, bytes, limit, min64(length - first, kGridSegment), &codes);
    decode_vectors<kSize, kWide, kSigned>(codec.vectors, lowest, codes, min64(last - first, kGridSegment), out);
  }
}

EQQ_INLINE void decode_grid(const Codec& codec, int lowest, const uint8_t* packed, const uint8_t* limit, int64_t length,
                            int64_t first, int64_t last, uint8_t* out) {
  bool wide = false, has_signs = false;
  for (int i = 0; i < codec.num_parts; ++i) {
    wide = wide || codec.parts[i].low != 0;
    has_signs = has_signs || codec.parts[i].kind == kSigns || codec.parts[i].kind == kEvenSigns;
  }
  const auto decode = [&](auto size, auto is_wide, auto is_signed) {
    decode_grid_row<decltype(size)::value, decltype(is_wide)::value, decltype(is_signed)::value>(
        codec, lowest, packed, limit, length, first, last, out);
  };
  by_count<2>(1 + has_signs, [&](auto s) {
    by_count<2>(1 + wide, [&](auto w) {
      const Count<decltype(w)::value - 1> is_wide;
      const Count<decltype(s)::value - 1> is_signed;
      codec.size == 8 ? decode(Count<8>(), is_wide, is_signed) : decode(Count<4>(), is_wide, is_signed);
    });
  });
}

}  // namespace
