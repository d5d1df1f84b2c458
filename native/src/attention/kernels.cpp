// The loops of `attention.h`, compiled for each instruction set.
#include <math.h>

#include "attention/attention.h"
#include "core/vectors.h"

namespace {

using V = EQQUANT_ISA::Simd;

void widen(const void* from, int32_t type, int64_t count, float* out) {
  const uint8_t* halves = static_cast<const uint8_t*>(from);
  const auto some = [&](const uint8_t* at)
                        __attribute__((always_inline)) { return type == kBFloat16 ? V::bf16(at) : V::f16(at); };
  int64_t i = 0;
  for (; i + V::L <= count; i += V::L) V::store(out + i, some(halves + 2 * i));
  if (i == count) return;
  uint8_t rest[2 * V::L] = {0};
  float values[V::L];
  memcpy(rest, halves + 2 * i, 2 * (count - i));
  V::store(values, some(rest));
  memcpy(out + i, values, 4 * (count - i));
}

// The values of codes, one byte each.
template <int kBits, int kValues>
EQQ_INLINE typename V::F values_of(const uint8_t* codes, const float* table) {
  if constexpr (kBits <= 4) return V::bytes16(codes, table);
  if constexpr (kValues == kValueInteger && !V::kLooksUpBytes)
    return V::add(V::integers(codes), V::broadcast(table[0]));
  if constexpr (kValues == kValueE4M3 && !V::kLooksUpBytes) return V::e4m3(codes);
  if constexpr (kValues == kValueE5M2 && !V::kLooksUpBytes) return V::e5m2(codes);
  return V::bytes256(codes, table);
}

template <int kBits, int kValues>
void decode_rows(const DecodedParts& parts, const float* table, int64_t rows, int64_t size, int64_t block, float* out) {
  const int64_t blocks = div_up(size, block);
  const uint8_t *codes = parts.codes, *zeros = parts.zeros;
  const float *scales = parts.scales, *offsets = parts.offsets;
  for (int64_t row = 0; row < rows; ++row, codes += size, out += size)
    for (int64_t b = 0; b < blocks; ++b) {
      const auto scale = V::broadcast(*scales++);
      const auto zero = V::broadcast(zeros == nullptr ? 0 : static_cast<float>(*zeros++));
      const auto offset = V::broadcast(offsets == nullptr ? 0 : *offsets++);
      // A last vector reaches into the next block, or row, which is written later.
      for (int64_t i = b * block; i < min64((b + 1) * block, size); i += V::L)
        V::store(out + i, V::fma(V::sub(values_of<kBits, kValues>(codes + i, table), zero), scale, offset));
    }
}

void decode(const DecodedParts* parts, const Problem* p, int64_t rows, float* out) {
  float table[16];
  if (p->bits <= 4)
    for (int i = 0; i < 16; ++i) table[i] = p->table[i & ((1 << p->bits) - 1)];
  const auto decode = p->bits <= 4               ? decode_rows<4, kValueTable>
                    : p->values == kValueInteger ? decode_rows<8, kValueInteger>
                    : p->values == kValueE4M3    ? decode_rows<8, kValueE4M3>
                    : p->values == kValueE5M2    ? decode_rows<8, kValueE5M2>
                                                 : decode_rows<8, kValueTable>;
  decode(*parts, p->bits <= 4 ? table : p->table, rows, p->k, p->blocks > 1 ? p->block_size : p->k, out);
}

EQQ_INLINE Floats fill(float value) { return Floats{} + value; }

// exp(x) is power * (1 + rest), for magnitudes up to 87.
struct Exponential {
  Floats power, rest;
};
EQQ_INLINE Exponential split_exp(Floats x) {
  const Floats magic = fill(12582912.0f);  // adding it rounds to whole numbers
  const Floats shifted = x * 1.44269504f + magic, n = shifted - magic;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // less n ln 2, in two steps
  Floats sum = fill(1.0f / 5040);
  const float coefficients[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1};
#pragma GCC unroll 6
  for (const float coefficient : coefficients) sum = sum * r + coefficient;
  Ints bits = load_vector<Ints>(&shifted);
  bits = (bits << 23) + (127 << 23);
  return {load_vector<Floats>(&bits), sum * r};
}

// exp(x) for x up to 87; zero below -87. NaN stays.
EQQ_INLINE Floats exp_of(Floats x) {
  const Floats least = fill(-87);
  const Exponential e = split_exp(x < least ? least : x);
  return x < least ? Floats{} : e.power * e.rest + e.power;
}

// cap * tanh(score / cap), by exp(x) - 1, so that small scores keep their precision.
EQQ_INLINE Floats capped(Floats score, float cap) {
  const Floats most = fill(40), x = score * (2 / cap);  // tanh is one there
  const Exponential e = split_exp(x > most ? most : x < -most ? -most : x);
  const Floats less_one = e.power * e.rest + (e.power - 1);
  return cap * (less_one / (less_one + 2));
}

// Calls `work(row, Count<n>())` for the rows from `row` to `rows`, n at a time, which share what is read of the cache.
template <int kRows = kLanes == 16 ? 4 : 3, typename Work>
EQQ_INLINE void for_rows(int64_t row, int64_t rows, const Work& work) {
  for (; row + kRows <= rows; row += kRows) work(row, Count<kRows>());
  if constexpr (kRows > 1) for_rows<kRows - 1>(row, rows, work);
}

// The products of `kRows` queries with `kPlaces` keys.
template <int kRows, int kPlaces, class S = V>
EQQ_INLINE void some_products(const float* queries, const float* keys, int64_t size, float* out, int64_t out_row) {
  Floats sums[kRows][kPlaces] = {};
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) {
#pragma GCC unroll 8
    for (int t = 0; t < kPlaces; ++t) {
      const Floats key = load_floats(keys + t * size + d);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[r][t] += load_floats(queries + r * size + d) * key;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    float* to = out + r * out_row;
    if constexpr (S::kSumsRows && kPlaces % S::kDotRows == 0) {
      for (int t = 0; t < kPlaces; t += S::kDotRows) S::sum_rows(reinterpret_cast<typename S::F*>(sums[r] + t), to + t);
    } else {
#pragma GCC unroll 8
      for (int t = 0; t < kPlaces; ++t) to[t] = sum_of(sums[r][t]);
    }
    for (int64_t i = d; i < size; ++i)
      for (int t = 0; t < kPlaces; ++t) to[t] += queries[r * size + i] * keys[t * size + i];
  }
}

// At most a vector of scores; those behind the last are minus infinity.
EQQ_INLINE Floats load_scores(const float* scores, int64_t count) {
  if (count >= kLanes) return load_floats(scores);
  Floats some = fill(-INFINITY);
  memcpy(&some, scores, count * sizeof *scores);
  return some;
}
EQQ_INLINE void store_scores(float* scores, int64_t count, Floats some) {
  if (count >= kLanes) return store_vector(scores, some);
  memcpy(scores, &some, count * sizeof *scores);
}

void products(const float* queries, int64_t rows, const float* keys, int64_t places, int64_t size, float* out,
              int64_t out_row) {
  for_rows(0, rows, [=](int64_t row, auto count) __attribute__((always_inline)) {
    constexpr int kRows = count.value, kPlaces = kRows == 1 ? 8 : kRows == 2 || kLanes == 16 ? 4 : 2;
    const float* some = queries + row * size;
    float* to = out + row * out_row;
    int64_t t = 0;
    for (; t + kPlaces <= places; t += kPlaces)
      some_products<kRows, kPlaces>(some, keys + t * size, size, to + t, out_row);
    for (; t < places; ++t) some_products<kRows, 1>(some, keys + t * size, size, to + t, out_row);
  });
}

float scores(float* products, int64_t places, float scale, float cap, float top) {
  Floats most = fill(top);
  for (int64_t t = 0; t < places; t += kLanes) {
    const int64_t count = places - t;
    Floats some = load_scores(products + t, count) * scale;
    if (cap > 0) some = capped(some, cap);
    store_scores(products + t, count, some);
    some = load_scores(products + t, count);  // with minus infinity again as padding
    most = some > most ? some : most;
  }
  float largest = most[0];
  for (int i = 1; i < kLanes; ++i) largest = most[i] > largest ? most[i] : largest;
  return largest;
}

float exponentials(float* scores, int64_t places, float top) {
  Floats sum = {};
  for (int64_t t = 0; t < places; t += kLanes) {
    const Floats some = exp_of(load_scores(scores + t, places - t) - top);
    store_scores(scores + t, places - t, some);
    sum += some;
  }
  return sum_of(sum);
}

// `kVectors` vectors of columns of the sums of values, for `kRows` rows.
template <int kRows, int kVectors>
EQQ_INLINE void mix_columns(const float* shares, int64_t share_row, const float* values, int64_t places, int64_t size,
                            float* sums, int64_t sum_row) {
  Floats all[kRows][kVectors];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) all[r][v] = load_floats(sums + r * sum_row + v * kLanes);
  for (int64_t t = 0; t < places; ++t) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const Floats value = load_floats(values + t * size + v * kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) all[r][v] += shares[r * share_row + t] * value;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store_vector(sums + r * sum_row + v * kLanes, all[r][v]);
}

void mix(const float* shares, int64_t share_row, int64_t rows, const float* values, int64_t places, int64_t size,
         float* sums, int64_t sum_row) {
  for_rows(0, rows, [=](int64_t row, auto count) __attribute__((always_inline)) {
    constexpr int kRows = count.value, kWide = kRows == 1 ? 8 : 4;
    const float* some = shares + row * share_row;
    float* to = sums + row * sum_row;
    int64_t d = 0;
    for (; d + kWide * kLanes <= size; d += kWide * kLanes)
      mix_columns<kRows, kWide>(some, share_row, values + d, places, size, to + d, sum_row);
    for (; d + kLanes <= size; d += kLanes)
      mix_columns<kRows, 1>(some, share_row, values + d, places, size, to + d, sum_row);
    for (; d < size; ++d)
      for (int r = 0; r < kRows; ++r)
        for (int64_t t = 0; t < places; ++t) to[r * sum_row + d] += some[r * share_row + t] * values[t * size + d];
  });
}

}  // namespace

namespace EQQUANT_ISA {
extern const AttentionKernel kAttention = {widen, decode, products, scores, exponentials, mix};
}
