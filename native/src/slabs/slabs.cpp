#include "slabs/slabs.h"

#include <cmath>

#include "core/ints.h"

namespace {

// Bytes that a slab takes in the memory of a thread: a part of the second cache.
constexpr int64_t kSlabBytes = 1 << 17;

int64_t aligned(int64_t bytes) { return round_up(bytes, 64); }

int64_t common_multiple(int64_t a, int64_t b) {
  int64_t x = a, y = b;
  while (y != 0) {
    const int64_t rest = x % y;
    x = y;
    y = rest;
  }
  return a / x * b;
}

// Code `k` of a row of a slab, whose codes lie in one byte each.
int code_of(const Problem& q, int64_t row, int64_t k) {
  int code;
  unpack_codes(q.codes + row * q.words, packed_bytes(q.k, q.bits), q.bits, k, k + 1, &code);
  return code;
}

}  // namespace

Slabs::Slabs(const Problem& p, int64_t threads, bool integers) {
  const bool apart = is_split(p.bits) || p.codec != nullptr;
  needed_ = apart || p.scale_codes != nullptr || p.offset != nullptr;
  if (!needed_) return;
  // Packed zero points of a row cannot be cut where a slab of columns ends, so they become bytes.
  joins_ = apart || (p.transpose && p.zero_point != nullptr && p.bits < 8);
  // Kernels take rows of scales without gaps, which those of a slab of columns are not.
  decodes_ = p.transpose || p.scale_codes != nullptr || p.offset != nullptr;

  const int64_t codes = int64_t{1} << p.bits;
  if (p.offset != nullptr && p.values <= kValueInteger) {
    // The middle of the table becomes a part of the offsets: large terms that cancel would cost the sum its precision.
    double sum = 0;
    for (int64_t i = 0; i < codes; ++i) sum += p.table[i];
    middle_ = std::isfinite(sum) ? static_cast<float>(sum / static_cast<double>(codes)) : 0;
    // Kernels compute integers faster than they look them up. Of the two integers next to the middle the upper one is
    // nearer to the code of zero, where an offset is the end of a block that is farther from zero (MLX).
    if (p.values == kValueInteger || integers) middle_ = ceilf(middle_);
  }
  // Kernels take the range of values from the table, so unused codes of a byte repeat the value of a used one.
  for (int64_t i = 0; i < 256; ++i) table_[i] = p.table[min64(i, codes - 1)] - middle_;

  consecutive_ = p.scale_codes == nullptr || is_consecutive(p.scale_table, p.scale_bits);

  // Bytes of a row of a slab: its codes, and its scales and offsets.
  const int64_t row = joins_ ? p.k : 0, blocks = decodes_ ? p.blocks * (p.offset != nullptr ? 8 : 4) : 0;
  extent_ = p.transpose ? p.k : p.n;
  if (p.transpose) {
    // Whole blocks, or a part of one.
    size_ = segment_codes(1);
    if (size_ % p.block_size != 0 && p.block_size % size_ != 0) size_ = common_multiple(size_, p.block_size);
  } else {
    const int64_t step = p.m > 8 ? 48 : 16;  // of which kernels take whole tiles
    size_ = max64(kSlabBytes / max64(row + blocks, 1) / step, 1) * step;
    size_ = min64(size_, round_up(div_up(p.n * max64(p.batch, 1), 4 * threads), step));
  }
  size_ = max64(min64(size_, extent_), 1);
  count_ = div_up(extent_, size_);

  const int64_t rows = p.transpose ? p.n : size_, columns = p.transpose ? size_ : p.k;
  const int64_t some = min64(p.blocks, p.transpose ? div_up(columns, p.block_size) + 1 : p.blocks);
  // Each with room for the excess of a last vector.
  const auto room_for = [](bool needed, int64_t bytes) { return needed ? aligned(bytes) + 64 : 0; };
  zeros_ = room_for(joins_, rows * columns);
  scales_ = zeros_ + room_for(joins_ && p.zero_point != nullptr, rows * some);
  offsets_ = scales_ + room_for(decodes_, 4 * rows * some);
  room_ = offsets_ + room_for(p.offset != nullptr, 4 * rows * some);
  own_bytes_ = aligned(room_ + 4 * max64(2 * some, p.scale_codes != nullptr ? rows * p.scale_blocks : 0)) + 64;
  sums_bytes_ = p.offset != nullptr && !p.transpose ? aligned(4 * p.batch * p.m * p.blocks) : 0;
}

Problem Slabs::slab(const Problem& p, int64_t batch, int64_t index, void* own) const {
  char* memory = static_cast<char*>(own);
  const int64_t first = index * size_, size = min64(size_, extent_ - first),
                row = first_row(&p, batch) + (p.transpose ? 0 : first);
  const int64_t item = p.x_type == kFloat32 ? 4 : 2, block = first_block(p, index);
  Problem q = p;
  q.batch = q.stack = 1;
  q.selected = nullptr;
  q.offset = nullptr;
  q.scale_codes = q.offset_codes = nullptr;
  q.table = table_;
  if (p.transpose) {
    q.k = size;
    q.blocks = min64(div_up(first + size, p.block_size), p.blocks) - block;
    q.block_size = min64(p.block_size, size);
  } else {
    q.n = size;
  }
  q.codec = nullptr;
  if (!joins_) q.codes = p.codes + row * p.words + (p.transpose ? first * p.bits / 8 : 0);
  if (p.zero_point != nullptr)
    q.zero_point = p.zero_point + row * p.zero_words + (p.transpose ? block : 0);  // bytes, or all are joined
  if (joins_) {
    q.bits = 8;
    q.words = q.k;
    q.codes = reinterpret_cast<const uint8_t*>(memory);
    if (p.zero_point != nullptr) q.zero_point = reinterpret_cast<const uint8_t*>(memory + zeros_);
    q.zero_words = q.blocks;
  }
  q.scale = static_cast<const char*>(p.scale) + row * p.blocks * scale_bytes(p.scale_kind);
  if (p.row_scale != nullptr) q.row_scale = p.row_scale + row;
  if (decodes_) {
    q.scale = memory + scales_;
    q.scale_kind = kScaleFloat32;
    q.row_scale = nullptr;
  }
  q.x = static_cast<const char*>(p.x) + batch * p.x_batch * item;
  // Decoding, rows lie one after the other.
  const int64_t at = p.m == 0 ? (batch * p.n + first) * p.k : batch * p.y_batch + first * p.y_column;
  q.y = static_cast<char*>(p.y) + at * item;
  return q;
}

void Slabs::fill(const SlabKernel& kernel, const Problem& p, int64_t batch, int64_t index, void* own) const {
  char* memory = static_cast<char*>(own);
  const Problem q = slab(p, batch, index, own);
  const int64_t first = index * size_, row = first_row(&p, batch) + (p.transpose ? 0 : first),
                from = p.transpose ? first : 0;
  const int64_t block = first_block(p, index);
  uint8_t* codes = reinterpret_cast<uint8_t*>(memory);
  float *scales = reinterpret_cast<float*>(memory + scales_), *offsets = reinterpret_cast<float*>(memory + offsets_);
  if (joins_) {
    kernel.join(&p, row, q.n, from, from + q.k, codes);
    if (p.zero_point != nullptr)
      kernel.zeros(&p, row, q.n, block, block + q.blocks, reinterpret_cast<uint8_t*>(memory + zeros_));
  }
  if (!decodes_) return;
  float* room = reinterpret_cast<float*>(memory + room_);
  kernel.scales(&p, false, consecutive_, row, q.n, block, block + q.blocks, scales, room);
  if (p.offset == nullptr) return;
  kernel.scales(&p, true, consecutive_, row, q.n, block, block + q.blocks, offsets, room);
  kernel.add_multiple(scales, q.n * q.blocks, middle_, offsets);
}

void Slabs::add(const SlabKernel& kernel, const Problem& p, int64_t batch, int64_t index, void* own,
                const float* sums) const {
  if (p.offset == nullptr) return;
  char* memory = static_cast<char*>(own);
  const Problem q = slab(p, batch, index, own);
  const float* offsets = reinterpret_cast<const float*>(memory + offsets_);
  if (p.transpose) {
    kernel.add_transposed(&q, offsets, reinterpret_cast<float*>(memory + room_));
  } else {
    kernel.add(&q, offsets, sums + batch * p.m * p.blocks);
  }
}

void Slabs::add_infinite(const SlabKernel& kernel, const Problem& p, int64_t batch, int64_t index, void* own,
                         const float* sums) const {
  if (p.offset == nullptr) return;
  char* memory = static_cast<char*>(own);
  const Problem q = slab(p, batch, index, own);
  const float *x = static_cast<const float*>(q.x), *scales = reinterpret_cast<const float*>(memory + scales_);
  float *y = static_cast<float*>(q.y), *offsets = reinterpret_cast<float*>(memory + offsets_);
  const int64_t inner = q.transpose ? q.n : q.k, outer = q.transpose ? q.k : q.n;
  const int64_t row = first_row(&p, batch) + (p.transpose ? 0 : index * size_), block = first_block(p, index);
  const auto has_infinity = [&](int64_t m) {  // and no NaN, which results have already
    const float* of_blocks = sums + (batch * p.m + m) * p.blocks;
    bool finite = !p.transpose;  // where there are no sums, nothing is known
    for (int64_t i = 0; finite && i < p.blocks; ++i) finite = std::isfinite(of_blocks[i]);
    if (finite) return false;
    bool infinite = false;
    for (int64_t i = 0; i < inner; ++i) {
      const float value = x[m * q.x_row + i * q.x_column];
      if (std::isnan(value)) return false;
      infinite = infinite || std::isinf(value);
    }
    return infinite;
  };
  bool whole = false;  // whether `offsets` are those of the weight, without the middle of the table
  for (int64_t m = 0; m < q.m; ++m) {
    if (!has_infinity(m)) continue;
    if (!whole)
      kernel.scales(&p, true, consecutive_, row, q.n, block, block + q.blocks, offsets,
                    reinterpret_cast<float*>(memory + room_));
    whole = true;
    for (int64_t o = 0; o < outer; ++o) {
      float sum = 0;
      for (int64_t i = 0; i < inner; ++i) {
        const int64_t n = q.transpose ? i : o, k = q.transpose ? o : i, at = n * q.blocks + k / q.block_size;
        sum += x[m * q.x_row + i * q.x_column] * (p.table[code_of(q, n, k)] * scales[at] + offsets[at]);
      }
      y[m * q.y_row + o * q.y_column] = sum;
    }
  }
}
