// Attention in parts: which places a row sees, and what becomes of each part. The loops are in `kernels.cpp`.
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

// The places that any token of a batch sees.
Places seen(const AttentionProblem& p, int64_t batch) {
  Places all = {p.places, 0};
  for (int64_t token = 0; token < p.tokens; ++token) {
    const Places some = seen_by(p, batch, token);
    if (!some.empty()) all = {min64(all.first, some.first), max64(all.end, some.end)};
  }
  return all;
}

// `x` times rows `first` to `last` of packed keys, transposed; of packed values, `x` times those rows.
Problem packed_product(const AttentionProblem& p, const CacheRows& rows, int64_t first, int64_t last, const float* x,
                       int64_t x_row, float* y, int64_t y_row) {
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
  q.m = p.rows;
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

// Rows `first` to `last` of floats, at most `kTilePlaces`, as float32.
const float* read_rows(const AttentionKernel& kernel, const CacheRows& rows, int64_t first, int64_t last, int64_t size,
                       float* tile) {
  if (rows.type == kFloat32) return static_cast<const float*>(rows.floats) + first * size;
  kernel.widen(static_cast<const uint16_t*>(rows.floats) + first * size, rows.type, (last - first) * size, tile);
  return tile;
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

int64_t attention_parts(const AttentionProblem& p) {
  int64_t parts = 0;
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    const Places all = seen(p, batch);
    if (!all.empty()) parts = max64(parts, div_up(all.end, kPartPlaces) - all.first / kPartPlaces);
  }
  return parts;
}

double attention_numbers(const AttentionProblem& p) {
  double places = 0;
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    const Places all = seen(p, batch);
    if (!all.empty()) places += static_cast<double>(all.end - all.first);
  }
  return 2 * places * static_cast<double>(p.heads * p.size);
}

int64_t scratch_bytes(const AttentionProblem& p) {
  return aligned(4 * p.rows * p.size) + aligned(4 * p.rows * kPartPlaces) + aligned(4 * kTilePlaces * p.size);
}

bool attend_part(const Isa& isa, const AttentionProblem& p, int64_t head, int64_t part, void* scratch, float* sums) {
  const AttentionKernel& kernel = *isa.attention;
  const int64_t batch = head / p.heads, count = p.rows * p.size, stride = row_sums(p);
  for (int64_t row = 0; row < p.rows; ++row) {
    sums[row * stride] = -FLT_MAX;  // the largest score
    for (int64_t i = 1; i < stride; ++i) sums[row * stride + i] = 0;
  }
  const Places all = seen(p, batch);
  const int64_t begin = (all.first / kPartPlaces + part) * kPartPlaces, from = max64(begin, all.first),
                to = min64(begin + kPartPlaces, all.end), places = to - from;
  if (all.empty() || places <= 0) return true;

  float* widened = static_cast<float*>(scratch);
  float* scores = widened + aligned(4 * count) / 4;
  float* tile = scores + aligned(4 * p.rows * kPartPlaces) / 4;
  const float* queries = static_cast<const float*>(p.queries) + head * count;
  if (p.type != kFloat32) {
    kernel.widen(static_cast<const uint16_t*>(p.queries) + head * count, p.type, count, widened);
    queries = widened;
  }
  const int64_t first = head * p.places + from;  // of the rows of the cache
  NoPool pool;

  if (is_packed(p.keys)) {
    const Problem some = packed_product(p, p.keys, first, first + places, queries, p.size, scores, kPartPlaces);
    if (!run_problem(isa, some, pool, 1)) return false;
  } else {
    for (int64_t t = 0; t < places; t += kTilePlaces) {
      const int64_t end = min64(t + kTilePlaces, places);
      const float* keys = read_rows(kernel, p.keys, first + t, first + end, p.size, tile);
      kernel.products(queries, p.rows, keys, end - t, p.size, scores + t, kPartPlaces);
    }
  }
  for (int64_t row = 0; row < p.rows; ++row) {
    const Places some = seen_by(p, batch, row % p.tokens);
    const int64_t low = min64(max64(some.first - from, 0), places), high = max64(min64(some.end - from, places), low);
    float *shares = scores + row * kPartPlaces, *sum = sums + row * stride;
    for (int64_t t = 0; t < low; ++t) shares[t] = 0;
    for (int64_t t = high; t < places; ++t) shares[t] = 0;
    sum[0] = kernel.scores(shares + low, high - low, p.scale, p.cap, sum[0]);
    sum[1] = kernel.exponentials(shares + low, high - low, sum[0]);
  }
  if (is_packed(p.values)) {
    const Problem some = packed_product(p, p.values, first, first + places, scores, kPartPlaces, sums + 2, stride);
    return run_problem(isa, some, pool, 1);
  }
  for (int64_t t = 0; t < places; t += kTilePlaces) {
    const int64_t end = min64(t + kTilePlaces, places);
    const float* values = read_rows(kernel, p.values, first + t, first + end, p.size, tile);
    kernel.mix(scores + t, kPartPlaces, p.rows, values, end - t, p.size, sums + 2, stride);
  }
  return true;
}

void merge_parts(const AttentionProblem& p, int64_t head, int64_t parts, float* sums) {
  const int64_t stride = row_sums(p), one = part_sums(p);
  for (int64_t row = 0; row < p.rows; ++row) {
    float* first = sums + row * stride;
    const int64_t at = (head * p.rows + row) * p.size;
    const bool sees_nothing = seen_by(p, head / p.heads, row % p.tokens).empty();
    float top = -FLT_MAX, total = 0;
    for (int64_t part = 0; part < parts; ++part) top = fmaxf(top, first[part * one]);
    for (int64_t part = 0; part < parts; ++part) {
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
