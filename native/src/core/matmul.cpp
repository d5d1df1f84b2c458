#include "core/matmul.h"

#include <stdlib.h>

#include <new>

#include "core/check.h"

namespace {

// a * b * c, or -1 where that is more than any memory has.
int64_t product(int64_t a, int64_t b, int64_t c) {
  const double size = static_cast<double>(a) * static_cast<double>(b) * static_cast<double>(c);
  return size < 4e18 ? a * b * c : -1;
}

bool misaligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes != 0; }

}  // namespace

const char* check_problem(const Problem& p, char* text, size_t room) {
  EQQ_CHECK(p.bits >= 1 && p.bits <= 8, "codes have 1 to 8 bits, not %d", p.bits);
  EQQ_CHECK(p.batch >= 0 && p.m >= 0 && p.n >= 0 && p.k >= 0, "lengths must not be negative");
  EQQ_CHECK(p.k < (int64_t{1} << 31) && p.n < (int64_t{1} << 31) && p.m < (int64_t{1} << 31),
            "lengths must be below 2^31");
  EQQ_CHECK(p.block_size >= 1, "blocks must have at least one code, not %lld", static_cast<long long>(p.block_size));
  EQQ_CHECK(p.words == packed_bytes(p.k, p.bits), "rows of %lld codes of %d bits do not have %lld bytes",
            static_cast<long long>(p.k), p.bits, static_cast<long long>(p.words));
  const int64_t blocks = (p.k + p.block_size - 1) / p.block_size;
  EQQ_CHECK(p.blocks == blocks || (p.k == 0 && p.blocks == 1), "rows have %lld blocks of %lld codes, not %lld",
            static_cast<long long>(blocks), static_cast<long long>(p.block_size), static_cast<long long>(p.blocks));
  EQQ_CHECK(p.scale_kind >= kScaleFloat32 && p.scale_kind <= kScaleUE4M4, "no scales of kind %d are known",
            p.scale_kind);
  EQQ_CHECK(p.values >= kValueTable && p.values <= kValueE5M2 &&
                (p.bits == 8 || p.values == kValueTable || (is_split(p.bits) && p.values == kValueInteger)),
            "no values of kind %d are known for codes of %d bits", p.values, p.bits);
  EQQ_CHECK(p.x_type >= kFloat32 && p.x_type <= kFloat16, "no floats of kind %d are known", p.x_type);
  const int64_t inner = p.transpose ? p.n : p.k, outer = p.transpose ? p.k : p.n;
  EQQ_CHECK(product(p.selected == nullptr ? p.batch : p.stack, p.n, p.words) >= 0 &&
                product(p.batch, p.m, inner + 1024) >= 0 && product(p.batch, p.m, outer) >= 0 &&
                product(p.m + 64, inner + 1024, 4 * (p.batch + 1)) >= 0,
            "the product is too large");
  EQQ_CHECK(p.m == 0 || ((p.x_row == 1 || p.x_column == 1) && (p.y_row == 1 || p.y_column == 1)),
            "rows or columns of x and of y must be contiguous");
  const bool coded = p.scale_codes != nullptr, offsets = p.offset != nullptr;
  EQQ_CHECK(coded || p.offset_codes == nullptr, "offsets are codes, and scales are not");
  EQQ_CHECK(!coded || !offsets || p.offset_codes != nullptr, "scales are codes, and offsets are not");
  if (coded) {
    EQQ_CHECK(p.scale_bits >= 1 && p.scale_bits <= 8, "codes of scales have 1 to 8 bits, not %d", p.scale_bits);
    EQQ_CHECK(p.scale_block_size >= 1, "blocks of scales must have at least one, not %lld",
              static_cast<long long>(p.scale_block_size));
    EQQ_CHECK(p.scale_words == packed_bytes(p.blocks, p.scale_bits),
              "rows of %lld scales of %d bits do not have %lld bytes", static_cast<long long>(p.blocks), p.scale_bits,
              static_cast<long long>(p.scale_words));
    EQQ_CHECK(p.scale_blocks == (p.blocks + p.scale_block_size - 1) / p.scale_block_size,
              "%lld scales in blocks of %lld do not have %lld of their own", static_cast<long long>(p.blocks),
              static_cast<long long>(p.scale_block_size), static_cast<long long>(p.scale_blocks));
    EQQ_CHECK(p.row_scale == nullptr, "scales of rows are for scales that are no codes");
    EQQ_CHECK(p.scale_table != nullptr && !misaligned(p.scale_table, 4),
              "the table of scales is missing or misaligned");
  }
  EQQ_CHECK(!offsets || p.x_type == kFloat32, "a product with offsets is of float32");
  EQQ_CHECK(!offsets || p.zero_point == nullptr, "a weight has zero points or offsets, not both");
  const int64_t item = p.x_type == kFloat32 ? 4 : 2;
  const int64_t scale = scale_bytes(p.scale_kind);
  EQQ_CHECK(p.table != nullptr && !misaligned(p.table, 4), "the table is missing or misaligned");
  EQQ_CHECK(p.selected == nullptr || p.batch == 0 || p.stack > 0, "nothing can be selected from an empty stack");
  const bool some = p.batch > 0 && p.n > 0 && p.k > 0;
  EQQ_CHECK(!some || (p.codes != nullptr && p.scale != nullptr), "the weight is missing");
  EQQ_CHECK(p.batch == 0 || p.m == 0 || inner == 0 || p.x != nullptr, "x is missing");
  EQQ_CHECK(p.batch == 0 || p.m == 0 || outer == 0 || p.y != nullptr, "y is missing");
  EQQ_CHECK(!misaligned(p.x, item) && !misaligned(p.y, item) && !misaligned(p.scale, scale) &&
                !misaligned(p.offset, scale) && !misaligned(p.row_scale, 4) && !misaligned(p.selected, 4),
            "an array is misaligned");
  return nullptr;
}

void* allocate_aligned(int64_t bytes) {
  return ::operator new(static_cast<size_t>(bytes < 64 ? 64 : bytes), std::align_val_t{64}, std::nothrow);
}

void free_aligned(void* memory) { ::operator delete(memory, std::align_val_t{64}); }
