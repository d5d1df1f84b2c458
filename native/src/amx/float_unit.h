// Rows of the weight that a thread multiplies: their scales, and their codes as tiles.
#pragma once

#include "amx/float_tiles.h"
#include "amx/float_weight.h"
#include "float/decode.h"

namespace {

// Rows of the weight that a thread multiplies.
struct Unit {
  const Problem& p;
  const Detail& d;
  const int64_t row, count;     // the first, and how many
  const uint8_t* const tables;  // of 256
  const Place* const places;    // of chunks
  uint8_t *const decoded, *const bytes, *const room;
  float *const scales, *const zeros;      // of 16 rows and the blocks of a chunk
  const int64_t all_scales;               // of the whole weight
  const Reach reach;                      // of values of codes
  const float most;                       // the largest magnitude, zero points too
  float integer = 0;                      // the integer of 1 if the scale of its row is 1
  I table = _mm512_setzero_si512();       // of bytes
  F values;                               // the table, again and again
  F factor = _mm512_setzero_ps();         // the unit of the integers of a row
  I zero = _mm512_setzero_si512();        // what codes of a row are less, if they are slices
  uint32_t odd[kUnitRows / kRows] = {0};  // rows that are not ordinary

  Unit(const Problem& p, const Detail& d, int64_t batch, int64_t first, int64_t count, const char* shared, char* own)
      : p(p), d(d), row(first_row(&p, batch) + first), count(count), tables(reinterpret_cast<const uint8_t*>(shared)),
        places(reinterpret_cast<const Place*>(shared + kTables)), decoded(reinterpret_cast<uint8_t*>(own)),
        bytes(decoded + Room(d).bytes), room(decoded + Room(d).unpacked),
        scales(reinterpret_cast<float*>(own + Room(d).scales)), zeros(scales + kRows * kMostBlocks),
        all_scales((p.selected == nullptr ? p.batch : p.stack) * p.n * p.blocks), reach(reach_of(p)),
        most(most_of(p, reach)) {
    if (d.w_slices == 1) {
      const int64_t factor = integer_factor(p);
      integer = 1.0f / static_cast<float>(factor);
      table = integers_table(p, factor);
    }
    if (d.kind == kLookUp) integer = 1 / integers_in_one(most);
    alignas(64) float some[16];
    for (int i = 0; i < 16; ++i) some[i] = p.table[i & ((1 << min64(p.bits, 4)) - 1)];
    values = _mm512_load_ps(some);
  }

  // Whether scales are in slices.
  bool in_blocks() const { return d.kind == kScaled || d.kind == kScaledIntegers || d.kind == kFloats; }

  // The largest magnitude in each of 16 vectors.
  EQQ_INLINE I largest_in_rows(const F* rows) {
    const auto larger = [](I a, I b) { return _mm512_max_epu32(a, b); };
    const I magnitude = _mm512_set1_epi32(0x7fffffff);
    I a[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = _mm512_and_si512(_mm512_castps_si512(rows[i]), magnitude);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
      a[i] = larger(_mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      a[i] = larger(_mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
#pragma GCC unroll 3
    for (int i = 0, j = 4; i < 6; i += 2, ++j)
      a[j] = larger(_mm512_shuffle_i32x4(a[i], a[i + 1], 0x88), _mm512_shuffle_i32x4(a[i], a[i + 1], 0xdd));
    return a[6];
  }

  // Sixteen scales of 16 rows, of which `some` are real.
  template <int kKind>
  EQQ_INLINE void load_scales(const Problem& p, int64_t first, int64_t last, int64_t block, __mmask16 some, F* out) {
    const int64_t width = scale_bytes(kKind);
#pragma GCC unroll 16
    for (int64_t i = 0; i < kRows; ++i) {
      const int64_t row = min64(first + i, last);
      out[i] = Decode<avx512::Simd>::load_scales(
          kKind, static_cast<const uint8_t*>(p.scale) + (row * p.blocks + block) * width);
      if (p.row_scale != nullptr) out[i] = _mm512_mul_ps(out[i], _mm512_set1_ps(p.row_scale[row]));
      out[i] = _mm512_maskz_mov_ps(some, out[i]);
    }
  }
  void load_scales(int64_t first, int64_t last, int64_t block, int64_t count, F* out) const {
    if (last * p.blocks + block + 16 > all_scales) {
      for (int64_t i = 0; i < kRows; ++i) {
        float rest[16] = {0};
        avx512::decode_scales(&p, min64(first + i, last), block, block + min64(count, 16), rest);
        out[i] = _mm512_loadu_ps(rest);
      }
      return;
    }
    switch (p.scale_kind) {
      case kScaleFloat16: return load_scales<kScaleFloat16>(p, first, last, block, first_few(count), out);
      case kScaleBFloat16: return load_scales<kScaleBFloat16>(p, first, last, block, first_few(count), out);
      case kScaleE8M0: return load_scales<kScaleE8M0>(p, first, last, block, first_few(count), out);
      case kScaleE4M3: return load_scales<kScaleE4M3>(p, first, last, block, first_few(count), out);
      case kScaleE5M2: return load_scales<kScaleE5M2>(p, first, last, block, first_few(count), out);
      case kScaleUE4M4: return load_scales<kScaleUE4M4>(p, first, last, block, first_few(count), out);
      default: return load_scales<kScaleFloat32>(p, first, last, block, first_few(count), out);
    }
  }

  // Notes which rows are not ordinary, and returns the ordinary ones.
  __mmask16 see(int64_t tile, F largest) {
    const __mmask16 some = _mm512_cmp_ps_mask(largest, _mm512_setzero_ps(), _CMP_NEQ_UQ);
    const __mmask16 ordinary = _mm512_mask_cmp_ps_mask(some, largest, _mm512_set1_ps(1 / kRangeOfW), _CMP_GE_OQ) &
                               _mm512_cmp_ps_mask(largest, _mm512_set1_ps(kRangeOfW), _CMP_LE_OQ);
    odd[tile] |= some & static_cast<__mmask16>(~ordinary);
    return ordinary;
  }

  // The scales of 16 rows that have one each, and their zero points.
  void fetch_rows(int64_t tile) {
    const int64_t at = row + kRows * tile, last = min64(at + kRows, row + count) - 1;
    const int64_t width = scale_bytes(p.scale_kind);
    F values;
    if (at + kRows <= all_scales) {
      values = Decode<avx512::Simd>::load_scales(p.scale_kind, static_cast<const uint8_t*>(p.scale) + at * width);
      if (p.row_scale != nullptr) values = _mm512_mul_ps(values, _mm512_loadu_ps(p.row_scale + at));
    } else {
      float all[16] = {0};
      for (int64_t i = 0; i <= last - at; ++i) avx512::decode_scales(&p, at + i, 0, 1, all + i);
      values = _mm512_loadu_ps(all);
    }
    see(tile,
        _mm512_mul_ps(_mm512_abs_ps(_mm512_maskz_mov_ps(first_few(last + 1 - at), values)), _mm512_set1_ps(most)));
    factor = _mm512_mul_ps(values, _mm512_set1_ps(integer));
    if (p.zero_point == nullptr) return;
    int32_t all[16] = {0};
    for (int64_t i = 0; i <= last - at; ++i) unpack_zero_points(p, at + i, 0, 1, all + i);
    zero = _mm512_loadu_si512(all);
  }

  // The scales of the blocks of a chunk of 16 rows, as factors of integers. Nothing is loaded that was just stored in
  // smaller pieces: such a load waits for all products before it.
  void fetch(int64_t tile, int64_t part) {
    const Place& place = places[part];
    const int64_t at = row + kRows * tile, last = min64(at + kRows, row + count) - 1, begin = place.first;
    I most_bits = _mm512_setzero_si512();  // of rows
    for (int64_t b = 0; b < place.count; b += 16) {
      F values[16];
      load_scales(at, last, begin + b, place.count - b, values);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kRows; ++i) _mm512_storeu_ps(scales + i * kMostBlocks + b, values[i]);
      for (int64_t i = 0; i < (p.zero_point == nullptr ? 0 : kRows); ++i) {
        float* zero = zeros + i * kMostBlocks + b;
        unpack_zero_points(p, min64(at + i, last), begin + b, begin + min64(b + 16, place.count), zero);
        const F from = _mm512_loadu_ps(zero), above = _mm512_sub_ps(_mm512_set1_ps(reach.high), from),
                below = _mm512_sub_ps(from, _mm512_set1_ps(reach.low));
        // Behind the last block is whatever memory holds.
        values[i] = _mm512_maskz_mul_ps(first_few(place.count - b), values[i], _mm512_max_ps(above, below));
      }
      most_bits = _mm512_max_epu32(most_bits, largest_in_rows(values));
    }
    const F largest = _mm512_mul_ps(_mm512_castsi512_ps(most_bits), _mm512_set1_ps(p.zero_point == nullptr ? most : 1));
    const __mmask16 ordinary = see(tile, largest);
    factor = _mm512_mul_ps(largest, _mm512_set1_ps(1 / largest_of(kSlices)));
    alignas(64) float inverse[16];
    _mm512_store_ps(inverse, _mm512_maskz_div_ps(ordinary, _mm512_set1_ps(largest_of(kSlices)), largest));
    // A block that is far below the largest would keep few bits.
    const F least = _mm512_set1_ps(largest_of(kSlices) / 1024 / most);
    for (int64_t i = 0; i < kRows; ++i)
      for (int64_t b = 0; b < place.count; b += 16) {
        const F one = _mm512_loadu_ps(scales + i * kMostBlocks + b),
                scaled = _mm512_mul_ps(one, _mm512_set1_ps(inverse[i]));
        const __mmask16 real =
            _mm512_cmp_ps_mask(_mm512_abs_ps(one), _mm512_set1_ps(kNoScale), _CMP_GT_OQ) & first_few(place.count - b);
        odd[tile] |= static_cast<uint32_t>(_mm512_mask_cmp_ps_mask(real, _mm512_abs_ps(scaled), least, _CMP_LT_OQ) != 0)
                  << i;
        _mm512_storeu_ps(scales + i * kMostBlocks + b, scaled);
      }
  }

  // The memory that multiplying these codes of 16 rows reads, fetched in the given number of steps.
  Next lines_of(int64_t tile, int64_t first, int64_t last, int64_t steps) const {
    const int64_t at = row + kRows * tile, rows = min64(count - kRows * tile, kRows);
    const int64_t width = scale_bytes(p.scale_kind);
    const int64_t begin = places[first / kSpan].first,
                  end = places[(last - 1) / kSpan].first + places[(last - 1) / kSpan].count;
    Next next;
    if (rows <= 0 || d.kind == kDirect) return next;
    next.codes = {reinterpret_cast<const char*>(p.codes) + at * p.words + first * p.bits / 8,
                  p.words,
                  (last - first) * p.bits / 8,
                  rows,
                  0,
                  0,
                  0};
    next.codes.lines = div_up(div_up(next.codes.bytes, 64) * rows, steps);
    if (!in_blocks()) return next;
    next.scales = {static_cast<const char*>(p.scale) + (at * p.blocks + begin) * width,
                   p.blocks * width,
                   (end - begin) * width,
                   rows,
                   0,
                   0,
                   0};
    next.scales.lines = div_up(div_up(next.scales.bytes, 64) * rows, steps);
    return next;
  }

  // Codes `first` to `last` of 16 rows as tiles: where they are, and how far apart their rows and steps. Segments that
  // are cut short are copied, a byte for each code.
  const uint8_t* decode(int64_t tile, int64_t first, int64_t last, int64_t chunk, int64_t* w_row, int64_t* w_next) {
    const int64_t segment = 512 / p.bits, steps = div_up(last - first, 64), real = min64(count - kRows * tile, kRows);
    Codes a = {p.codes + (row + kRows * tile) * p.words + first * p.bits / 8,
               p.words,
               real - 1,
               steps,
               scales,
               zeros,
               places[chunk / kSpan].block + (first - chunk) / 16,
               decoded};
    const bool direct = first + round_up(last - first, segment) <= p.k;
    if (!direct) {
      const Integers raw = {};
      memset(bytes, 0, kRows * kMostPiece);
      for (int64_t i = 0; i < real; ++i)
        memcpy(bytes + i * kMostPiece, some_codes(p, raw, row + kRows * tile + i, first, last, room), last - first);
      a.from = bytes;
      a.stride = kMostPiece;
    }
    *w_row = 64;
    *w_next = d.w_slices * kTile;
    const int64_t bits = direct ? p.bits : 8;
    switch (d.kind) {
      case kDirect:
        if (!direct || real == kRows) {
          *w_row = a.stride;
          *w_next = 64;
          return a.from;
        }
        for (int64_t step = 0; step < steps; ++step)
          for (int64_t i = 0; i < real; ++i)
            _mm512_store_si512(decoded + step * kTile + 64 * i, _mm512_loadu_si512(a.from + i * a.stride + 64 * step));
        break;
      case kPlain:
        bits == 8   ? decode_plain<8>(a, table)
        : bits == 4 ? decode_plain<4>(a, table)
        : bits == 2 ? decode_plain<2>(a, table)
                    : decode_plain<1>(a, table);
        break;
      case kScaled:
        bits == 8 ? scaled<8>(a) : bits == 4 ? scaled<4>(a) : bits == 2 ? scaled<2>(a) : scaled<1>(a);
        break;
      case kLookUp: odd[tile] |= decode_look_up(p, a, tables); break;
      case kScaledIntegers: decode_integers(p, a); break;
      default: odd[tile] |= decode_floats(p, a);
    }
    return decoded;
  }

  template <int kBits>
  void scaled(const Codes& a) const {
    const int64_t size = p.blocks <= 1 ? 64 : p.block_size;
    if (p.zero_point != nullptr)
      return size % 64 == 0 ? decode_scaled<kBits, 1, true>(a, values) : decode_scaled<kBits, 4, true>(a, values);
    size % 64 == 0   ? decode_scaled<kBits, 1, false>(a, values)
    : size % 32 == 0 ? decode_scaled<kBits, 2, false>(a, values)
                     : decode_scaled<kBits, 4, false>(a, values);
  }
};

}  // namespace
