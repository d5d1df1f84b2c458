// Scales and offsets of blocks as floats, also where they are codes.
#pragma once

#include <string.h>

#include "slabs/unpack.h"

namespace {

EQQ_INLINE int64_t rows_of(const Problem& p) { return (p.selected != nullptr ? p.stack : p.batch) * p.n; }

// Unpacks codes `first` to `last` of a row, which may begin within a segment: into `room` from the begin of that
// segment on. Returns the place of code `first`.
EQQ_INLINE const uint8_t* some_of(const uint8_t* packed, const uint8_t* limit, int64_t length, int bits, int64_t first,
                                  int64_t last, uint8_t* room) {
  const int64_t skip = first % segment_codes(bits);
  unpack(packed, limit, length, bits, first - skip, last, 1, room, 0);
  return room + skip;
}

// Decodes scales whose codes stand for consecutive integers: `low + code`, times a factor that `size` codes share.
// `size` is 8 or a multiple of the vector length, and the first code begins a block. `out` has room for a vector more.
EQQ_INLINE void scale_integers(const uint8_t* codes, int64_t count, float low, const float* factors, int64_t size,
                               float* out) {
  // A loop of its own: GCC converts vectors of bytes one by one.
  for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(codes[i]) + low;
  if (size < kLanes) {
    Ints lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
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
  // The scales of scales of all rows at once: rows lie one after the other.
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
        for (int64_t j = 0; j < count;) {  // a division for each scale would take longer than decoding its codes
          const int64_t block = (at + j) / size, end = min64((block + 1) * size - at, count);
          for (; j < end; ++j) to[j] = p.scale_table[codes[j]] * room[block];
        }
      }
    }
}

}  // namespace
