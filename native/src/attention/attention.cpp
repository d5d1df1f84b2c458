// Attention in blocks and parts: which places a row sees, and what becomes of each part. The loops are in
// `kernels.cpp`.
#include "attention/attention.h"

#include <float.h>
#include <math.h>

#include "core/check.h"
#include "core/matmul.h"
#include "core/simd_generic.h"

namespace {

int64_t aligned(int64_t bytes) { return round_up(bytes, 64); }

struct Places {
  int64_t first, end;
  bool empty() const { return first >= end; }
};

// The places that a token sees.
Places seen_by(const AttentionProblem& p, int64_t batch, int64_t token) {
  const int64_t at = p.positions[batch * p.tokens + token], window = p.window[batch];
  const int64_t filled = max64(min64(p.length[batch], p.places), 0);
  return {window > 0 ? max64(at + 1 - window, 0) : 0, max64(min64(at + 1, filled), 0)};
}

// Some rows of queries of a head, and the places that any of them sees.
struct Block {
  int64_t head, batch, first, rows;
  Places seen;
};
Block block_at(const AttentionProblem& p, int64_t head, int64_t index) {
  Block b = {head, head / p.heads, index * kBlockRows, min64(p.rows - index * kBlockRows, kBlockRows), {p.places, 0}};
  for (int64_t row = b.first; row < b.first + b.rows; ++row) {
    const Places some = seen_by(p, b.batch, row % p.tokens);
    if (!some.empty()) b.seen = {min64(b.seen.first, some.first), max64(b.seen.end, some.end)};
  }
  return b;
}

// `x` times rows `first` to `last` of packed keys, transposed; of packed values, `x` times those rows.
Problem packed_product(const AttentionProblem& p, const CacheRows& rows, int64_t first, int64_t last, const float* x,
                       int64_t m, int64_t x_row, float* y, int64_t y_row) {
  Problem q = rows.packed;
  q.n = last - first;
  q.codes += first * q.words;
  const int64_t scales = q.scale_codes != nullptr ? q.scale_blocks : q.blocks;
  const int64_t scale_at = first * scales * scale_bytes(q.scale_kind);
  q.scale = static_cast<const char*>(q.scale) + scale_at;
  if (q.offset != nullptr) q.offset = static_cast<const char*>(q.offset) + scale_at;
  if (q.row_scale != nullptr) q.row_scale += first;
  if (q.zero_point != nullptr) q.zero_point += first * q.zero_words;
  if (q.scale_codes != nullptr) q.scale_codes += first * q.scale_words;
  if (q.offset_codes != nullptr) q.offset_codes += first * q.scale_words;
  q.transpose = &rows == &p.values;
  q.coarse = p.type != kFloat32;
  q.m = m;
  q.x = x;
  q.y = y;
  q.x_type = kFloat32;
  q.x_batch = q.y_batch = 0;
  q.x_row = x_row;
  q.y_row = y_row;
  q.x_column = q.y_column = 1;
  return q;
}

// A part has one thread, whose product starts no tasks.
struct NoPool {
  template <typename Task>
  void Schedule(const Task&) {}
};

// Whether a product decodes these rows in registers, in less time than a tile takes.
bool is_fused(const CacheRows& rows, int64_t queries) {
  const Problem& q = rows.packed;
  return is_packed(rows) && queries <= kFusedRows && !is_split(q.bits) && q.codec == nullptr &&
         q.scale_codes == nullptr && q.offset == nullptr && q.k % segment_codes(q.bits) == 0;
}

// The memory of a thread. Offsets are in bytes.
struct Room {
  int64_t scores, sums, tile, codes, zeros, scales, offsets, nested, all;

  explicit Room(const AttentionProblem& p) {
    const int64_t rows = min64(p.rows, kBlockRows);
    const auto most = [&](int64_t Problem::* count) {
      return kTilePlaces * max64(p.keys.packed.*count, p.values.packed.*count);
    };
    // Each with room for the excess of a last vector, or of a plane of codes.
    scores = aligned(4 * rows * p.size) + 64;
    sums = scores + aligned(4 * rows * kStepPlaces) + 64;
    tile = sums + aligned(4 * rows * row_sums(p)) + 64;
    codes = tile + aligned(4 * kTilePlaces * p.size) + 64;
    zeros = codes + aligned(kTilePlaces * p.size) + 64;
    scales = zeros + aligned(most(&Problem::blocks)) + 64;
    offsets = scales + aligned(4 * most(&Problem::blocks)) + 64;
    nested = offsets + aligned(4 * most(&Problem::blocks)) + 64;
    all = nested + aligned(4 * most(&Problem::scale_blocks)) + 64;
  }
};

// The scales of some rows of a weight, or their offsets, as floats.
void decode_scales(const Isa& isa, const Problem& q, bool offsets, int64_t first, int64_t count, float* out,
                   float* nested) {
  Problem all = q;
  if (q.scale_codes == nullptr && (offsets || q.row_scale == nullptr)) {  // at once
    const int64_t skip = first * q.blocks * scale_bytes(q.scale_kind);
    all.scale = static_cast<const char*>(q.scale) + skip;
    if (offsets) all.offset = static_cast<const char*>(q.offset) + skip;
    all.blocks *= count;
    first = 0;
    count = 1;
  }
  isa.slabs->scales(&all, offsets, false, first, count, 0, all.blocks, out, nested);
}

// Rows of keys or values, at most `kTilePlaces`, as float32.
const float* read_rows(const Isa& isa, const CacheRows& rows, int64_t first, int64_t count, int64_t size,
                       const Room& room, char* memory) {
  float* tile = reinterpret_cast<float*>(memory + room.tile);
  if (!is_packed(rows)) {
    if (rows.type == kFloat32) return static_cast<const float*>(rows.floats) + first * size;
    isa.attention->widen(static_cast<const uint16_t*>(rows.floats) + first * size, rows.type, count * size, tile);
    return tile;
  }
  const Problem& q = rows.packed;
  uint8_t *codes = reinterpret_cast<uint8_t*>(memory + room.codes), *zeros = codes + (room.zeros - room.codes);
  float *scales = reinterpret_cast<float*>(memory + room.scales),
        *offsets = reinterpret_cast<float*>(memory + room.offsets),
        *nested = reinterpret_cast<float*>(memory + room.nested);
  // Bytes are read where they are, unless a last vector reaches behind the last row.
  const bool whole = size % 16 == 0 && (q.blocks <= 1 || q.block_size % 16 == 0);
  const bool are_bytes = q.bits == 8 && q.codec == nullptr && (whole || (q.n - first - count) * size >= 16);
  if (!are_bytes) isa.slabs->join(&q, first, count, 0, size, codes);
  decode_scales(isa, q, false, first, count, scales, nested);
  if (q.zero_point != nullptr) isa.slabs->zeros(&q, first, count, 0, q.blocks, zeros);
  if (q.offset != nullptr) decode_scales(isa, q, true, first, count, offsets, nested);
  const DecodedParts parts = {are_bytes ? q.codes + first * size : codes, q.zero_point == nullptr ? nullptr : zeros,
                              scales, q.offset == nullptr ? nullptr : offsets};
  isa.attention->decode(&parts, &q, count, tile);
  return tile;
}

// Adds what places `from` to `to`, at most `kStepPlaces`, contribute to the sums of a block. Whether there was enough
// memory.
bool attend_step(const Isa& isa, const AttentionProblem& p, const Block& b, int64_t from, int64_t to,
                 const float* queries, char* memory, float* sums) {
  const AttentionKernel& kernel = *isa.attention;
  const Room room(p);
  float* scores = reinterpret_cast<float*>(memory + room.scores);
  const int64_t stride = row_sums(p), places = to - from, first = b.head * p.places + from;  // of the rows of the cache
  Places seen[kBlockRows];  // of each row, counted from `from`
  for (int64_t row = 0; row < b.rows; ++row) {
    const Places some = seen_by(p, b.batch, (b.first + row) % p.tokens);
    const int64_t low = min64(max64(some.first - from, 0), places);
    seen[row] = {low, max64(min64(some.end - from, places), low)};
  }
  // Calls `work(t, count, row, rows)` for each tile with the rows from the first to the last that sees any of it.
  const auto for_tiles = [&](const auto& work) {
    for (int64_t t = 0; t < places; t += kTilePlaces) {
      const int64_t end = min64(t + kTilePlaces, places);
      const auto hidden = [&](int64_t row) { return max64(seen[row].first, t) >= min64(seen[row].end, end); };
      int64_t low = 0, high = b.rows;
      while (low < high && hidden(low)) ++low;
      while (low < high && hidden(high - 1)) --high;
      if (low < high) work(t, end - t, low, high - low);
    }
  };
  NoPool pool;

  if (is_fused(p.keys, b.rows)) {
    const Problem some = packed_product(p, p.keys, first, first + places, queries, b.rows, p.size, scores, kStepPlaces);
    if (!run_problem(isa, some, pool, 1)) return false;
  } else {
    for_tiles([&](int64_t t, int64_t count, int64_t row, int64_t rows) {
      const float* keys = read_rows(isa, p.keys, first + t, count, p.size, room, memory);
      kernel.products(queries + row * p.size, rows, keys, count, p.size, scores + row * kStepPlaces + t, kStepPlaces);
    });
  }
  for (int64_t row = 0; row < b.rows; ++row) {
    const int64_t low = seen[row].first, high = seen[row].end;
    float *shares = scores + row * kStepPlaces, *sum = sums + row * stride;
    for (int64_t t = 0; t < low; ++t) shares[t] = 0;
    for (int64_t t = high; t < places; ++t) shares[t] = 0;
    const float top = kernel.scores(shares + low, high - low, p.scale, p.cap, sum[0]);
    if (top > sum[0]) {
      const float factor = expf(sum[0] - top);
      for (int64_t i = 1; i < stride; ++i) sum[i] *= factor;
      sum[0] = top;
    }
    sum[1] += kernel.exponentials(shares + low, high - low, top);
  }
  if (is_fused(p.values, b.rows)) {
    float* products = reinterpret_cast<float*>(memory + room.tile);
    const Problem some =
        packed_product(p, p.values, first, first + places, scores, b.rows, kStepPlaces, products, p.size);
    if (!run_problem(isa, some, pool, 1)) return false;
    for (int64_t row = 0; row < b.rows; ++row)
      for (int64_t i = 0; i < p.size; ++i) sums[row * stride + 2 + i] += products[row * p.size + i];
    return true;
  }
  for_tiles([&](int64_t t, int64_t count, int64_t row, int64_t rows) {
    const float* values = read_rows(isa, p.values, first + t, count, p.size, room, memory);
    kernel.mix(scores + row * kStepPlaces + t, kStepPlaces, rows, values, count, p.size, sums + row * stride + 2,
               stride);
  });
  return true;
}

const char* check_rows(const CacheRows& rows, const char* name, const AttentionProblem& p, char* text, size_t room) {
  if (!is_packed(rows)) {
    EQQ_CHECK(rows.type >= kFloat32 && rows.type <= kFloat16, "no floats of kind %d are known", rows.type);
    return nullptr;
  }
  const Problem& packed = rows.packed;
  EQQ_CHECK(
      packed.batch == 1 && packed.n == p.batch * p.heads * p.places && packed.k == p.size && packed.selected == nullptr,
      "%s differ in their shape from the cache", name);
  return check_problem(packed, text, room);
}

}  // namespace

const char* check_attention(const AttentionProblem& p, char* text, size_t room) {
  EQQ_CHECK(p.batch >= 0 && p.heads >= 0 && p.rows >= 0 && p.places >= 0 && p.size >= 0,
            "lengths must not be negative");
  EQQ_CHECK(p.type >= kFloat32 && p.type <= kFloat16, "no floats of kind %d are known", p.type);
  EQQ_CHECK(p.tokens >= 1 ? p.rows % p.tokens == 0 : p.rows == 0, "%lld rows do not belong to %lld tokens",
            static_cast<long long>(p.rows), static_cast<long long>(p.tokens));
  if (const char* wrong = check_rows(p.keys, "keys", p, text, room)) return wrong;
  return check_rows(p.values, "values", p, text, room);
}

AttentionPlan plan_attention(const AttentionProblem& p) {
  AttentionPlan plan = {div_up(p.rows, kBlockRows), 0, 0, 0, 0};
  int64_t most = 0;
  for (int64_t batch = 0; batch < p.batch; ++batch)
    for (int64_t index = 0; index < plan.blocks; ++index) {
      const Block b = block_at(p, batch * p.heads, index);
      if (b.seen.empty()) continue;
      most = max64(most, round_up(b.seen.end, kStepPlaces) - b.seen.first / kStepPlaces * kStepPlaces);
      plan.work +=
          static_cast<double>((b.seen.end - b.seen.first) * p.heads * p.size) * (1 + static_cast<double>(b.rows) / 16);
    }
  const int64_t parts = max64(kFewUnits / max64(p.batch * p.heads * plan.blocks, 1), 1);
  plan.places = max64(round_up(div_up(most, parts), kStepPlaces), kStepPlaces);
  plan.parts = max64(div_up(most, plan.places), 1);
  plan.own_bytes = Room(p).all;
  return plan;
}

bool attend_unit(const Isa& isa, const AttentionProblem& p, const AttentionPlan& plan, int64_t unit, void* scratch,
                 float* sums) {
  const int64_t index = unit / plan.parts, part = unit % plan.parts, stride = row_sums(p);
  const Block b = block_at(p, index / plan.blocks, index % plan.blocks);
  char* memory = static_cast<char*>(scratch);
  if (plan.parts == 1) sums = reinterpret_cast<float*>(memory + Room(p).sums);
  for (int64_t row = 0; row < b.rows; ++row) {
    sums[row * stride] = -FLT_MAX;  // the largest score
    for (int64_t i = 1; i < stride; ++i) sums[row * stride + i] = 0;
  }
  const int64_t begin = b.seen.first / kStepPlaces * kStepPlaces + part * plan.places,
                end = min64(begin + plan.places, b.seen.end);
  const int64_t count = b.rows * p.size, at = (b.head * p.rows + b.first) * p.size;
  const float* queries = static_cast<const float*>(p.queries) + at;
  if (p.type != kFloat32) {
    float* widened = reinterpret_cast<float*>(memory);
    isa.attention->widen(static_cast<const uint16_t*>(p.queries) + at, p.type, count, widened);
    queries = widened;
  }
  for (int64_t from = begin; from < end; from += kStepPlaces)
    if (!attend_step(isa, p, b, max64(from, b.seen.first), min64(from + kStepPlaces, end), queries, memory, sums))
      return false;
  if (plan.parts == 1) merge_parts(p, plan, index, sums);
  return true;
}

void merge_parts(const AttentionProblem& p, const AttentionPlan& plan, int64_t index, float* sums) {
  const Block b = block_at(p, index / plan.blocks, index % plan.blocks);
  const int64_t stride = row_sums(p), one = block_sums(p);
  for (int64_t row = 0; row < b.rows; ++row) {
    float* first = sums + row * stride;
    const int64_t at = (b.head * p.rows + b.first + row) * p.size;
    const bool sees_nothing = seen_by(p, b.batch, (b.first + row) % p.tokens).empty();
    float top = -FLT_MAX, total = 0;
    for (int64_t part = 0; part < plan.parts; ++part) top = fmaxf(top, first[part * one]);
    for (int64_t part = 0; part < plan.parts; ++part) {
      const float* other = first + part * one;
      const float factor = expf(other[0] - top);
      total += factor * other[1];
      for (int64_t i = 2; i < stride; ++i) first[i] = (part > 0 ? first[i] : 0) + factor * other[i];
    }
    for (int64_t i = 0; i < p.size; ++i) {
      const float value = sees_nothing ? 0 : first[i + 2] / total;
      if (p.type == kFloat32) {
        static_cast<float*>(p.y)[at + i] = value;
      } else {
        static_cast<uint16_t*>(p.y)[at + i] =
            p.type == kBFloat16 ? generic::Simd::one_to_bf16(value) : float_to_half(value);
      }
    }
  }
}
