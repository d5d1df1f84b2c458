// The trellis of `Codec`: a value is the hash of a window of twelve bits (`eqquant/_numerics/trellis.py`). A hash is a
// sum of four numbers, which are computed in lanes of 16 bits.
#pragma once

#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "core/ints.h"
#include "core/problem.h"

namespace {

constexpr int64_t kTrellisAhead = 4096;  // bytes to the prefetched codes
constexpr uint16_t kWindow = 0x0fff, kSixBits = 0x3f3f;
// The float with a sum in its low half and this in its upper one is `kLarge` plus the sum.
constexpr uint16_t kExponent = 0x4b00;
constexpr float kLarge = 0x1p23f;

#if defined(__AVX512BW__)

// Vectors of 16 bits.
struct TrellisVector {
  using I = __m512i;
  static constexpr int kValues = 32;
  EQQ_INLINE I load(const void* p) { return _mm512_loadu_si512(p); }
  EQQ_INLINE I all(uint16_t a) { return _mm512_set1_epi16(static_cast<int16_t>(a)); }
  EQQ_INLINE I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
  EQQ_INLINE I add(I a, I b) { return _mm512_add_epi16(a, b); }
  EQQ_INLINE I mul_low(I a, I b) { return _mm512_mullo_epi16(a, b); }
  EQQ_INLINE I mul_high(I a, I b) { return _mm512_mulhi_epu16(a, b); }
  EQQ_INLINE I add_bytes(I a) { return _mm512_maddubs_epi16(a, _mm512_set1_epi8(1)); }
  // In each 32 bits: the lower half of `a >> right`, and the upper half of `a << left`.
  EQQ_INLINE I shift(I a, I right, I left) {
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srlv_epi32(a, right), _mm512_sllv_epi32(a, left));
  }
  EQQ_INLINE I shuffle(I a, I places) { return _mm512_shuffle_epi8(a, places); }
  // Adds the products of `sums + kLarge - middle` with x. Of each eight sums the first four are multiplied by the first
  // vector of x, the others by the second: `TrellisRow::pack` orders x accordingly.
  using F = __m512;
  EQQ_INLINE F multiply(I sums, F middle, const float* x, F acc) {
    const I exponent = all(kExponent);
    const F lower = _mm512_sub_ps(_mm512_castsi512_ps(_mm512_unpacklo_epi16(sums, exponent)), middle);
    const F upper = _mm512_sub_ps(_mm512_castsi512_ps(_mm512_unpackhi_epi16(sums, exponent)), middle);
    return _mm512_fmadd_ps(upper, _mm512_loadu_ps(x + 16), _mm512_fmadd_ps(lower, _mm512_loadu_ps(x), acc));
  }
  EQQ_INLINE void store(uint8_t* out, I a, I b) {
    const I order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi64(order, _mm512_packus_epi16(a, b)));
  }
};

#elif defined(__AVX2__)

struct TrellisVector {
  using I = __m256i;
  static constexpr int kValues = 16;
  EQQ_INLINE I load(const void* p) { return _mm256_loadu_si256(static_cast<const I*>(p)); }
  EQQ_INLINE I all(uint16_t a) { return _mm256_set1_epi16(static_cast<int16_t>(a)); }
  EQQ_INLINE I bit_and(I a, I b) { return _mm256_and_si256(a, b); }
  EQQ_INLINE I add(I a, I b) { return _mm256_add_epi16(a, b); }
  EQQ_INLINE I mul_low(I a, I b) { return _mm256_mullo_epi16(a, b); }
  EQQ_INLINE I mul_high(I a, I b) { return _mm256_mulhi_epu16(a, b); }
  EQQ_INLINE I add_bytes(I a) { return _mm256_maddubs_epi16(a, _mm256_set1_epi8(1)); }
  EQQ_INLINE I shift(I a, I right, I left) {
    return _mm256_blend_epi16(_mm256_srlv_epi32(a, right), _mm256_sllv_epi32(a, left), 0xaa);
  }
  EQQ_INLINE I shuffle(I a, I places) { return _mm256_shuffle_epi8(a, places); }
  using F = __m256;
  EQQ_INLINE F multiply(I sums, F middle, const float* x, F acc) {
    const I exponent = all(kExponent);
    const F lower = _mm256_sub_ps(_mm256_castsi256_ps(_mm256_unpacklo_epi16(sums, exponent)), middle);
    const F upper = _mm256_sub_ps(_mm256_castsi256_ps(_mm256_unpackhi_epi16(sums, exponent)), middle);
    return _mm256_fmadd_ps(upper, _mm256_loadu_ps(x + 8), _mm256_fmadd_ps(lower, _mm256_loadu_ps(x), acc));
  }
  EQQ_INLINE void store(uint8_t* out, I a, I b) {
    _mm256_storeu_si256(reinterpret_cast<I*>(out), _mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8));
  }
};

#endif

#if defined(__AVX2__)

// The hash of windows, `hash_window`.
struct TrellisHash {
  using V = TrellisVector;
  V::I first, second, six = V::all(kSixBits), window = V::all(kWindow);

  explicit TrellisHash(uint32_t multipliers)
      : first(V::all(static_cast<uint16_t>(multipliers))), second(V::all(static_cast<uint16_t>(multipliers >> 16))) {}

  // The hash of each window as two bytes, which are still to be added. Bits of `windows` beyond the twelve are ignored.
  EQQ_INLINE V::I pairs(const TrellisHash& h, V::I windows) {
    const V::I product = V::mul_low(V::bit_and(windows, h.window), h.first);
    return V::add(V::bit_and(product, h.six), V::bit_and(V::mul_high(product, h.second), h.six));
  }
};

#endif

#if defined(__AVX512VBMI__)

// Operands of byte instructions that extract windows. `place`: which byte of the segment moves to each byte of a
// vector, so that each 64 bits hold four windows. `shift`: at which of these bits each byte of a window begins, two for
// a window. Values are in such an order that `_mm512_packus_epi16` of two vectors brings 64 of them into theirs.
template <int kBits>
struct TrellisPlaces {
  uint8_t place[4][64] = {}, shift[64] = {};
  constexpr TrellisPlaces() {
    for (int vector = 0; vector < 4; ++vector)
      for (int i = 0; i < 64; ++i) {
        const int first = vector / 2 * 64 + i / 16 * 16 + vector % 2 * 8 + i / 8 % 2 * 4;
        place[vector][i] = static_cast<uint8_t>((first * kBits / 8 + i % 8) % (16 * kBits));
        shift[i] = static_cast<uint8_t>(first * kBits % 8 + i / 2 % 4 * kBits + i % 2 * 8);
      }
  }
};

template <int kBits>
struct Trellis {
  using I = __m512i;
  static constexpr TrellisPlaces<kBits> kPlaces = {};
  TrellisHash hash;
  I place[4], shift = _mm512_loadu_si512(kPlaces.shift);

  explicit Trellis(uint32_t multipliers) : hash(multipliers) {
    for (int i = 0; i < 4; ++i) place[i] = _mm512_loadu_si512(kPlaces.place[i]);
  }

  // The codes of vector `kIndex` of a segment, as pairs of bytes. `value_at` says which value is in a lane of it.
  template <int kIndex>
  EQQ_INLINE I pairs(const Trellis& t, const uint8_t* segment) {
    const I bytes = _mm512_maskz_loadu_epi8(~uint64_t{0} >> (64 - 16 * kBits), segment);
    return TrellisHash::pairs(t.hash,
                              _mm512_multishift_epi64_epi8(t.shift, _mm512_permutexvar_epi8(t.place[kIndex], bytes)));
  }
  static constexpr int value_at(int vector, int place) {
    return vector / 2 * 64 + place / 8 * 16 + vector % 2 * 8 + place % 8;
  }
  EQQ_INLINE void store(uint8_t* out, I a, I b) { _mm512_storeu_si512(out, _mm512_packus_epi16(a, b)); }
};

#elif defined(__AVX2__)

// The 16 bytes of a segment from `kStart` on; the segment is a circle.
template <int kBits, int kStart>
EQQ_INLINE __m128i bytes_from(const uint8_t* segment) {
  constexpr int kLast = 16 * kBits - 16;
  const auto load = [segment](int at) __attribute__((always_inline)) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(segment + at));
  };
  if constexpr (kStart <= kLast) {
    return load(kStart);
  } else {
    return _mm_alignr_epi8(load(0), load(kLast), kStart - kLast);
  }
}

// These bytes in each 128 bits of a vector. Of four bits per code they do not hold all windows: the upper half of a
// vector begins where the windows of the lower one end.
template <int kBits, int kStart>
EQQ_INLINE TrellisVector::I vector_from(const uint8_t* segment) {
#if defined(__AVX512BW__)
  const __m256i lower = _mm256_broadcastsi128_si256(bytes_from<kBits, kStart>(segment));
  constexpr int kUpper = kBits == 4 ? kStart + 2 * kBits : kStart;
  return _mm512_inserti64x4(_mm512_castsi256_si512(lower),
                            _mm256_broadcastsi128_si256(bytes_from<kBits, kUpper>(segment)), 1);
#else
  return _mm256_broadcastsi128_si256(bytes_from<kBits, kStart>(segment));
#endif
}

// Where the two windows of each 32 bits of a vector are, in the four bytes at `place`: the first begins at bit `right`.
// Shifted to the left by `left`, the second begins at bit 16.
template <int kBits>
struct TrellisPlaces {
  uint8_t place[64] = {};
  uint32_t right[16] = {}, left[16] = {};
  constexpr TrellisPlaces() {
    for (int lane = 0; lane < 16; ++lane) {
      const int bit = 2 * kBits * (kBits == 4 ? lane % 8 : lane);
      for (int i = 0; i < 4; ++i) place[4 * lane + i] = static_cast<uint8_t>(bit / 8 + i);
      right[lane] = static_cast<uint32_t>(bit % 8);
      left[lane] = static_cast<uint32_t>(16 - kBits - bit % 8);
    }
  }
};

template <int kBits>
struct Trellis {
  using V = TrellisVector;
  static constexpr TrellisPlaces<kBits> kPlaces = {};
  TrellisHash hash;
  V::I place = V::load(kPlaces.place), right = V::load(kPlaces.right), left = V::load(kPlaces.left);

  explicit Trellis(uint32_t multipliers) : hash(multipliers) {}

  template <int kIndex>
  EQQ_INLINE V::I pairs(const Trellis& t, const uint8_t* segment) {
    const V::I bytes = V::shuffle(vector_from<kBits, kIndex * V::kValues * kBits / 8>(segment), t.place);
    return TrellisHash::pairs(t.hash, V::shift(bytes, t.right, t.left));
  }
  static constexpr int value_at(int vector, int place) { return vector * V::kValues + place; }
  EQQ_INLINE void store(uint8_t* out, V::I a, V::I b) { V::store(out, a, b); }
};

#endif

#if defined(__AVX2__)

template <int kBits, int kIndex>
EQQ_INLINE TrellisVector::I trellis_sums(const Trellis<kBits>& t, const uint8_t* segment) {
  return TrellisVector::add_bytes(Trellis<kBits>::template pairs<kIndex>(t, segment));
}

template <int kBits, int kIndex = 0>
EQQ_INLINE void decode_segment(const Trellis<kBits>& t, const uint8_t* segment, uint8_t* out) {
  using T = Trellis<kBits>;
  if constexpr (kIndex * TrellisVector::kValues < kTrellisSegment) {
    T::store(out + kIndex * TrellisVector::kValues, trellis_sums<kBits, kIndex>(t, segment),
             trellis_sums<kBits, kIndex + 1>(t, segment));
    decode_segment<kBits, kIndex + 2>(t, segment, out);
  }
}

#else

template <int kBits>
struct Trellis {
  uint32_t multipliers;

  explicit Trellis(uint32_t multipliers) : multipliers(multipliers) {}
};

template <int kBits>
EQQ_INLINE void decode_segment(const Trellis<kBits>& t, const uint8_t* segment, uint8_t* out) {
  uint16_t windows[kTrellisSegment];
  uint8_t circle[16 * kBits + 8];
  memcpy(circle, segment, 16 * kBits);
  memcpy(circle + 16 * kBits, segment, 8);
  for (int i = 0; i < kTrellisSegment; i += 8) {
    uint64_t bits = 0;
    for (int j = 0; j < 8; ++j) bits |= static_cast<uint64_t>(circle[i * kBits / 8 + j]) << 8 * j;
    for (int j = 0; j < 8; ++j) windows[i + j] = bits >> j * kBits & kWindow;
  }
  for (int i = 0; i < kTrellisSegment; ++i) out[i] = hash_window(windows[i], t.multipliers);
}

#endif

// A shorter last segment as a whole one: its circle, repeated.
template <int kBits>
EQQ_INLINE void repeat_circle(const uint8_t* segment, int64_t values, uint8_t* out) {
  const int64_t size = div_up(min64(values, kTrellisSegment), kTrellisUnit) * kTrellisUnit * kBits / 8;
  for (int64_t i = 0; i < 16 * kBits; ++i) out[i] = segment[i % size];
}

// Decodes values `first` to `last` of a row of `length`, where `first` begins a segment.
template <int kBits>
EQQ_INLINE void decode_trellis_row(uint32_t multipliers, const uint8_t* packed, int64_t length, int64_t first,
                                   int64_t last, uint8_t* out) {
  constexpr int64_t kSize = 16 * kBits;
  const Trellis<kBits> trellis(multipliers);
  const uint8_t* bytes = packed + first / kTrellisSegment * kSize;
  for (; last - first >= kTrellisSegment; first += kTrellisSegment, bytes += kSize, out += kTrellisSegment) {
    __builtin_prefetch(bytes + kTrellisAhead);
    decode_segment(trellis, bytes, out);
  }
  if (first == last) return;
  uint8_t circle[kSize], values[kTrellisSegment];
  repeat_circle<kBits>(bytes, length - first, circle);
  decode_segment(trellis, circle, values);
  memcpy(out, values, last - first);
}

EQQ_INLINE void decode_trellis(const Codec& codec, const uint8_t* packed, int64_t length, int64_t first, int64_t last,
                               uint8_t* out) {
  by_count<4>(codec.bits, [&](auto bits) {
    decode_trellis_row<decltype(bits)::value>(codec.multipliers, packed, length, first, last, out);
  });
}

}  // namespace
