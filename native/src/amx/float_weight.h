// Codes of 16 rows of the weight as slices: tiles of bytes without a sign.
#pragma once

#include "amx/float_layout.h"

namespace {

// Bytes without their sign that stand for numbers, but for zero: others are NaN or infinite, or too small for integers
// that hold the largest as well.
struct Numbers {
  int first, last;
};
EQQ_INLINE Numbers numbers_of(const Problem& p) {
  return p.values == kValueE4M3 ? Numbers{1, 126} : p.values == kValueE5M2 ? Numbers{40, 123} : Numbers{1, 127};
}

// The least and the largest of the values of codes, or NaN if some code stands for no finite number without a byte
// telling so.
struct Reach {
  float low, high;
};
Reach reach_of(const Problem& p) {
  Reach a = {0, 0};
  for (int i = 0; i < 1 << p.bits; ++i) {
    if (p.bits == 8 && (i & 127) > numbers_of(p).last) continue;
    if (!(p.table[i] - p.table[i] == 0)) return {__builtin_nanf(""), __builtin_nanf("")};
    a.low = p.table[i] < a.low ? p.table[i] : a.low;
    a.high = p.table[i] > a.high ? p.table[i] : a.high;
  }
  return a;
}

// The largest magnitude of values of codes less a zero point, which is a code as well. Of a byte fewer codes may occur.
float most_of(const Problem& p, const Reach& a) {
  const float last = p.values == kValueInteger ? a.high - a.low : static_cast<float>((1 << p.bits) - 1);
  const float low = p.zero_point == nullptr ? a.low : a.low - last;
  return a.high > -low ? a.high : -low;
}

// Some codes of 16 rows, and where they go.
struct Codes {
  const uint8_t* from;
  int64_t stride, last;  // bytes from one row to the next; the last row
  int64_t steps;         // of 64 codes
  const float *scale,
      *zero;         // of rows and blocks: `kMostBlocks` apart. Values less a zero point times a scale are integers
  const int* block;  // of each 16 codes
  uint8_t* out;
};

template <int kBits>
EQQ_INLINE I shifted(I codes, int plane) {  // code `plane` of a byte to bit 2 and up
  const int by = (kBits == 8 ? 0 : plane * kBits) - 2;
  return by < 0 ? _mm512_slli_epi16(codes, -by) : _mm512_srli_epi16(codes, by);
}

EQQ_INLINE I slices_of(F value, F scale) {
  return _mm512_cvtps_epi32(_mm512_fmadd_ps(value, scale, _mm512_set1_ps(kAllMore)));
}

// Through a table of integers for each block, whose bytes are slices. A step has codes of `kBlocks` blocks. With eight
// bits there is a code of at most four in each byte.
template <int kBits, int kBlocks, bool kZero>
void decode_scaled(const Codes& a, F table) {
  const I mask = _mm512_set1_epi8(0x3c);
  constexpr int kPlanes = 8 / kBits;
  for (int64_t segment = 0; segment * kPlanes < a.steps; ++segment) {
    uint8_t* to = a.out + segment * kPlanes * kSlices * kTile;
    const int* block = a.block + segment * kPlanes * 4;
#pragma GCC unroll 4
    for (int64_t i = 0; i < kRows; ++i) {
      const I codes = _mm512_loadu_si512(a.from + min64(i, a.last) * a.stride + 64 * segment);
      const float *scale = a.scale + i * kMostBlocks, *zero = a.zero + i * kMostBlocks;
#pragma GCC unroll 8
      for (int plane = 0; plane < kPlanes; ++plane) {
        I slices[kBlocks];
#pragma GCC unroll 4
        for (int b = 0; b < kBlocks; ++b) {
          const int at = block[4 * plane + b * (4 / kBlocks)];
          slices[b] =
              slices_of(kZero ? _mm512_sub_ps(table, _mm512_set1_ps(zero[at])) : table, _mm512_set1_ps(scale[at]));
        }
        const I index = shifted<kBits>(codes, plane);
#pragma GCC unroll 3
        for (int slice = 0; slice < kSlices; ++slice) {
          const I some =
              _mm512_ternarylogic_epi32(index, mask, _mm512_set1_epi8(static_cast<char>(kSlices - 1 - slice)), 0xea);
          I bytes = _mm512_permutexvar_epi8(some, slices[0]);
#pragma GCC unroll 4
          for (int b = 1; b < kBlocks; ++b)
            bytes = _mm512_mask_permutexvar_epi8(bytes, ~uint64_t{0} << (64 / kBlocks * b), some, slices[b]);
          _mm512_store_si512(to + (plane * kSlices + slice) * kTile + 64 * i, bytes);
        }
      }
    }
  }
}

// Through a table of bytes in a register.
template <int kBits>
void decode_plain(const Codes& a, I table) {
  constexpr int kPlanes = 8 / kBits;
  for (int64_t segment = 0; segment * kPlanes < a.steps; ++segment)
#pragma GCC unroll 4
    for (int64_t i = 0; i < kRows; ++i) {
      const I codes = _mm512_loadu_si512(a.from + min64(i, a.last) * a.stride + 64 * segment);
#pragma GCC unroll 8
      for (int plane = 0; plane < kPlanes; ++plane)
        _mm512_store_si512(a.out + (segment * kPlanes + plane) * kTile + 64 * i,
                           _mm512_permutexvar_epi8(_mm512_srli_epi16(codes, plane * kBits), table));
    }
}

EQQ_INLINE bool has_others(I codes, Numbers numbers) {
  const I some = _mm512_and_si512(codes, _mm512_set1_epi8(127));
  const __mmask64 low = _mm512_mask_cmplt_epu8_mask(_mm512_test_epi8_mask(some, some), some,
                                                    _mm512_set1_epi8(static_cast<char>(numbers.first)));
  return (low | _mm512_cmpgt_epu8_mask(some, _mm512_set1_epi8(static_cast<char>(numbers.last)))) != 0;
}

// Through a table of 256 bytes for each slice. Returns the rows with codes that are no such numbers.
uint32_t decode_look_up(const Problem& p, const Codes& a, const uint8_t* tables) {
  const Numbers numbers = numbers_of(p);
  uint32_t rows = 0;
  for (int64_t step = 0; step < a.steps; ++step)
#pragma GCC unroll 2
    for (int64_t i = 0; i < kRows; ++i) {
      const I codes = _mm512_loadu_si512(a.from + min64(i, a.last) * a.stride + 64 * step);
      const __mmask64 upper = _mm512_movepi8_mask(codes);
#pragma GCC unroll 3
      for (int slice = 0; slice < kSlices; ++slice) {
        const uint8_t* table = tables + 256 * slice;
        const I low = _mm512_permutex2var_epi8(_mm512_load_si512(table), codes, _mm512_load_si512(table + 64));
        const I high = _mm512_permutex2var_epi8(_mm512_load_si512(table + 128), codes, _mm512_load_si512(table + 192));
        _mm512_store_si512(a.out + (step * kSlices + slice) * kTile + 64 * i, _mm512_mask_blend_epi8(upper, low, high));
      }
      rows |= static_cast<uint32_t>(has_others(codes, numbers)) << i;
    }
  return rows;
}

// Four vectors of integers, whose bytes are apart, as slices of 64 codes of a row: integers of `fours_in_order`.
EQQ_INLINE void store_slices(const I* apart, uint8_t* out) {
  const I low0 = _mm512_unpacklo_epi32(apart[0], apart[1]), low1 = _mm512_unpacklo_epi32(apart[2], apart[3]);
  const I all[3] = {
      _mm512_unpacklo_epi64(low0, low1), _mm512_unpackhi_epi64(low0, low1),
      _mm512_unpacklo_epi64(_mm512_unpackhi_epi32(apart[0], apart[1]), _mm512_unpackhi_epi32(apart[2], apart[3]))};
#pragma GCC unroll 3
  for (int slice = 0; slice < kSlices; ++slice) _mm512_store_si512(out + slice * kTile, all[kSlices - 1 - slice]);
}

// A number for each 16 of 64 codes: that of their block.
EQQ_INLINE F spread_blocks(const float* row, const int* block) {
  const I quarters = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  const __m128 some = _mm_setr_ps(row[block[0]], row[block[1]], row[block[2]], row[block[3]]);
  return _mm512_permutexvar_ps(quarters, _mm512_castps128_ps512(some));
}

// Codes of eight bits whose values, `table[0] + code`, fit in a signed byte, times the scale of their block.
void decode_integers(const Problem& p, const Codes& a) {
  const I lowest = _mm512_set1_epi8(static_cast<char>(p.table[0]));
  for (int64_t step = 0; step < a.steps; ++step)
#pragma GCC unroll 2
    for (int64_t i = 0; i < kRows; ++i) {
      const I codes = _mm512_loadu_si512(a.from + min64(i, a.last) * a.stride + 64 * step);
      alignas(64) int8_t values[64];
      _mm512_store_si512(values, fours_in_order(_mm512_add_epi8(codes, lowest)));
      const F scale = spread_blocks(a.scale + i * kMostBlocks, a.block + 4 * step);
      I apart[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const I some = _mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(values + 16 * j)));
        apart[j] = bytes_apart(slices_of(_mm512_cvtepi32_ps(some), scale));
      }
      store_slices(apart, a.out + step * kSlices * kTile + 64 * i);
    }
}

// Through floats, 64 of a row at a time. Returns the rows with codes that are no such numbers.
uint32_t decode_floats(const Problem& p, const Codes& a) {
  const Numbers numbers = numbers_of(p);
  uint32_t rows = 0;
  for (int64_t step = 0; step < a.steps; ++step)
    for (int64_t i = 0; i < kRows; ++i) {
      const I codes = _mm512_loadu_si512(a.from + min64(i, a.last) * a.stride + 64 * step);
      alignas(64) uint8_t bytes[64];
      _mm512_store_si512(bytes, fours_in_order(codes));
      const auto spread = [&](const float* of) { return spread_blocks(of + i * kMostBlocks, a.block + 4 * step); };
      const F scale = spread(a.scale), zero = p.zero_point == nullptr ? _mm512_setzero_ps() : spread(a.zero);
      I apart[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const uint8_t* from = bytes + 16 * j;
        const F value = p.values == kValueInteger
                          ? _mm512_add_ps(avx512::Simd::integers(from), _mm512_set1_ps(p.table[0]))
                      : p.values == kValueE4M3 ? avx512::Simd::e4m3(from)
                      : p.values == kValueE5M2 ? avx512::Simd::e5m2(from)
                                               : avx512::Simd::bytes256(from, p.table);
        apart[j] = bytes_apart(slices_of(_mm512_sub_ps(value, zero), scale));
      }
      store_slices(apart, a.out + step * kSlices * kTile + 64 * i);
      rows |= static_cast<uint32_t>(has_others(codes, numbers)) << i;
    }
  return rows;
}

// The factor that makes integers of the values of codes. A power of two keeps floats of eight bits exact.
float integers_in_one(float most) {
  float power = 1;
  const float largest = largest_of(kSlices) / most;
  while (power > largest) power /= 2;
  while (power * 2 <= largest) power *= 2;
  return power;
}

}  // namespace
