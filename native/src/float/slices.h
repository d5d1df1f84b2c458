// Slices: tables of a weight as integers, and integers of `x` as signed bytes.
#pragma once

#include "core/arrays_avx512.h"
#include "core/runs.h"
#include "core/slices.h"

namespace {

// The power of two whose product with the table is integers of a byte, or 0 if there is none.
EQQ_INLINE int64_t integer_factor(const Problem& p) {
  if (p.bits == 8) return p.values == kValueInteger && p.table[0] >= -255 && p.table[0] <= 0 ? 1 : 0;
  for (int64_t factor = 1; factor <= (p.zero_point == nullptr ? 8 : 1); factor *= 2) {
    float low = p.table[0], high = low;
    bool whole = true;
    for (int i = 0; i < 1 << p.bits; ++i) {
      const float value = p.table[i] * static_cast<float>(factor);
      whole = whole && value >= -255 && value <= 255 && value == static_cast<float>(static_cast<int>(value));
      low = value < low ? value : low;
      high = value > high ? value : high;
    }
    if (whole && high - low <= 255) return factor;
  }
  return 0;
}

EQQ_INLINE int32_t lowest_integer(const Problem& p, int64_t factor) {
  float low = p.table[0];
  for (int i = 1; i < (p.bits == 8 ? 1 : 1 << p.bits); ++i) low = p.table[i] < low ? p.table[i] : low;
  return static_cast<int32_t>(low * static_cast<float>(factor));
}

// The lookup table from codes, whose upper bits are ignored, to unsigned bytes.
EQQ_INLINE __m512i integers_table(const Problem& p, int64_t factor) {
  alignas(64) uint8_t table[64];
  const int32_t lowest = lowest_integer(p, factor);
  for (int i = 0; i < 64; ++i)
    table[i] = p.bits == 8 ? 0
                           : static_cast<uint8_t>(p.table[i & ((1 << p.bits) - 1)] * static_cast<float>(factor) -
                                                  static_cast<float>(lowest));
  return _mm512_load_si512(table);
}

// As `bytes_apart`, for integers as signed slices: a carry makes signed bytes of unsigned ones.
EQQ_INLINE __m512i slices_apart(__m512i integers) {
  const __m512i flip = _mm512_set1_epi32(static_cast<int>(0x80808080));
  return bytes_apart(_mm512_xor_si512(_mm512_add_epi32(integers, flip), flip));
}

}  // namespace
