// The algorithms of `slabs.h`, compiled for each instruction set.
#include <string.h>

#include "slabs/grid.h"
#include "slabs/slabs.h"
#include "slabs/trellis_row.h"
#include "slabs/trellis_slices.h"
#include "slabs/unpack.h"

namespace {

constexpr int64_t kPart = 64;  // numbers that are added one after the other, so that few roundings add up

EQQ_INLINE int64_t rows_of(const Problem& p) { return (p.selected != nullptr ? p.stack : p.batch) * p.n; }

void join_rows(const Problem* problem, int64_t row, int64_t rows, int64_t first, int64_t last, uint8_t* out) {
  const Problem& p = *problem;
  const uint8_t *packed = p.codes + row * p.words, *limit = p.codes + rows_of(p) * p.words;
  if (p.codec == nullptr) return unpack(packed, limit, p.k, p.bits, first, last, rows, out, last - first);
  for (; rows > 0; --rows, packed += p.words, out += last - first)
    p.codec->kind == kTrellis
        ? decode_trellis(*p.codec, packed, p.k, first, last, out)
        : decode_grid(*p.codec, static_cast<int>(p.table[0]), packed, limit, p.k, first, last, out);
}

// Unpacks codes `first` to `last` of a row, which may begin within a segment: into `room` from the begin of that
// segment on. Returns the place of code `first`.
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

// Decodes scales whose codes stand for consecutive integers: `low + code`, times a factor that `size` codes share.
// `size` is 8 or a multiple of the vector length, and the first code begins a block. `out` has room for a vector more.
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

// Products of `kRows` rows of offsets with one row of sums of x.
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
extern const SlabKernel kSlabs = {join_rows,   zeros_of_rows, scales_of_rows,          add_multiple,
                                  sums_of_row, add_products,  add_products_transposed, kPacked};
}
