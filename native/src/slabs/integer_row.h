// One row of x times integers of two to six bits whose codes lie in several bytes, or whose scales are codes, as in
// GGUF's K-quants: rows of the weight are decoded and multiplied in registers, in integers.
//
// x is rounded to 24 or 31 bits, whose bytes are called slices, and codes are multiplied by each (Ozaki's scheme,
// https://arxiv.org/abs/2306.11975). Sums of four products fit in 16 bits, so that integer scales are a second product.
// Sums are exact within a span: one or four planes (64 or 256 numbers) with one float scale of the weight and one of x.
#pragma once

#include "slabs/offsets.h"
#include "slabs/scales.h"
#include "slabs/trellis_slices.h"

#if defined(__AVX512VBMI__)
#include "float/slices.h"

namespace {

struct IntegerRow {
  using S = EQQUANT_ISA::Simd;
  using I = __m512i;
  using F = __m512;
  static constexpr int64_t kRowsOfUnit = 16;
  static constexpr int64_t kLeast = 256;    // the sums of shorter rows have few roundings anyway
  static constexpr int64_t kLongSpan = 4;   // planes of a span, unless it has one
  static constexpr float kRange = 0x1p64f;  // the amax of a span is at most this, and at least its reciprocal
  static constexpr int kMostSlices = 4;

  // Where the parts of packed x of a batch are: the scales of spans, the sums of blocks, and slices of planes.
  struct Detail {
    int64_t planes, span, spans;
    int64_t sums, slices, batch_bytes;
    int32_t zero;  // is subtracted from codes: the code of zero, or with offsets the middle one
    float middle;  // the value of that code, which is added to the offset, times the scale
  };

  // The header of packed x.
  struct alignas(64) Row {
    int64_t slices;  // of an integer: 3 or 4; 0 if its numbers must stay floats. Tests read it
  };

  // Whether a table is integers, each one more than the last, from about zero on.
  static bool has_integers(const float* table, int bits) {
    const float low = table[0];
    return low >= -256 && low <= 256 && low == static_cast<float>(static_cast<int>(low)) && is_consecutive(table, bits);
  }

  static bool accepts(const Problem* problem) {
    const Problem& p = *problem;
    if (p.codec != nullptr || p.m != 1 || p.transpose || p.k < kLeast || p.bits < 2 || p.bits > 6 ||
        p.zero_point != nullptr || p.x_column != 1 || (p.offset != nullptr && p.x_type != kFloat32))
      return false;
    const float low = p.table[0];
    if (!has_integers(p.table, p.bits)) return false;
    if (p.offset == nullptr && (low > 0 || low <= -static_cast<float>(1 << p.bits))) return false;
    if (p.scale_codes == nullptr) return p.blocks <= 1 || p.block_size % kPlane == 0;
    return (p.block_size == 16 || p.block_size == 32) && p.scale_block_size * p.block_size == kLongSpan * kPlane &&
           has_integers(p.scale_table, p.scale_bits) && p.scale_table[0] >= -128 && p.scale_table[0] <= 128;
  }

  static bool accepts_packed(const Problem* p, const Plan* plan, const void* shared) {
    const Detail d = detail_of<Detail>(plan);
    for (int64_t batch = 0; batch < p->batch; ++batch)
      if (row_of(d, shared, batch)->slices == 0) return false;
    return true;
  }

  static const Row* row_of(const Detail& d, const void* shared, int64_t batch) {
    return reinterpret_cast<const Row*>(static_cast<const char*>(shared) + batch * d.batch_bytes);
  }
  static const float* span_scales(const Row* row) { return reinterpret_cast<const float*>(row + 1); }

  // Floats for the scales of a row, with room for the excess of a last vector.
  static int64_t scale_room(const Problem& p, const Detail& d) { return round_up(max64(d.spans, p.blocks), 16) + 16; }

  static int64_t integer_room(const Detail& d) { return round_up(4 * (d.planes + kLongSpan), 32) + 32; }

  static void plan(const Problem* problem, int64_t, Plan* plan) {
    const Problem& p = *problem;
    Detail d;
    d.planes = div_up(p.k, kPlane);
    const bool is_long = p.scale_codes != nullptr || p.blocks <= 1 || p.block_size % (kLongSpan * kPlane) == 0;
    d.span = is_long ? kLongSpan : 1;
    d.spans = div_up(d.planes, d.span);
    d.sums = static_cast<int64_t>(sizeof(Row)) + round_up(4 * d.spans, 64);
    d.slices = d.sums + (p.offset != nullptr ? round_up(4 * p.blocks, 64) : 0);
    d.batch_bytes = d.slices + d.planes * kMostSlices * 2 * 64;
    d.zero = p.offset != nullptr ? 1 << (p.bits - 1) : -static_cast<int32_t>(p.table[0]);
    d.middle = p.table[0] + static_cast<float>(d.zero);
    set_detail(d, plan);
    plan->shared_bytes = p.batch * d.batch_bytes;
    // Scales of spans, offsets, scales of blocks, integer scales and offsets.
    plan->own_bytes = 4 * 3 * scale_room(p, d) + 2 * 2 * integer_room(d);
    plan->parts = p.batch;
    plan->units = p.batch * div_up(p.n, kRowsOfUnit);
  }

  //
  // x
  //

  // Numbers of a span as `kX` slices: of each plane the bytes of a slice, and for each four numbers what `vpdpbusd`
  // starts from, minus their sum times `zero`. Returns whether so many slices are enough.
  template <int kX>
  static bool pack_span(const Problem& p, const Detail& d, int64_t from, int64_t first, int64_t last, F inverse,
                        uint8_t* out) {
    int64_t some = 0, few = 0, hardly_any = 0;
    bool lost = false;
    for (int64_t k = first; k < last; k += kPlane, out += kX * 128) {
      for (int64_t i = 0; i < kPlane; i += 16) {
        const F values = k + i < p.k ? load_some(p.x, p.x_type, from + k + i, first_few(p.k - k - i)) : F{};
        const I numbers = _mm512_cvtps_epi32(_mm512_mul_ps(values, inverse)), sizes = _mm512_abs_epi32(numbers);
        const __mmask16 real = _mm512_cmp_ps_mask(values, _mm512_setzero_ps(), _CMP_NEQ_OQ);
        const auto below = [&](int bound) {
          return __builtin_popcount(_mm512_mask_cmplt_epu32_mask(real, sizes, _mm512_set1_epi32(bound)));
        };
        some += __builtin_popcount(real);
        const int64_t few_of_16 = below(few_bits_of(kX));
        few += few_of_16;
        hardly_any += below(hardly_any_of(kX));
        lost = lost || few_of_16 > 8;  // a row of the weight may multiply only those
        const I slices = fours_in_order(slices_apart(numbers));
        alignas(64) uint8_t bytes[64];
        _mm512_store_si512(bytes, slices);
        for (int slice = 0; slice < kX; ++slice) memcpy(out + 128 * slice + i, bytes + 16 * slice, 16);
      }
      for (int slice = 0; slice < kX; ++slice) {
        const I sums =
            _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), _mm512_loadu_si512(out + 128 * slice));
        _mm512_storeu_si512(out + 128 * slice + 64, _mm512_mullo_epi32(sums, _mm512_set1_epi32(-d.zero)));
      }
    }
    return !lost && few <= some / 8 && hardly_any <= some / 64 + 4;
  }

  template <int kX>
  static bool pack(const Problem& p, const Detail& d, int64_t batch, char* shared) {
    const int64_t from = batch * p.x_batch;
    float* scales = reinterpret_cast<float*>(shared + sizeof(Row));
    uint8_t* slices = reinterpret_cast<uint8_t*>(shared + d.slices);
    for (int64_t i = 0; i < d.spans; ++i) {
      const int64_t first = i * d.span * kPlane, last = min64(first + d.span * kPlane, d.planes * kPlane);
      I most = _mm512_setzero_si512();
      for (int64_t k = first; k < min64(last, p.k); k += 16) {
        most = larger_magnitudes(most, load_some(p.x, p.x_type, from + k, first_few(p.k - k)));
      }
      const float amax = S::from_bits(_mm512_reduce_max_epu32(most));
      if (amax != 0 && !(amax <= kRange && amax >= 1 / kRange)) return false;
      scales[i] = amax / largest_of(kX);
      const F inverse = _mm512_set1_ps(amax == 0 ? 0 : largest_of(kX) / amax);
      if (!pack_span<kX>(p, d, from, first, last, inverse, slices + i * d.span * kX * 128)) return false;
    }
    return true;
  }

  static void prepare(const Problem* problem, const Plan* plan, void* memory, int64_t batch) {
    const Problem& p = *problem;
    const Detail d = detail_of<Detail>(plan);
    char* shared = static_cast<char*>(memory) + batch * d.batch_bytes;
    Row* row = reinterpret_cast<Row*>(shared);
    row->slices = pack<3>(p, d, batch, shared) ? 3 : pack<4>(p, d, batch, shared) ? 4 : 0;
    if (p.offset == nullptr) return;
    memset(shared + d.sums, 0, d.slices - d.sums);
    sums_of_row(problem, batch, 0, reinterpret_cast<float*>(shared + d.sums));
  }

  //
  // The weight
  //

  // The memory of a thread: what a row is multiplied by.
  struct Scales {
    float *of_spans, *offsets, *of_blocks;
    int16_t *integer_scales, *integer_offsets;  // scales and offsets that are codes

    Scales(const Problem& p, const Detail& d, void* own)
        : of_spans(static_cast<float*>(own)), offsets(of_spans + scale_room(p, d)),
          of_blocks(offsets + scale_room(p, d)),
          integer_scales(reinterpret_cast<int16_t*>(of_blocks + scale_room(p, d))),
          integer_offsets(integer_scales + integer_room(d)) {}

    // Of a row: a scale for each span, and integer scales.
    void fetch(const Problem& p, const Detail& d, int64_t row) const {
      if (p.scale_codes == nullptr) {
        EQQUANT_ISA::decode_scales(&p, row, 0, p.blocks, of_blocks);
        const int64_t repeated = p.blocks <= 1 ? d.spans : p.block_size / (d.span * kPlane);
        for (int64_t block = 0, span = 0; block < p.blocks; ++block)
          for (int64_t i = 0; i < repeated && span < d.spans; ++i) of_spans[span++] = of_blocks[block];
        return;
      }
      decode_nested(p, p.scale, p.row_scale, row, of_spans);
      unpack_integers(p, d, p.scale_codes, row, integer_scales);
    }

    // Scales of scales of a row, one for each span, and a zero, as padding.
    static void decode_nested(const Problem& p, const void* scale, const float* row_scale, int64_t row, float* out) {
      Problem q = p;
      q.blocks = p.scale_blocks;
      q.scale = scale;
      q.row_scale = row_scale;
      EQQUANT_ISA::decode_scales(&q, row, 0, p.scale_blocks, out);
      out[p.scale_blocks] = 0;
    }

    // Scales or offsets that are codes, as the integers that they stand for.
    static void unpack_integers(const Problem& p, const Detail& d, const uint8_t* codes, int64_t row, int16_t* out) {
      const uint8_t *packed = codes + row * p.scale_words, *limit = codes + rows_of(p) * p.scale_words;
      const int low = static_cast<int>(p.scale_table[0]);
      for (int64_t first = 0; first < p.blocks; first += kMostCodes) {
        const int64_t count = min64(kMostCodes, p.blocks - first);
        uint8_t some[2 * kMostCodes + kPlane];
        const uint8_t* bytes = some_of(packed, limit, p.blocks, p.scale_bits, first, first + count, some);
        for (int64_t i = 0; i < count; ++i) out[first + i] = static_cast<int16_t>(bytes[i] + low);
      }
      for (int64_t i = p.blocks; i < round_up(d.spans * kLongSpan * (kPlane / p.block_size), 16); ++i) out[i] = 0;
    }

    // The product of the offsets of a row and the sums of x.
    float multiply_offsets(const Problem& p, const Detail& d, int64_t row, const float* sums) const {
      if (p.scale_codes == nullptr) {
        scales_of_rows(&p, true, true, row, 1, 0, p.blocks, offsets, nullptr);
        add_multiple(of_blocks, p.blocks, d.middle, offsets);
        float result;
        multiply_sums<1>(&offsets, sums, p.blocks, &result);
        return result;
      }
      decode_nested(p, p.offset, nullptr, row, offsets);
      unpack_integers(p, d, p.offset_codes, row, integer_offsets);
      const int64_t in_span = kLongSpan * kPlane / p.block_size, step = 16 / in_span;  // spans that 16 blocks fill
      const I places =
          in_span == 16 ? _mm512_setzero_si512() : _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
      const auto load = [](const int16_t* from) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
      };
      F sum = _mm512_setzero_ps();
      for (int64_t block = 0, span = 0; block < p.blocks; block += 16, span += step) {
        const F scale = _mm512_permutexvar_ps(places, _mm512_loadu_ps(of_spans + span)),
                of_offset = _mm512_permutexvar_ps(places, _mm512_loadu_ps(offsets + span));
        const F some = _mm512_mul_ps(load(integer_scales + block), _mm512_mul_ps(scale, _mm512_set1_ps(d.middle)));
        sum = _mm512_fmadd_ps(_mm512_fmadd_ps(load(integer_offsets + block), of_offset, some),
                              _mm512_loadu_ps(sums + block), sum);
      }
      return _mm512_reduce_add_ps(sum);
    }
  };

  // The sums of a span, and the total of the row so far.
  template <int kX>
  struct Sums {
    I slices[kX];
    F total;

    EQQ_INLINE void clear(Sums& a) {
      for (int i = 0; i < kX; ++i) a.slices[i] = _mm512_setzero_si512();
    }
    EQQ_INLINE void end_span(Sums& a, float scale, float of_x) {
      F sum = _mm512_cvtepi32_ps(a.slices[kX - 1]);
#pragma GCC unroll 4
      for (int i = kX - 2; i >= 0; --i)
        sum = _mm512_fmadd_ps(sum, _mm512_set1_ps(256), _mm512_cvtepi32_ps(a.slices[i]));
      a.total = _mm512_fmadd_ps(_mm512_mul_ps(sum, _mm512_set1_ps(of_x)), _mm512_set1_ps(scale), a.total);
      clear(a);
    }
  };

  // A plane of codes. `scales` has an integer in the lower half of each lane, if `kScales`.
  template <int kX, bool kScales>
  EQQ_INLINE void multiply_plane(I codes, I scales, const uint8_t* x, Sums<kX>& a) {
#pragma GCC unroll 4
    for (int i = 0; i < kX; ++i) {
      const I bytes = _mm512_loadu_si512(x + 128 * i), start = _mm512_loadu_si512(x + 128 * i + 64);
      a.slices[i] = kScales ? _mm512_dpwssd_epi32(a.slices[i], _mm512_dpbusd_epi32(start, codes, bytes), scales)
                            : _mm512_dpbusd_epi32(_mm512_add_epi32(a.slices[i], start), codes, bytes);
    }
  }

  // Which integer scale the lower half of each lane takes, of `count` in a plane. Upper halves take element 31, a zero.
  static I places_of(int64_t plane, int64_t count) {
    alignas(64) int16_t places[32];
    for (int64_t lane = 0; lane < 16; ++lane) {
      places[2 * lane] = static_cast<int16_t>(plane * count + lane * count / 16);
      places[2 * lane + 1] = 31;
    }
    return _mm512_load_si512(places);
  }

  // `kPerPlane`: integer scales of a plane, or 0.
  template <int kBits, int kX, int kPerPlane, int64_t kSpan>
  static void multiply_rows(const Problem& p, const Detail& d, int64_t row, int64_t count, const Row* packed, void* own,
                            float* out) {
    constexpr int64_t kInSegment = 8 / (kBits & -kBits), kSize = kInSegment * 8 * kBits;
    constexpr int64_t kChunk = kInSegment > kSpan ? kInSegment : kSpan;
    const Scales scales(p, d, own);
    const uint8_t* const limit = p.codes + rows_of(p) * p.words;
    const uint8_t* const slices = reinterpret_cast<const uint8_t*>(packed) + d.slices;
    const float* const sums = reinterpret_cast<const float*>(reinterpret_cast<const char*>(packed) + d.sums);
    I places[kLongSpan];
    for (int64_t i = 0; i < kLongSpan; ++i) places[i] = places_of(i, kPerPlane);
    for (int64_t r = 0; r < count; ++r) {
      scales.fetch(p, d, row + r);
      const uint8_t *bytes = p.codes + (row + r) * p.words, *x = slices;
      const int16_t* integers = scales.integer_scales;
      const float *scale = scales.of_spans, *of_x = span_scales(packed);
      Sums<kX> a;
      a.total = _mm512_setzero_ps();
      Sums<kX>::clear(a);
      const auto load_integers = [&]() __attribute__((always_inline)) {
        const I some =
            kPerPlane == 4   ? _mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(integers)))
            : kPerPlane == 2 ? _mm512_zextsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(integers)))
                             : _mm512_setzero_si512();
        integers += kPerPlane * kLongSpan;
        return some;
      };
      I some = _mm512_setzero_si512();
      int64_t left = p.k;
      for (; left >= kChunk * kPlane; left -= kChunk * kPlane, bytes += kChunk / kInSegment * kSize) {
        for (int64_t line = 0; line < kChunk / kInSegment * kSize; line += 64) S::prefetch(bytes + line + kAhead);
#pragma GCC unroll 8
        for (int64_t i = 0; i < kChunk; ++i, x += 128 * kX) {
          if (i % kSpan == 0) some = load_integers();
          const Segment codes = unpack_plane<kBits>(bytes + i / kInSegment * kSize, i % kInSegment);
          I all;
          memcpy(&all, &codes, sizeof all);
          multiply_plane<kX, kPerPlane != 0>(all, _mm512_permutexvar_epi16(places[i % kSpan], some), x, a);
          if (i % kSpan == kSpan - 1) Sums<kX>::end_span(a, *scale++, *of_x++);
        }
      }
      if (left > 0) {
        uint8_t rest[kMostCodes + 2 * kPlane] = {0};
        unpack_rows<kBits>(bytes, limit, left, 0, left, 1, rest, 0);
        for (int64_t i = 0; i * kPlane < left; ++i, x += 128 * kX) {
          if (i % kSpan == 0) some = load_integers();
          multiply_plane<kX, kPerPlane != 0>(_mm512_loadu_si512(rest + i * kPlane),
                                             _mm512_permutexvar_epi16(places[i % kSpan], some), x, a);
          if (i % kSpan == kSpan - 1 || (i + 1) * kPlane >= left) Sums<kX>::end_span(a, *scale++, *of_x++);
        }
      }
      out[r] = _mm512_reduce_add_ps(a.total);
      if (p.offset != nullptr) out[r] += scales.multiply_offsets(p, d, row + r, sums);
    }
  }

  static void run(const Problem* problem, const Plan* plan, const void* shared, void* own, int64_t unit) {
    const Problem& p = *problem;
    const Detail d = detail_of<Detail>(plan);
    const int64_t units = div_up(p.n, kRowsOfUnit), batch = unit / units, first = unit % units * kRowsOfUnit;
    const int64_t count = min64(kRowsOfUnit, p.n - first);
    const Row* packed = row_of(d, shared, batch);
    float results[kRowsOfUnit];
    by_count<6, 2>(p.bits, [&](auto bits) {
      by_count<4, 3>(packed->slices, [&](auto slices) {
        constexpr int kBits = decltype(bits)::value, kX = decltype(slices)::value;
        const auto multiply =
            p.scale_codes == nullptr
                ? (d.span == 1 ? multiply_rows<kBits, kX, 0, 1> : multiply_rows<kBits, kX, 0, kLongSpan>)
            : p.block_size == 16 ? multiply_rows<kBits, kX, 4, kLongSpan>
                                 : multiply_rows<kBits, kX, 2, kLongSpan>;
        multiply(p, d, first_row(&p, batch) + first, count, packed, own, results);
      });
    });
    using A = Arrays<S>;
    for (int64_t r = 0; r < count; ++r) A::write(p, batch * p.y_batch + (first + r) * p.y_column, results[r]);
  }
};

constexpr MatmulKernel kIntegerRow = {IntegerRow::plan,    IntegerRow::prepare,        IntegerRow::run,
                                      IntegerRow::accepts, IntegerRow::accepts_packed, kPackedTrellis};

}  // namespace

#endif
