// The grid of `Codec`: vectors of eight or four values that codes index, with signs, or moved by one. These are the IQ
// types of GGUF (`eqquant/_formats/iq.py`).
//
// Eight values are computed at once, as the bytes of one 64-bit integer, the first in its low bits. Each sum fits in
// its byte once all terms are added, so no byte changes the next.
#pragma once

#include <string.h>

#include "core/problem.h"
#include "slabs/unpack.h"

namespace {

constexpr int kGridCodes = kGridSegment / 4;  // of a segment, at most
constexpr uint64_t kOnes = 0x0101010101010101;

// Eight bytes for each combination of signs: 255 for a negative value, 0 for another. With `kEven` there are seven
// signs, so 128 combinations, and the eighth makes the number of negative values even.
template <bool kEven>
struct SignMasks {
  uint8_t bytes[256][8] = {};
  constexpr SignMasks() {
    for (int signs = 0; signs < 256; ++signs)
      for (int i = 0, count = 0; i < 8; ++i) {
        const bool negative = kEven && i == 7 ? count % 2 == 1 : (signs >> i & 1) != 0;
        count += negative;
        bytes[signs][i] = negative ? 255 : 0;
      }
  }
};
constexpr SignMasks<false> kSignMasks = {};
constexpr SignMasks<true> kEvenSignMasks = {};

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
  uint8_t moves[kGridCodes + kPlane];     // of kSigns and kEvenSigns: signs; of kDown: 1 where values are one less
  int down_shift;                         // of kDown: values `8 i` to `8 i + 7` have code `i >> down_shift` of `moves`
  const uint8_t (*masks)[8];              // of kSigns and kEvenSigns: `SignMasks`
};

// Unpacks the parts of a segment of `length` values; returns the end of the segment.
EQQ_INLINE const uint8_t* unpack_parts(const Codec& codec, const uint8_t* bytes, const uint8_t* limit, int64_t length,
                                       GridCodes* out) {
  for (int i = 0; i < codec.num_parts; ++i) {
    const CodecPart& part = codec.parts[i];
    const int64_t count = div_up(length, part.values);
    unpack_codes_of_part(bytes, limit, count, part.bits, part.kind == kIndex ? out->index[part.low != 0] : out->moves);
    bytes += packed_bytes(count, part.bits);
    if (part.kind == kDown) out->down_shift = part.values == 8 ? 0 : 2;
    if (part.kind == kSigns) out->masks = kSignMasks.bytes;
    if (part.kind == kEvenSigns) out->masks = kEvenSignMasks.bytes;
  }
  return bytes;
}

// Decodes `count` values of a segment; up to seven more are written.
template <int kSize, bool kWide, bool kSigned>
EQQ_INLINE void decode_vectors(const int8_t* vectors, int lowest, const GridCodes& codes, int64_t count, uint8_t* out) {
  const uint64_t added = kOnes * static_cast<uint64_t>(-128 - lowest);
  const auto vector = [&](int64_t i) __attribute__((always_inline)) {
    const int64_t index = codes.index[0][i] | (kWide ? codes.index[1][i] << 8 : 0);
    return reinterpret_cast<const uint8_t*>(vectors) + kSize * index;
  };
  for (int64_t i = 0; 8 * i < count; ++i) {
    const uint64_t values = kSize == 8
                              ? load_bytes<uint64_t>(vector(i))
                              : load_bytes<uint32_t>(vector(2 * i)) | load_bytes<uint32_t>(vector(2 * i + 1)) << 32;
    uint64_t bytes = (values ^ 128 * kOnes) + added;  // the first term is each value plus 128
    if constexpr (kSigned) {
      bytes -= 2 * (values & load_bytes<uint64_t>(codes.masks[codes.moves[i]]));
    } else {
      bytes += kOnes - 2 * kOnes * codes.moves[i >> codes.down_shift];
    }
    memcpy(out + 8 * i, &bytes, sizeof bytes);
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
