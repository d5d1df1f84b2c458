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

// The products of a query with `kPlaces` keys.
template <int kPlaces>
EQQ_INLINE void some_products(const float* query, const float* keys, int64_t size, float* out) {
  Floats sums[kPlaces] = {};
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) {
    const Floats q = load_floats(query + d);
#pragma GCC unroll 8
    for (int t = 0; t < kPlaces; ++t) sums[t] += q * load_floats(keys + t * size + d);
  }
#pragma GCC unroll 8
  for (int t = 0; t < kPlaces; ++t) {
    float sum = sum_of(sums[t]);
    for (int64_t i = d; i < size; ++i) sum += query[i] * keys[t * size + i];
    out[t] = sum;
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
  memcpy(scores, &some, min64(count, kLanes) * sizeof *scores);
}

void products(const float* query, const float* keys, int64_t places, int64_t size, float* out) {
  int64_t t = 0;
  for (; t + 8 <= places; t += 8) some_products<8>(query, keys + t * size, size, out + t);
  for (; t < places; ++t) some_products<1>(query, keys + t * size, size, out + t);
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

// Columns `kVectors` vectors wide of the sum of values.
template <int kVectors>
EQQ_INLINE void mix_columns(const float* shares, const float* values, int64_t places, int64_t size, float* out) {
  Floats sums[kVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) sums[v] = load_floats(out + v * kLanes);
  for (int64_t t = 0; t < places; ++t) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sums[v] += shares[t] * load_floats(values + t * size + v * kLanes);
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) store_vector(out + v * kLanes, sums[v]);
}

void mix(const float* shares, const float* values, int64_t places, int64_t size, float* sums) {
  int64_t d = 0;
  for (; d + 8 * kLanes <= size; d += 8 * kLanes) mix_columns<8>(shares, values + d, places, size, sums + d);
  for (; d + 4 * kLanes <= size; d += 4 * kLanes) mix_columns<4>(shares, values + d, places, size, sums + d);
  for (; d + kLanes <= size; d += kLanes) mix_columns<1>(shares, values + d, places, size, sums + d);
  for (; d < size; ++d)
    for (int64_t t = 0; t < places; ++t) sums[d] += shares[t] * values[t * size + d];
}

}  // namespace

namespace EQQUANT_ISA {
extern const AttentionKernel kAttention = {widen, products, scores, exponentials, mix};
}
