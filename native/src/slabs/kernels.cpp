// The algorithms of `slabs.h`, compiled for each instruction set.
#include <string.h>

#include "slabs/grid.h"
#include "slabs/integer_row.h"
#include "slabs/offsets.h"
#include "slabs/scales.h"
#include "slabs/slabs.h"
#include "slabs/trellis_row.h"
#include "slabs/trellis_slices.h"
#include "slabs/unpack.h"

namespace {

void join_rows(const Problem* problem, int64_t row, int64_t rows, int64_t first, int64_t last, uint8_t* out) {
  const Problem& p = *problem;
  const uint8_t *packed = p.codes + row * p.words, *limit = p.codes + rows_of(p) * p.words;
  if (p.codec == nullptr) return unpack(packed, limit, p.k, p.bits, first, last, rows, out, last - first);
  for (; rows > 0; --rows, packed += p.words, out += last - first)
    p.codec->kind == kTrellis
        ? decode_trellis(*p.codec, packed, p.k, first, last, out)
        : decode_grid(*p.codec, static_cast<int>(p.table[0]), packed, limit, p.k, first, last, out);
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

}  // namespace

namespace EQQUANT_ISA {
extern const SlabKernel kSlabs = {join_rows,        zeros_of_rows, scales_of_rows,          add_multiple, sums_of_row,
                                  sums_of_int8_row, add_products,  add_products_transposed, kOneRow,      kOneRowInt8};
}
