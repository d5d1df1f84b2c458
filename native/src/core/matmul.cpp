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

// The error of a codec, whose parts and numbers then fit the memory that decoding them takes; or null.
const char* check_codec(const Codec& codec, char* text, size_t room) {
  EQQ_CHECK(codec.kind == kTrellis || codec.kind == kGrid, "no codec of kind %d is known", codec.kind);
  if (codec.kind == kTrellis) {
    EQQ_CHECK(codec.bits >= 1 && codec.bits <= 4, "a trellis has 1 to 4 bits, not %d", codec.bits);
    return nullptr;
  }
  EQQ_CHECK(codec.size == 4 || codec.size == 8, "vectors have 4 or 8 values, not %d", codec.size);
  EQQ_CHECK(codec.num_parts >= 1 && codec.num_parts <= kMostParts, "a segment has 1 to %d parts, not %d", kMostParts,
            codec.num_parts);
  int index_bits = 0, moves = 0;
  for (int i = 0; i < codec.num_parts; ++i) {
    const CodecPart& part = codec.parts[i];
    EQQ_CHECK(part.kind >= kIndex && part.kind <= kDown && part.bits >= 1 && part.bits <= 8,
              "a part of %d bits of kind %d is not known", part.bits, part.kind);
    EQQ_CHECK(part.kind != kIndex || (part.low == index_bits && part.low % 8 == 0 && part.values == codec.size),
              "indices must be one for each vector, the low eight bits first");
    EQQ_CHECK(part.kind != kSigns || (part.bits == 8 && part.values == 8), "signs must be eight for eight values");
    EQQ_CHECK(part.kind != kEvenSigns || (part.bits == 7 && part.values == 8), "signs must be seven for eight values");
    EQQ_CHECK(part.kind != kDown || (part.bits == 1 && (part.values == 8 || part.values == 32)),
              "a direction must be one bit for 8 or 32 values");
    (part.kind == kIndex ? index_bits : moves) += part.kind == kIndex ? part.bits : 1;
  }
  EQQ_CHECK(moves == 1, "a grid must have signs or directions, and not both");
  EQQ_CHECK(index_bits >= 1 && index_bits <= kMostIndexBits, "indices must have 1 to %d bits, not %d", kMostIndexBits,
            index_bits);
  EQQ_CHECK(codec.vectors != nullptr, "the grid is missing");
  return nullptr;
}

bool misaligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes != 0; }

}  // namespace

const char* check_problem(const Problem& p, char* text, size_t room) {
  EQQ_CHECK(p.bits >= 1 && p.bits <= 8, "codes have 1 to 8 bits, not %d", p.bits);
  EQQ_CHECK(p.batch >= 0 && p.m >= 0 && p.n >= 0 && p.k >= 0, "lengths must not be negative");
  EQQ_CHECK(p.k < (int64_t{1} << 31) && p.n < (int64_t{1} << 31) && p.m < (int64_t{1} << 31),
            "lengths must be below 2^31");
  EQQ_CHECK(p.block_size >= 1, "blocks must have at least one code, not %lld", static_cast<long long>(p.block_size));
  if (p.codec != nullptr) {
    EQQ_CHECK(p.values == kValueInteger, "rows of a codec decode to integers");
    if (const char* wrong = check_codec(*p.codec, text, room)) return wrong;
  }
  EQQ_CHECK(p.words == row_bytes(&p), "rows of %lld codes of %d bits do not have %lld bytes",
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
