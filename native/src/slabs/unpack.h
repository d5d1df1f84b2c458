// Codes of any width as bytes.
#pragma once

#include <string.h>

#include "core/runs.h"

namespace {

constexpr int kMostCodes = 512;   // of a segment
constexpr int64_t kAhead = 4096;  // bytes to the prefetched codes

// Unpacks one part of the codes of a segment, shifted to its place. `out` has room for a plane more than they need;
// bytes up to `limit` can be read.
template <int kBits>
EQQ_INLINE const uint8_t* unpack_part(const uint8_t* bytes, const uint8_t* limit, int64_t count, int shift,
                                      uint8_t* out) {
  constexpr int64_t kPlanes = 8 / kBits;
  for (; count >= kPlane * kPlanes; count -= kPlane * kPlanes, bytes += kPlane, out += kPlane * kPlanes)
    unpack_segment<kBits>(bytes, kPlane, shift, out);
  if (count <= 0) return bytes;
  // The planes are short, and each writes over the excess of the previous one.
  const int64_t plane = div_up(count * kBits, 8);
  if (limit - bytes >= kPlane) {
    unpack_segment<kBits>(bytes, plane, shift, out);
  } else {
    uint8_t tail[kPlane] = {0};
    memcpy(tail, bytes, plane);
    unpack_segment<kBits>(tail, plane, shift, out);
  }
  return bytes + plane;
}

// A plane of the codes of a whole segment; or a part of one, as wide as a narrower vector.
template <int kBits, typename Vector = Segment>
EQQ_INLINE Vector unpack_plane(const uint8_t* bytes, int plane) {
  constexpr int kNarrowest = kBits & -kBits, kPlanes = 8 / kNarrowest;
  Vector codes = {};
  int start = 0, done = 0;
#pragma GCC unroll 3
  for (int width = 4; width > 0; width /= 2) {
    if ((kBits & width) == 0) continue;
    const int shared = 8 / width;
    Vector all;
    memcpy(&all, bytes + kPlane * (start + plane / shared), sizeof all);
    codes |= (all >> (width * (plane % shared)) & (0x0101010101010101u * ((1u << width) - 1))) << done;
    start += kPlanes / shared;
    done += width;
  }
  return codes;
}

// All its codes, in registers.
template <int kBits>
EQQ_INLINE void unpack_whole(const uint8_t* bytes, uint8_t* out) {
#pragma GCC unroll 8
  for (int plane = 0; plane < 8 / (kBits & -kBits); ++plane) {
    const Segment codes = unpack_plane<kBits>(bytes, plane);
    memcpy(out + kPlane * plane, &codes, sizeof codes);
  }
}

// The codes of a shorter last segment, likewise.
template <int kBits>
EQQ_INLINE void unpack_last(const uint8_t* bytes, const uint8_t* limit, int64_t count, uint8_t* out) {
  constexpr int kFirst = kBits & 4 ? 4 : kBits & 2 ? 2 : 1;
  bytes = unpack_part<kFirst>(bytes, limit, count, 0, out);
  uint8_t room[kPlane * 9];
  if constexpr ((kBits & 6) == 6) {
    bytes = unpack_part<2>(bytes, limit, count, 4, room);
    for (int64_t i = 0; i < count; ++i) out[i] |= room[i];
  }
  if constexpr (kBits > 1 && kBits % 2 == 1) {
    unpack_part<1>(bytes, limit, count, kBits - 1 == 6 ? 6 : kFirst, room);
    for (int64_t i = 0; i < count; ++i) out[i] |= room[i];
  }
}

// Codes `first` to `last` of some rows of `length`, where `first` begins a segment: `step` codes from row to row. `out`
// has room for a plane more, and `limit` is the end of readable memory.
template <int kBits>
EQQ_INLINE void unpack_rows(const uint8_t* packed, const uint8_t* limit, int64_t length, int64_t first, int64_t last,
                            int64_t rows, uint8_t* out, int64_t step) {
  constexpr int64_t kCodes = kPlane * (8 / (kBits & -kBits)), kSize = kCodes * kBits / 8;
  const int64_t whole = (last - first) / kCodes, rest = (last - first) % kCodes, words = packed_bytes(length, kBits);
  const int64_t count = min64(kCodes, length - first - whole * kCodes);  // of the segment that is cut short
  for (const uint8_t* bytes = packed + first / kCodes * kSize; rows > 0; --rows, bytes += words, out += step) {
    for (int64_t i = 0; i < whole; ++i) {
      for (int64_t line = 0; line < kSize; line += 64) __builtin_prefetch(bytes + i * kSize + line + kAhead);
      unpack_whole<kBits>(bytes + i * kSize, out + i * kCodes);
    }
    if (rest == 0) continue;
    if (count == rest) {
      unpack_last<kBits>(bytes + whole * kSize, limit, count, out + whole * kCodes);
    } else {
      uint8_t all[kCodes + kPlane];
      unpack_last<kBits>(bytes + whole * kSize, limit, count, all);
      memcpy(out + whole * kCodes, all, rest);
    }
  }
}

EQQ_NOINLINE void unpack(const uint8_t* packed, const uint8_t* limit, int64_t length, int bits, int64_t first,
                         int64_t last, int64_t rows, uint8_t* out, int64_t step) {
  switch (bits) {
    case 1: return unpack_rows<1>(packed, limit, length, first, last, rows, out, step);
    case 2: return unpack_rows<2>(packed, limit, length, first, last, rows, out, step);
    case 3: return unpack_rows<3>(packed, limit, length, first, last, rows, out, step);
    case 4: return unpack_rows<4>(packed, limit, length, first, last, rows, out, step);
    case 5: return unpack_rows<5>(packed, limit, length, first, last, rows, out, step);
    case 6: return unpack_rows<6>(packed, limit, length, first, last, rows, out, step);
    case 7: return unpack_rows<7>(packed, limit, length, first, last, rows, out, step);
    default:
      for (int64_t i = 0; i < rows; ++i) memcpy(out + i * step, packed + i * length + first, last - first);
  }
}

}  // namespace
