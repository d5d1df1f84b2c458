// The algorithms of `slabs.h`, compiled for each instruction set.
#include <string.h>

#include "core/runs.h"
#include "slabs/slabs.h"

namespace {

constexpr int kMostCodes = 512;   // of a segment
constexpr int64_t kAhead = 4096;  // bytes to the prefetched codes
constexpr int64_t kPart = 64;     // numbers that are added one after the other, so that few roundings add up

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

// The codes of a whole segment, in registers: a plane of each part at a time.
template <int kBits>
EQQ_INLINE void unpack_whole(const uint8_t* bytes, uint8_t* out) {
  constexpr int kNarrowest = kBits & -kBits, kPlanes = 8 / kNarrowest;
#pragma GCC unroll 8
  for (int plane = 0; plane < kPlanes; ++plane) {
    Segment codes = {};
    int start = 0, done = 0;
#pragma GCC unroll 3
    for (int width = 4; width > 0; width /= 2) {
      if ((kBits & width) == 0) continue;
      const int shared = 8 / width;
      Segment all;
      memcpy(&all, bytes + kPlane * (start + plane / shared), sizeof all);
      codes |= (all >> (width * (plane % shared)) & (0x0101010101010101u * ((1u << width) - 1))) << done;
      start += kPlanes / shared;
      done += width;
    }
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

EQQ_INLINE void unpack(const uint8_t* packed, const uint8_t* limit, int64_t length, int bits, int64_t first,
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

EQQ_INLINE int64_t rows_of(const Problem& p) { return (p.selected != nullptr ? p.stack : p.batch) * p.n; }

void join_rows(const Problem* problem, int64_t row, int64_t rows, int64_t first, int64_t last, uint8_t* out) {
  const Problem& p = *problem;
  unpack(p.codes + row * p.words, p.codes + rows_of(p) * p.words, p.k, p.bits, first, last, rows, out, last - first);
}

// Any codes of a row: from the first of a segment on, of which the first wanted are returned.
EQQ_INLINE const uint8_t* some_of(const uint8_t* packed, const uint8_t* limit, int64_t length, int bits, int64_t first,
                                  int64_t last, uint8_t* room) {
  const int64_t skip = first % segment_codes(bits);
  unpack(packed, limit, length, bits, first - skip, last, 1, room, 0);
  return room + skip;
}

void zeros_of_rows(const Problem* problem, int64_t row, int64_t rows, int64_t first, int64_t last, uint8_t* out) {
  const Problem& p = *problem;
  const uint8_t *packed = p.zero_point + row * p.zero_words, *limit = p.zero_point + rows_of(p) * p.zero_words;
  for (int64_t i = 0; i < rows; ++i, packed += p.zero_words)
    for (int64_t at = first; at < last; at += kMostCodes) {
      uint8_t room[2 * kMostCodes + kPlane];
      const int64_t count = min64(kMostCodes, last - at);
      memcpy(out, some_of(packed, limit, p.blocks, p.bits, at, at + count, room), count);
      out += count;
    }
}

// `low + code`, times the factors of blocks of `size`, of which codes and factors begin one: of eight, or of whole
// vectors. There is room for a vector more than there are codes.
EQQ_INLINE void scale_integers(const uint8_t* codes, int64_t count, float low, const float* factors, int64_t size,
                               float* out) {
  const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  // A loop of its own: GCC converts vectors of bytes one by one.
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(codes[i]) + low;
  if (size == 8) {
    for (int64_t i = 0; i < count; i += kLanes, factors += 2) {
      const Floats factor = lane < 8 ? Floats{} + factors[0] : Floats{} + factors[1];
      store_vector(out + i, load_floats(out + i) * factor);
    }
    return;
  }
  for (int64_t first = 0; first < count; first += size, ++factors) {
    const Floats factor = Floats{} + *factors;
    for (int64_t i = first; i < min64(first + size, count); i += kLanes)
      store_vector(out + i, load_floats(out + i) * factor);
  }
}

void scales_of_rows(const Problem* problem, bool offsets, bool consecutive, int64_t row, int64_t rows, int64_t first,
                    int64_t last, float* out, float* room) {
  Problem p = *problem;
  if (offsets) {
    p.scale = p.offset;
    p.scale_codes = p.offset_codes;
    p.row_scale = nullptr;
  }
  const int64_t width = last - first, length = p.blocks, size = p.scale_block_size;
  if (p.scale_codes == nullptr) {
    for (int64_t i = 0; i < rows; ++i) EQQUANT_ISA::decode_scales(&p, row + i, first, last, out + i * width);
    return;
  }
  // The same for all rows, which lie one after the other.
  p.blocks = p.scale_blocks;
  EQQUANT_ISA::decode_scales(&p, row, 0, rows * p.scale_blocks, room);
  const uint8_t *packed = p.scale_codes + row * p.scale_words, *limit = p.scale_codes + rows_of(p) * p.scale_words;
  const float low = p.scale_table[0];
  for (int64_t i = 0; i < rows; ++i, packed += p.scale_words, room += p.scale_blocks, out += width)
    for (int64_t at = first; at < last; at += kMostCodes) {
      const int64_t count = min64(kMostCodes, last - at);
      uint8_t some[2 * kMostCodes + kPlane];
      const uint8_t* codes = some_of(packed, limit, length, p.scale_bits, at, at + count, some);
      float* to = out + at - first;
      if (consecutive && (size == 8 || size % kLanes == 0) && at % size == 0) {
        scale_integers(codes, count, low, room + at / size, size, to);
      } else {
        for (int64_t j = 0; j < count; ++j) to[j] = p.scale_table[codes[j]] * room[(at + j) / size];
      }
    }
}

void add_multiple(const float* scales, int64_t count, float factor, float* out) {
  for (int64_t i = 0; i < count; ++i) out[i] += factor * scales[i];
}

void sums_of_row(const Problem* problem, int64_t batch, int64_t m, float* out) {
  const Problem& p = *problem;
  const float* x = static_cast<const float*>(p.x) + batch * p.x_batch + m * p.x_row;
  for (int64_t block = 0; block < p.blocks; ++block) {
    const int64_t first = block * p.block_size, last = min64(first + p.block_size, p.k);
    float sum = 0;
    int64_t i = first;
    if (p.x_column == 1 && last - first >= kLanes) {
      Floats some = {};
      for (; i + kLanes <= last; i += kLanes) some += load_floats(x + i);
      sum = sum_of(some);
    }
    while (i < last) {
      float part = 0;
      for (const int64_t end = min64(i + kPart, last); i < end; ++i) part += x[i * p.x_column];
      sum += part;
    }
    out[block] = sum;
  }
}

// Products of `kRows` rows of offsets with one of sums.
template <int kRows>
EQQ_INLINE void multiply_sums(const float* const* rows, const float* sums, int64_t blocks, float* out) {
  Floats all[kRows] = {};
  int64_t i = 0;
  for (; i + kLanes <= blocks; i += kLanes) {
    const Floats some = load_floats(sums + i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) all[r] += load_floats(rows[r] + i) * some;
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) out[r] = sum_of(all[r]);
  for (; i < blocks; ++i)
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) out[r] += rows[r][i] * sums[i];
}

void add_products(const Problem* slab, const float* offsets, const float* sums) {
  constexpr int kRows = 4;
  const Problem& q = *slab;
  float* y = static_cast<float*>(q.y);
  for (int64_t n = 0; n < q.n; n += kRows) {
    const int64_t count = min64(kRows, q.n - n);
    const float* rows[kRows];
    for (int r = 0; r < kRows; ++r) rows[r] = offsets + (n + min64(r, count - 1)) * q.blocks;
    for (int64_t m = 0; m < q.m; ++m) {
      float some[kRows];
      multiply_sums<kRows>(rows, sums + m * q.blocks, q.blocks, some);
      for (int64_t r = 0; r < count; ++r) y[m * q.y_row + (n + r) * q.y_column] += some[r];
    }
  }
}

void add_products_transposed(const Problem* slab, const float* offsets, float* room) {
  const Problem& q = *slab;
  float* part = room + q.blocks;
  for (int64_t m = 0; m < q.m; ++m) {
    const float* x = static_cast<const float*>(q.x) + m * q.x_row;
    float* y = static_cast<float*>(q.y) + m * q.y_row;
    for (int64_t block = 0; block < q.blocks; ++block) room[block] = 0;
    for (int64_t first = 0; first < q.n; first += kPart) {
      for (int64_t block = 0; block < q.blocks; ++block) part[block] = 0;
      for (int64_t n = first; n < min64(first + kPart, q.n); ++n) {
        const float factor = x[n * q.x_column], *row = offsets + n * q.blocks;
        for (int64_t block = 0; block < q.blocks; ++block) part[block] += factor * row[block];
      }
      for (int64_t block = 0; block < q.blocks; ++block) room[block] += part[block];
    }
    for (int64_t k = 0; k < q.k; ++k) y[k * q.y_column] += room[k / q.block_size];
  }
}

}  // namespace

namespace EQQUANT_ISA {
extern const SlabKernel kSlabs = {join_rows,   zeros_of_rows, scales_of_rows,         add_multiple,
                                  sums_of_row, add_products,  add_products_transposed};
}
