// One row of x times integers of two to six bits: rows of the weight are decoded and multiplied in registers, in
// integers. With AVX-512 only if codes span bytes, blocks have offsets, or scales are codes, as in GGUF's K-quants:
// other weights are as fast in floats.
//
// x is rounded to 24 or 31 bits, whose bytes are called slices, and codes are multiplied by each (Ozaki's scheme,
// https://arxiv.org/abs/2306.11975). Quantized activations are one slice. Sums of four products fit in 16 bits, so that
// integer scales are a second product. Sums are exact within a span: one or four planes (64 or 256 numbers) with one
// float scale of the weight and one of x. Zero points are offsets, which are multiplied by sums of
// blocks of x.
#pragma once

#include "float/arrays.h"
#include "int8/x.h"
#include "slabs/offsets.h"
#include "slabs/scales.h"
#include "slabs/trellis_slices.h"

#if defined(__AVX512VBMI__) || (defined(__AVX2__) && !defined(__AVX512F__))
#include "core/slices.h"
#if defined(__AVX512VBMI__)
#include "slabs/row_registers_avx512.h"
#else
#include "slabs/row_registers_avx2.h"
#endif

namespace {

struct IntegerRow {
  using S = EQQUANT_ISA::Simd;
  using R = RowRegisters;
  static constexpr int64_t kRowsOfUnit = 16;
  static constexpr int64_t kLeast = 256;    // the sums of shorter rows have few roundings anyway
  static constexpr int64_t kLongSpan = 4;   // planes of a span with more than one
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
    int64_t slices;  // of an integer: 1, 3 or 4; 0 if its numbers must stay floats. Tests read it
  };

  // Whether a table is integers, each one more than the last, from about zero on.
  static bool has_integers(const float* table, int bits) {
    const float low = table[0];
    return low >= -256 && low <= 256 && low == static_cast<float>(static_cast<int>(low)) && is_consecutive(table, bits);
  }

  // Whether each half of a plane has a float scale.
  static bool has_halves(const Problem& p) {
    return p.scale_codes == nullptr && p.blocks > 1 && p.block_size == kPlane / 2;
  }

  static bool has_offsets(const Problem& p) { return p.offset != nullptr || p.zero_point != nullptr; }

  // Whether the kernels of floats are as fast for a weight.
  static bool is_plain(const Problem& p) {
    return !is_split(p.bits) && p.scale_codes == nullptr && p.offset == nullptr;
  }

  static bool accepts(const Problem* p) {
    return accepts_weight(*p) && p->k >= kLeast && p->x_column == 1 && !(has_offsets(*p) && p->x_type != kFloat32) &&
           (R::kPlain || !is_plain(*p));
  }
  // For quantized x. The sum of a block must stay an integer: so it is no longer than a span, and has no zero point.
  static bool accepts_int8(const Int8Problem* problem) {
    const Problem& p = problem->p;
    return accepts_weight(p) && !problem->affine && !is_plain(p) && p.zero_point == nullptr && p.blocks > 1 &&
           p.block_size <= kLongSpan * kPlane;
  }

  static bool accepts_weight(const Problem& p) {
    if (p.codec != nullptr || p.m != 1 || p.transpose || p.bits < 2 || p.bits > 6) return false;
    const float low = p.table[0];
    if (!has_integers(p.table, p.bits)) return false;
    if (!has_offsets(p) && (low > 0 || low <= -static_cast<float>(1 << p.bits))) return false;
    if (p.scale_codes == nullptr) return p.blocks <= 1 || p.block_size % kPlane == 0 || has_halves(p);
    if (p.zero_point != nullptr) return false;
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
    d.slices = d.sums + (has_offsets(p) ? round_up(4 * p.blocks, 64) : 0);
    d.batch_bytes = d.slices + d.planes * kMostSlices * 2 * 64;
    d.zero = has_offsets(p) ? 1 << (p.bits - 1) : -static_cast<int32_t>(p.table[0]);
    d.middle = p.table[0] + static_cast<float>(d.zero);
    set_detail(d, plan);
    plan->shared_bytes = p.batch * d.batch_bytes;
    // Scales and offsets of rows, scales of spans, integer scales and offsets.
    plan->own_bytes = 4 * (2 * kRowsOfUnit + 1) * scale_room(p, d) + 2 * 2 * integer_room(d);
    plan->parts = p.batch;
    plan->units = p.batch * div_up(p.n, kRowsOfUnit);
  }

  //
  // x
  //

  // Sixty-four numbers of x, from element `at` on, of which `count` are real.
  static void read_plane(const Problem& p, int64_t at, int64_t count, float* out) {
    using A = Arrays<S>;
    count = min64(count, kPlane);
    for (int64_t i = count; i < kPlane; ++i) out[i] = 0;
    if (p.x_type == kFloat32) {
      memcpy(out, static_cast<const float*>(p.x) + at, 4 * count);
    } else if (p.x_type == kBFloat16) {
      for (int64_t i = 0; i < count; ++i) out[i] = A::template read<kBFloat16>(p.x, at + i);
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] = A::template read<kFloat16>(p.x, at + i);
    }
  }

  // Writes the numbers of a span as `kX` slices: of each plane and slice its 64 bytes, and then the sums of each
  // `kTogether` bytes times -`zero`, to which products with unsigned codes are added. Returns whether so many slices
  // are enough.
  template <int kX>
  static bool pack_span(const Problem& p, const Detail& d, int64_t from, int64_t first, int64_t last, float inverse,
                        uint8_t* out) {
    constexpr uint32_t kFlip = 0x80808080;  // a carry makes signed bytes of unsigned ones
    int some = 0, few = 0, hardly_any = 0;
    bool lost = false;
    for (int64_t k = first; k < last; k += kPlane, out += kX * 128) {
      float values[kPlane];
      uint32_t numbers[kPlane];
      read_plane(p, from + k, p.k - k, values);
      for (int part = 0; part < kPlane; part += 16) {
        int few_of_16 = 0;
        for (int i = part; i < part + 16; ++i) {
          const int32_t number = static_cast<int32_t>(__builtin_rintf(values[i] * inverse));
          const int32_t size = number < 0 ? -number : number;
          const bool real = values[i] != 0;
          some += real;
          few_of_16 += real && size < few_bits_of(kX);
          hardly_any += real && size < hardly_any_of(kX);
          numbers[i] = (static_cast<uint32_t>(number) + kFlip) ^ kFlip;
        }
        few += few_of_16;
        lost = lost || few_of_16 > 8;  // a row of the weight may multiply only those
      }
      for (int slice = 0; slice < kX; ++slice) {
        int8_t bytes[kPlane];
        for (int i = 0; i < kPlane; ++i) bytes[i] = static_cast<int8_t>(numbers[i] >> 8 * slice);
        write_plane(d, bytes, out + 128 * slice);
      }
    }
    return !lost && few <= some / 8 && hardly_any <= some / 64 + 4;
  }

  static void write_plane(const Detail& d, const int8_t* bytes, uint8_t* out) {
    typename R::Start starts[kPlane / R::kTogether];
    for (int i = 0; i < kPlane / R::kTogether; ++i) {
      int32_t sum = 0;
      for (int j = 0; j < R::kTogether; ++j) sum += bytes[R::kTogether * i + j];
      starts[i] = static_cast<typename R::Start>(-d.zero * sum);
    }
    memcpy(out, bytes, 64);
    memcpy(out + 64, starts, 64);
  }

  template <int kX>
  static bool pack(const Problem& p, const Detail& d, int64_t batch, char* shared) {
    const int64_t from = batch * p.x_batch;
    float* scales = reinterpret_cast<float*>(shared + sizeof(Row));
    uint8_t* slices = reinterpret_cast<uint8_t*>(shared + d.slices);
    for (int64_t i = 0; i < d.spans; ++i) {
      const int64_t first = i * d.span * kPlane, last = min64(first + d.span * kPlane, d.planes * kPlane);
      uint32_t most = 0;  // magnitudes, as bits, are in their order, and NaN is the largest
      for (int64_t k = first; k < last; k += kPlane) {
        float values[kPlane];
        read_plane(p, from + k, p.k - k, values);
        for (int j = 0; j < kPlane; ++j) {
          const uint32_t magnitude = S::to_bits(values[j]) & 0x7fffffff;
          most = magnitude > most ? magnitude : most;
        }
      }
      const float amax = S::from_bits(most);
      if (amax != 0 && !(amax <= kRange && amax >= 1 / kRange)) return false;
      scales[i] = amax / largest_of(kX);
      const float inverse = amax == 0 ? 0 : largest_of(kX) / amax;
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
    if (!has_offsets(p)) return;
    memset(shared + d.sums, 0, d.slices - d.sums);
    sums_of_row(problem, batch, 0, reinterpret_cast<float*>(shared + d.sums));
  }

  // The codes of quantized activations are one slice.
  static void prepare_int8(const Int8Problem* problem, const Plan* plan, void* memory, int64_t batch) {
    using X = Int8X<S>;
    const Problem& p = problem->p;
    const Detail d = detail_of<Detail>(plan);
    char* shared = static_cast<char*>(memory) + batch * d.batch_bytes;
    reinterpret_cast<Row*>(shared)->slices = 1;
    const typename X::Row row = X::row_at(*problem, batch, batch * p.x_batch);
    float* scales = reinterpret_cast<float*>(shared + sizeof(Row));
    float* sums = reinterpret_cast<float*>(shared + d.sums);
    for (int64_t i = 0; i < d.spans; ++i) scales[i] = row.scale;
    memset(sums, 0, d.slices - d.sums);
    int32_t sum = 0;  // of a block, which is a multiple of 16
    for (int64_t k = 0; k < d.planes * kPlane; k += kPlane) {
      int8_t codes[kPlane] = {0};
      X::read_codes(*problem, batch * p.x_batch + k * p.x_column, min64(p.k - k, kPlane), row, codes);
      write_plane(d, codes, reinterpret_cast<uint8_t*>(shared + d.slices + 2 * k));
      for (int64_t i = k; has_offsets(p) && i < min64(k + kPlane, p.k); i += 16) {
        for (int j = 0; j < 16; ++j) sum += codes[i - k + j];
        sums[i / p.block_size] = static_cast<float>(sum) * row.scale;
        if ((i + 16) % p.block_size == 0) sum = 0;
      }
    }
  }

  //
  // The weight
  //

  // GCC converts integers of a loop one by one, but not those of a vector.
  typedef float EightFloats __attribute__((vector_size(32)));
  EQQ_INLINE EightFloats eight_floats(const int16_t* integers) {
    typedef int16_t Short __attribute__((vector_size(16)));
    typedef int32_t Long __attribute__((vector_size(32)));
    return __builtin_convertvector(__builtin_convertvector(load_vector<Short>(integers), Long), EightFloats);
  }

  // The memory of a thread: scales and offsets of the rows of a unit, decoded together: faster than row by row.
  struct Scales {
    const Problem& p;
    const Detail& d;
    const int64_t first, count;  // rows
    float *blocks, *offsets;     // of the rows; with integer scales, the scales of scales and of offsets
    float* of_spans;             // of one row
    int16_t *integer_scales, *integer_offsets;
    const float* scale;  // `blocks`, or where they are stored

    Scales(const Problem& problem, const Detail& detail, int64_t row, int64_t rows, void* own)
        : p(problem), d(detail), first(row), count(rows), blocks(static_cast<float*>(own)),
          offsets(blocks + kRowsOfUnit * scale_room(p, d)), of_spans(offsets + kRowsOfUnit * scale_room(p, d)),
          integer_scales(reinterpret_cast<int16_t*>(of_spans + scale_room(p, d))),
          integer_offsets(integer_scales + integer_room(d)), scale(blocks) {
      if (p.scale_kind == kScaleFloat32 && p.row_scale == nullptr) {
        scale = static_cast<const float*>(p.scale) + first * of_row();
      } else {
        decode(p.scale, p.row_scale, blocks);
      }
      if (p.offset != nullptr) decode(p.offset, nullptr, offsets);
      if (p.offset != nullptr && p.scale_codes == nullptr) add_multiple(scale, count * p.blocks, d.middle, offsets);
      const uint8_t *zeros = p.zero_point, *limit = zeros + rows_of(p) * p.zero_words;
      for (int64_t r = 0; zeros != nullptr && r < count; ++r)
        each_code(zeros + (first + r) * p.zero_words, limit, p.bits, [&](int64_t i, uint8_t code) {
          offsets[r * p.blocks + i] = (d.middle - static_cast<float>(code)) * scale[r * p.blocks + i];
        });
    }

    // Calls `f` with the code of each block of a row.
    template <typename F>
    void each_code(const uint8_t* packed, const uint8_t* limit, int bits, const F& f) const {
      for (int64_t at = 0; at < p.blocks; at += kMostCodes) {
        const int64_t some = min64(kMostCodes, p.blocks - at);
        uint8_t room[2 * kMostCodes + kPlane];
        const uint8_t* codes = some_of(packed, limit, p.blocks, bits, at, at + some, room);
        for (int64_t i = 0; i < some; ++i) f(at + i, codes[i]);
      }
    }

    // Floats of a row of scales.
    int64_t of_row() const { return p.scale_codes != nullptr ? p.scale_blocks : p.blocks; }

    void decode(const void* bits, const float* row_scale, float* out) const {
      Problem q = p;
      q.blocks = of_row();
      q.scale = bits;
      q.row_scale = row_scale;
      if (row_scale == nullptr) return EQQUANT_ISA::decode_scales(&q, first, 0, count * q.blocks, out);
      for (int64_t r = 0; r < count; ++r) EQQUANT_ISA::decode_scales(&q, first + r, 0, q.blocks, out + r * q.blocks);
    }

    // Returns the scales of the spans of row `r` of the unit. Unpacks its integer scales.
    const float* fetch(int64_t r) const {
      const float* of_blocks = scale + r * of_row();
      if (p.scale_codes != nullptr) {
        unpack_integers(p.scale_codes, r, integer_scales);
        return of_blocks;
      }
      const bool halves = has_halves(p);
      if (p.blocks == (halves ? 2 * d.spans : d.spans)) return of_blocks;
      if (halves) {  // an odd number of them
        memcpy(of_spans, of_blocks, 4 * p.blocks);
        of_spans[p.blocks] = 0;
        return of_spans;
      }
      const int64_t repeated = p.blocks <= 1 ? d.spans : p.block_size / (d.span * kPlane);
      for (int64_t block = 0, span = 0; block < p.blocks; ++block)
        for (int64_t i = 0; i < repeated && span < d.spans; ++i) of_spans[span++] = of_blocks[block];
      return of_spans;
    }

    // Scales or offsets that are codes, as the integers that they stand for.
    void unpack_integers(const uint8_t* codes, int64_t r, int16_t* out) const {
      const int low = static_cast<int>(p.scale_table[0]);
      each_code(codes + (first + r) * p.scale_words, codes + rows_of(p) * p.scale_words, p.scale_bits,
                [&](int64_t i, uint8_t code) { out[i] = static_cast<int16_t>(code + low); });
      for (int64_t i = p.blocks; i < round_up(d.spans * kLongSpan * (kPlane / p.block_size), 16); ++i) out[i] = 0;
    }

    // Adds the products of float offsets of the rows and the sums of x.
    void add_offsets(const float* sums, float* out) const {
      if (!has_offsets(p) || p.scale_codes != nullptr) return;
      Problem q = p;
      q.n = count;
      q.y = out;
      q.y_column = 1;
      add_products(&q, offsets, sums);
    }

    // The product of offsets that are codes, of the row that was fetched last.
    float multiply_offsets(int64_t r, const float* sums) const {
      if (p.offset_codes == nullptr) return 0;
      unpack_integers(p.offset_codes, r, integer_offsets);
      const int64_t in_span = kLongSpan * kPlane / p.block_size;  // 8 or 16
      EightFloats total = {};
      for (int64_t block = 0; block < p.blocks; block += 8) {  // beyond the last block sums are zero
        const int64_t span = r * p.scale_blocks + block / in_span;
        total += (eight_floats(integer_scales + block) * (scale[span] * d.middle) +
                  eight_floats(integer_offsets + block) * offsets[span]) *
                 load_vector<EightFloats>(sums + block);
      }
      return reduce_vector<float, 8>(total, [](auto a, auto b) __attribute__((always_inline)) { return a + b; });
    }
  };

  // `kPerPlane`: integer scales of a plane, or 0. `kHalf`: whether its halves have float scales.
  template <int kBits, int kX, int kPerPlane, int64_t kSpan, bool kHalf = false>
  static void multiply_rows(const Problem& p, const Detail& d, int64_t row, int64_t count, const Row* packed, void* own,
                            float* out) {
    using Sums = typename R::template Sums<kX, kPerPlane, kHalf>;
    constexpr int64_t kInSegment = 8 / (kBits & -kBits), kSize = kInSegment * 8 * kBits;
    constexpr int64_t kChunk = kInSegment > kSpan ? kInSegment : kSpan;
    const Scales scales(p, d, row, count, own);
    const uint8_t* const limit = p.codes + rows_of(p) * p.words;
    const uint8_t* const slices = reinterpret_cast<const uint8_t*>(packed) + d.slices;
    const float* const sums = reinterpret_cast<const float*>(reinterpret_cast<const char*>(packed) + d.sums);
    const R registers = R::template make<kPerPlane>();
    uint8_t rest[kMostCodes + 2 * kPlane] = {0};
    for (int64_t r = 0; r < count; ++r) {
      const float *scale = scales.fetch(r), *of_x = span_scales(packed);
      const uint8_t *bytes = p.codes + (row + r) * p.words, *x = slices;
      const int16_t* integers = scales.integer_scales;
      Sums a;
      Sums::begin(a);
      typename R::Integers some = R::template load_integers<kPerPlane>(integers);
      const auto multiply = [&](typename R::Codes codes, int64_t plane, bool ends) __attribute__((always_inline)) {
        if (plane % kSpan == 0) {
          some = R::template load_integers<kPerPlane>(integers);
          integers += kPerPlane * kLongSpan;
        }
        Sums::add(a, registers, codes, some, plane % kSpan, x);
        x += 128 * kX;
        if (!ends) return;
        Sums::end_span(a, scale, *of_x++);
        scale += kHalf ? 2 : 1;
      };
      int64_t left = p.k;
      for (; left >= kChunk * kPlane; left -= kChunk * kPlane, bytes += kChunk / kInSegment * kSize) {
        for (int64_t line = 0; line < kChunk / kInSegment * kSize; line += 64) S::prefetch(bytes + line + kAhead);
#pragma GCC unroll 8
        for (int64_t i = 0; i < kChunk; ++i)
          multiply(R::template codes_of_plane<kBits>(bytes + i / kInSegment * kSize, i % kInSegment), i,
                   i % kSpan == kSpan - 1);
      }
      if (left > 0) {
        unpack_rows<kBits>(bytes, limit, left, 0, left, 1, rest, 0);
        for (int64_t i = 0; i * kPlane < left; ++i)
          multiply(R::load_codes(rest + i * kPlane), i, i % kSpan == kSpan - 1 || (i + 1) * kPlane >= left);
      }
      out[r] = Sums::sum(a) + scales.multiply_offsets(r, sums);
    }
    scales.add_offsets(sums, out);
  }

  static void run(const Problem* problem, const Plan* plan, const void* shared, void* own, int64_t unit) {
    const Problem& p = *problem;
    const Detail d = detail_of<Detail>(plan);
    const int64_t units = div_up(p.n, kRowsOfUnit), batch = unit / units, first = unit % units * kRowsOfUnit;
    const int64_t count = min64(kRowsOfUnit, p.n - first);
    const Row* packed = row_of(d, shared, batch);
    float results[kRowsOfUnit];
    by_count<6, 2>(p.bits, [&](auto bits) {
      const auto with_slices = [&](auto slices) {
        constexpr int kBits = decltype(bits)::value, kX = decltype(slices)::value;
        auto multiply = p.scale_codes == nullptr
                          ? (d.span == 1 ? multiply_rows<kBits, kX, 0, 1> : multiply_rows<kBits, kX, 0, kLongSpan>)
                      : p.block_size == 16 ? multiply_rows<kBits, kX, 4, kLongSpan>
                                           : multiply_rows<kBits, kX, 2, kLongSpan>;
        if (has_halves(p)) multiply = multiply_rows<kBits, kX, 0, 1, true>;
        multiply(p, d, first_row(&p, batch) + first, count, packed, own, results);
      };
      packed->slices == 1 ? with_slices(Count<1>()) : by_count<4, 3>(packed->slices, with_slices);
    });
    using A = Arrays<S>;
    for (int64_t r = 0; r < count; ++r) A::write(p, batch * p.y_batch + (first + r) * p.y_column, results[r]);
  }
};

constexpr MatmulKernel kIntegerRow = {IntegerRow::plan,    IntegerRow::prepare,        IntegerRow::run,
                                      IntegerRow::accepts, IntegerRow::accepts_packed, kPackedTrellis};

constexpr const MatmulKernel* kOneRow = &kIntegerRow;

void plan_int8(const Int8Problem* problem, int64_t threads, Plan* plan) {
  IntegerRow::plan(&problem->p, threads, plan);
}
void run_int8(const Int8Problem* problem, const Plan* plan, const void* shared, void* own, int64_t unit) {
  IntegerRow::run(&problem->p, plan, shared, own, unit);
}
constexpr Int8Kernel kIntegerRowInt8 = {plan_int8, IntegerRow::prepare_int8, run_int8, IntegerRow::accepts_int8};
constexpr const Int8Kernel* kOneRowInt8 = &kIntegerRowInt8;

}  // namespace

#else

namespace {

constexpr const MatmulKernel* kOneRow = kPackedTrellis;
constexpr const Int8Kernel* kOneRowInt8 = nullptr;

}  // namespace

#endif
