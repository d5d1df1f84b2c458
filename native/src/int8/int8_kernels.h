// The product of integers, once for all instruction sets: templates over `V`, a struct of vector operations.
//
// `V` has
//   L                      lanes of a vector of 32-bit integers `I`, and of one of floats `F`
//   kGroup                 codes that one lane multiplies: four as bytes, or two as 16-bit integers
//   kTileRows              rows of the weight in a tile of results of two vectors
//   kDotRows, kFewRows     rows that few rows of `x` meet at a time; up to how many these are
//   dot(acc, w, x)         acc + the products of the groups of each lane, exactly
//   load, store, zero, spread, add, mul, sum            of integers
//   load_f, store_f, zero_f, spread_f, add_f, fma, sum_f, to_f   of floats
//   lanes(p, n), lanes_f   n = 2 or 4 values, each in its share of the lanes; where a vector has more than 16 codes
//   word(p)                four bytes in every lane
//   scales                 `decode_scales_*` of `isa.h`
//   from_half, to_half
//   kPacks                 whether it packs `L` rows of `x`, and writes squares of results, by vectors of its own:
//   `pack`, `put` kInRegisters           whether one row of `x` meets codes that are decoded in registers; for that
//   kRegisterRows          rows of the weight that it meets at a time: eight hide the latency of a block's sum
//   load_some(p, n)        the first n bytes, and zeros;  codes<bits>(bytes, plane), lookup(table, codes)   of bytes
//
// With groups of four, bytes of the weight are without a sign, and those of `x` have one: the weight's codes are
// multiplied as they are in memory. What each code is off, `lowest - zero_point`, is corrected by sums of `x`: where
// sums of a run begin. So results are those of integers, to the bit. With groups of two the weight's values are exact.
#ifndef EQQUANT_INT8_KERNELS_H_
#define EQQUANT_INT8_KERNELS_H_

#include "core/runs.h"
#include "int8/int8.h"

namespace {

constexpr int64_t kUnitRows = 48;       // of the weight in a unit, at most
constexpr int64_t kInt8RowBlock = 256;  // rows of `x` for which decoded rows are used
constexpr int64_t kAhead = 2048;        // bytes of the weight: what is fetched before it is needed
constexpr int64_t kNear = 4096;         // bytes ahead that have room in L1
constexpr int64_t kLargeRun = 512;      // codes of a run, from which on its lanes are added up as integers

// One or two panels of as many rows of `x` as a vector has lanes, a tile of rows of the weight, and one step.
struct Panel {
  const uint8_t* w;  // rows of bytes, `w_row` apart
  int64_t w_row;
  const uint8_t* x;     // groups of each row of `x`, one after the other
  int64_t x_panel;      // bytes of a panel
  const uint8_t* next;  // the same bytes of the next tile, which are fetched; or null
  int64_t next_row;     // bytes from one of its rows to the next
  int64_t bits;         // of a code
  Step step;
  const int32_t* sums_x;  // of the lanes for each run, runs `sums_stride` apart
  int64_t sums_stride;
  const int32_t* offset;   // what codes are off, for rows and runs: null if it is in `sums_x`
  const int32_t* shift;    // what codes of the lanes are too much; null without zero points of x
  const int32_t* weights;  // for rows and runs: sums of the weight in this step
  const float* scale;      // for rows and runs, `kRunRoom` apart
  float* sums;             // results so far, a row of the tile after the other
  int32_t* partial;        // those of runs that have not ended, likewise
};

constexpr int64_t kRunRoom = kStep / 16 + 16;

template <class V>
struct Int8Kernels {
  using I = typename V::I;
  using F = typename V::F;
  static constexpr int L = V::L;
  static constexpr int64_t kBytes = 4 / V::kGroup;  // of a code
  static constexpr int64_t kCodes = L * V::kGroup;  // of a vector
  static constexpr bool kCorrects = V::kGroup == 4;

  enum { kFewMethod = 0, kPanelMethod = 1 };

  struct Detail {
    int64_t method;
    int64_t rows, chunks, row_blocks;
    int64_t m_padded;
    int64_t panels;                        // parts of the preparation of one batch
    int64_t sums, lanes, x;                // where they are in shared memory: sums of runs, of lanes, and codes
    int64_t scale_at, partial_at, sum_at;  // likewise in the memory of a thread
  };

  // Codes of a row of packed `x`.
  EQQ_INLINE int64_t row_codes(const Runs& r) { return round_up(max64(r.padded, 1), 64); }
  EQQ_INLINE bool by_lanes(const Runs& r) { return r.size < kLargeRun && r.count > 1; }
  // Vectors of sums by lanes in a row of `x`.
  EQQ_INLINE int64_t lane_vectors(const Runs& r) { return row_codes(r) / max64(min64(r.size, row_codes(r)), kCodes); }

  static void plan(const Int8Problem* problem, int64_t threads, Plan* out) {
    const Problem& p = problem->p;
    const Runs r = runs_of(p);
    Detail d;
    d.method = p.m <= V::kFewRows ? kFewMethod : kPanelMethod;
    // After few rows of `x` with zero points there is one of ones.
    d.m_padded = d.method == kFewMethod ? p.m + problem->affine : round_up(p.m, L);
    d.row_blocks = d.method == kFewMethod ? 1 : div_up(d.m_padded, kInt8RowBlock);
    int64_t grain = d.method == kFewMethod ? V::kDotRows : V::kTileRows;
    if constexpr (V::kInRegisters) grain = in_registers(*problem, r) ? V::kRegisterRows : grain;
    const int64_t most = d.method == kFewMethod ? 64 : round_up(kUnitRows, grain);
    int64_t rows = div_up(p.n * p.batch * d.row_blocks, 4 * threads);
    rows = max64(rows, (int64_t{1} << 18) / max64(p.m * p.k, 1));
    rows = max64(min64(round_up(min64(rows, p.n), grain), most), grain);
    d.rows = rows;
    d.chunks = div_up(p.n, rows);
    d.panels = d.method == kFewMethod ? 1 : d.m_padded / L;
    d.sums = round_up(8 * p.batch * d.m_padded, 64);
    d.lanes = d.sums + round_up(4 * p.batch * (r.count + 1) * d.m_padded, 64);
    const bool lanes = kCorrects && d.method == kFewMethod && by_lanes(r);
    d.x = d.lanes + (lanes ? 4 * L * p.batch * d.m_padded * lane_vectors(r) : 0);
    out->shared_bytes = round_up(d.x + p.batch * d.m_padded * row_codes(r) * kBytes, 64);
    out->parts = p.batch * d.panels;
    out->units = p.batch * d.row_blocks * d.chunks;
    // Decoded rows, and one more to decode in; scales and offsets; sums.
    const int64_t held = d.method == kFewMethod ? V::kDotRows : rows;
    const int64_t width = d.method == kFewMethod ? d.m_padded * L : min64(d.m_padded, kInt8RowBlock);
    const int64_t decoded = d.method == kFewMethod ? V::kDotRows : V::kTileRows;
    d.scale_at = round_up((decoded + 1) * kStepRoom, 64);
    d.partial_at = d.scale_at + 3 * round_up(4 * (decoded + 1) * kRunRoom, 64);
    d.sum_at = d.partial_at + round_up(4 * held * width, 64);
    out->own_bytes = d.sum_at + round_up(4 * held * (width + (d.method == kFewMethod ? d.m_padded : 0)), 64);
    set_detail(d, out);
  }

  //
  // x
  //

  EQQ_INLINE float bits_to_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
  }
  EQQ_INLINE uint32_t float_to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
  }

  // `count` floats of `x`, of whatever type.
  static void read_floats(const Problem& p, int64_t at, int64_t count, float* out) {
    if (p.x_type == kFloat32) {
      const float* x = static_cast<const float*>(p.x) + at;
      if (p.x_column == 1) {
        memcpy(out, x, 4 * count);
      } else {
        for (int64_t i = 0; i < count; ++i) out[i] = x[i * p.x_column];
      }
      return;
    }
    const uint16_t* x = static_cast<const uint16_t*>(p.x) + at;
    if (p.x_type == kBFloat16) {
      for (int64_t i = 0; i < count; ++i) out[i] = bits_to_float(static_cast<uint32_t>(x[i * p.x_column]) << 16);
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] = V::from_half(x[i * p.x_column]);
    }
  }

  // How a row of `x` becomes codes of a sign.
  struct Row {
    float scale;    // NaN if one of the floats is not finite
    float zero;     // its code, without a sign
    int32_t shift;  // what codes of a sign are too much
  };

  // Whether its floats become codes that are not all alike: a scale may be zero or NaN.
  EQQ_INLINE bool has_codes(const Row& row) { return __builtin_fabsf(row.scale) > 0; }

  EQQ_INLINE bool finds_scales(const Int8Problem& q) { return q.x_scale == nullptr; }

  // That of row `m`, by the largest magnitude of its floats, as an integer; and by their range, if it must be found.
  EQQ_INLINE Row row_of(const Int8Problem& q, int64_t m, uint32_t most, float low, float high) {
    Row row = {bits_to_float(most) / 127, 0, 0};
    if (!finds_scales(q)) {
      row.scale = q.x_scale[m];
      if (q.affine) row.zero = q.x_zero[m];
    } else if (q.affine) {
      // As XLA computes `high / 255 - low / 255`, mostly: it fuses either product.
      row.scale = __builtin_fmaf(high, 1 / 255.0f, -(low * (1 / 255.0f)));
      if (row.scale != 0) {
        const float zero = -low / row.scale + 12582912.0f;
        row.zero = zero > 12582912.0f + 255 ? 255 : zero - 12582912.0f;
      }
    }
    if (q.affine) row.shift = static_cast<int32_t>(row.zero) - 128;
    if (most >= 0x7f800000) row = {bits_to_float(0x7fc00000), 0, 0};
    return row;
  }

  // The same, of a row that begins at `at`.
  static Row row_at(const Int8Problem& q, int64_t m, int64_t at) {
    const Problem& p = q.p;
    if (q.form != kFloats) return row_of(q, m, 0, 0, 0);
    float values[256];
    uint32_t most = 0;  // magnitudes compare as integers
    float low = 0, high = 0;
    for (int64_t k = 0; k < p.k; k += 256) {
      const int64_t count = min64(256, p.k - k);
      read_floats(p, at + k * p.x_column, count, values);
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t magnitude = float_to_bits(values[i]) & 0x7fffffff;
        most = magnitude > most ? magnitude : most;
      }
      if (!q.affine || !finds_scales(q)) continue;
      for (int64_t i = 0; i < count; ++i) {
        low = values[i] < low ? values[i] : low;
        high = values[i] > high ? values[i] : high;
      }
    }
    return row_of(q, m, most, low, high);
  }

  // `count` codes of a row, at most 256.
  static void read_codes(const Int8Problem& q, int64_t at, int64_t count, const Row& row, int8_t* out) {
    const Problem& p = q.p;
    if (q.form != kFloats) {
      const uint8_t* x = static_cast<const uint8_t*>(p.x) + at;
      const uint8_t flip = q.form == kUnsigned ? 128 : 0;
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int8_t>(x[i * p.x_column] ^ flip);
      return;
    }
    if (!has_codes(row)) {
      memset(out, 0, count);
      return;
    }
    float values[256];
    read_floats(p, at, count, values);
    const float least = q.affine ? 0 : -128, most = q.affine ? 255 : 127;
    const uint32_t flip = q.affine ? 128 : 0;
    // Adding 1.5 * 2^23 rounds to an integer, half to even, and leaves it in the low bits.
    for (int64_t i = 0; i < count; ++i) {
      float v = values[i] / row.scale + row.zero;
      v = v > most ? most : v;
      v = v < least ? least : v;
      out[i] = static_cast<int8_t>(float_to_bits(v + 12582912.0f) - flip);
    }
  }

  static void prepare(const Int8Problem* problem, const Plan* plan, void* memory, int64_t part) {
    const Problem& p = problem->p;
    const Runs r = runs_of(p);
    const Integers v = integers_of(p);
    const Detail d = detail_of<Detail>(plan);
    char* shared = static_cast<char*>(memory);
    const int64_t batch = part / d.panels, first = part % d.panels * L;
    const int64_t width = d.method == kFewMethod ? 1 : L;  // of a panel
    const int64_t rows = d.method == kFewMethod ? d.m_padded : width;
    const int64_t ones = d.method == kFewMethod && problem->affine ? p.m : -1;
    float* scales = reinterpret_cast<float*>(shared) + batch * d.m_padded;
    int32_t* shifts = reinterpret_cast<int32_t*>(shared) + (p.batch + batch) * d.m_padded;
    Row all[L + 8];
    int32_t* sums = reinterpret_cast<int32_t*>(shared + d.sums) + batch * (r.count + 1) * d.m_padded;
    uint8_t* x = reinterpret_cast<uint8_t*>(shared + d.x) + (batch * d.m_padded + first) * row_codes(r) * kBytes;
    const int32_t factor = p.zero_point != nullptr ? 1 : v.lowest;
    if constexpr (V::kPacks) {
      if (d.method == kPanelMethod) {
        V::template pack<Int8Kernels>(*problem, r, batch, first, scales + first, shifts + first, x);
        V::run_sums(r, factor, x, d.m_padded, sums + first);
        return;
      }
    }
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t m = first + i;
      all[i] = Row{0, 0, 0};
      if (m < p.m) all[i] = row_at(*problem, batch * p.m + m, batch * p.x_batch + m * p.x_row);
      scales[m] = all[i].scale;
      shifts[m] = all[i].shift;
    }
    // Some codes of all rows, and then the next: so what is written stays in L1.
    for (int64_t run = 0; run < r.count; ++run) {
      const int64_t length = run_length(r, p.k, run), start = run_start(r, run);
      for (int64_t i = 0; i < rows; ++i) sums[run * d.m_padded + first + i] = 0;
      for (int64_t at = 0; at < r.size; at += 256) {
        const int64_t room = min64(256, r.size - at), count = max64(min64(room, length - at), 0);
        for (int64_t i = 0; i < rows; ++i) {
          const int64_t m = first + i;
          int8_t codes[256];
          memset(codes, 0, sizeof codes);
          if (m < p.m && count > 0)
            read_codes(*problem, batch * p.x_batch + m * p.x_row + (start + at) * p.x_column, count, all[i], codes);
          if (m == ones) memset(codes, 1, count);
          int32_t sum = 0;
          for (int64_t j = 0; j < 256; ++j) sum += codes[j];
          sums[run * d.m_padded + m] += factor * sum;
          const int64_t position = run * r.size + at;
          // Groups of a row are `width` groups apart, and rows of `x` one after the other if that is one.
          uint8_t* out = d.method == kFewMethod ? x + (i * row_codes(r) + position) * kBytes
                                                : x + position * width * kBytes + 4 * i;
          if (kBytes == 1) {
            for (int64_t j = 0; j < room; j += 4) memcpy(out + j * width, codes + j, 4);
          } else {
            for (int64_t j = 0; j < room; j += 2) {
              const int16_t two[2] = {codes[j], codes[j + 1]};
              memcpy(out + j * 2 * width, two, 4);
            }
          }
        }
      }
    }
    // The row ends in whole vectors.
    const int64_t rest = row_codes(r) - r.padded;
    if (d.method == kFewMethod) {
      for (int64_t i = 0; i < rows; ++i) memset(x + (i * row_codes(r) + r.padded) * kBytes, 0, rest * kBytes);
      if (kCorrects && by_lanes(r)) {
        int32_t* lanes = reinterpret_cast<int32_t*>(shared + d.lanes) + batch * rows * lane_vectors(r) * L;
        for (int64_t i = 0; i < rows; ++i) lane_sums(r, factor, x + i * row_codes(r), lanes + i * lane_vectors(r) * L);
      }
    } else {
      memset(x + r.padded * width * kBytes, 0, rest * width * kBytes);
    }
  }

  // The sums of each lane over the vectors of a run; or of each vector, if it has several runs.
  static void lane_sums(const Runs& r, int32_t factor, const uint8_t* x, int32_t* out) {
    const int64_t vectors = max64(min64(r.size, row_codes(r)) / kCodes, 1);
    for (int64_t i = 0; i < lane_vectors(r); ++i) {
      for (int64_t l = 0; l < L; ++l) {
        int32_t sum = 0;
        for (int64_t j = 0; j < vectors; ++j)
          for (int64_t g = 0; g < V::kGroup; ++g)
            sum += static_cast<int8_t>(x[(i * vectors + j) * kCodes + l * V::kGroup + g]);
        out[i * L + l] = factor * sum;
      }
    }
  }

  //
  // The weight
  //

  // Where a row is from the code on that a step begins with, and until which code it is real.
  EQQ_INLINE int64_t step_start(const Runs& r, const Step& s) { return run_start(r, s.run) + s.offset; }

  // A step of a row as the kernels multiply it. What is beyond the end of a run may be anything, since `x` is zero
  // there. `direct`: it may be the weight itself. `out` and `room` have `kStepRoom` bytes.
  static const uint8_t* decode(const Problem& p, const Runs& r, const Integers& v, const Step& s, int64_t row,
                               const int32_t* offset, bool direct, uint8_t* room, uint8_t* out) {
    const int64_t from = step_start(r, s), last = s.run + s.runs - 1;
    const int64_t end = min64(run_start(r, last) + run_length(r, p.k, last), from + (s.runs == 1 ? s.length : p.k));
    if (end <= from) return out;  // a last run that is short may end in an earlier step
    if (kBytes == 1 && in_a_row(r, s)) {
      const uint8_t* codes = some_codes(p, v, row, from, end, out);
      if (p.bits < 8 || (direct && from + round_up(step_codes(s), 64) <= p.k)) return codes;
      memcpy(out, codes, end - from);
      return out;
    }
    const uint8_t* codes = some_codes(p, v, row, from, end, room);
    for (int64_t i = 0; i < s.runs; ++i) {
      const int64_t start = run_start(r, s.run + i) + s.offset - from;
      const int64_t count = min64(s.length, run_length(r, p.k, s.run + i) - s.offset);
      if (kBytes == 1) {
        memcpy(out + i * s.length, codes + start, count);
      } else {
        widen(codes + start, count, static_cast<int16_t>(offset[i]), reinterpret_cast<int16_t*>(out) + i * s.length);
      }
    }
    return out;
  }

  static void widen(const uint8_t* codes, int64_t count, int16_t offset, int16_t* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<int16_t>(codes[i] + offset);
  }

  // What the codes of blocks `first` to `last` are off.
  static void offsets(const Problem& p, const Integers& v, int64_t row, int64_t first, int64_t last, int32_t* out) {
    unpack_zero_points(p, row, first, last, out);
    for (int64_t i = 0; i < last - first; ++i) out[i] = v.lowest - out[i];
  }

  // Fetches scales and zero points of the runs of a step, of some rows.
  EQQ_INLINE void fetch_scales(const Problem& p, const Runs& r, const Step& s, int64_t row, int64_t rows) {
    const int64_t block = s.run / r.per_block, item = scale_bytes(p.scale_kind);
    for (int64_t i = row; i < row + rows; ++i) {
      const char* scales = static_cast<const char*>(p.scale) + (i * p.blocks + block) * item;
      for (int64_t at = 0; at < s.runs * item; at += 64) __builtin_prefetch(scales + at);
      if (p.zero_point != nullptr) __builtin_prefetch(p.zero_point + i * p.zero_words + block * p.bits / 8);
    }
  }

  // Scales of the runs of a step, and what codes are off.
  static void step_scales(const Problem& p, const Runs& r, const Integers& v, const Step& s, int64_t row, float* scale,
                          int32_t* offset) {
    const int64_t first = s.run / r.per_block, last = (s.run + s.runs - 1) / r.per_block + 1;
    if (s.ends) {
      V::scales(&p, row, first, last, scale);
      for (int64_t i = s.runs; i < s.runs + 4; ++i) scale[i] = 0;  // multiplies zero
    }
    if (p.zero_point != nullptr) {
      offsets(p, v, row, first, first + s.runs, offset);
      for (int64_t i = s.runs; i < s.runs + 4; ++i) offset[i] = 0;
    } else {
      for (int64_t i = 0; i < s.runs; ++i) offset[i] = v.lowest;
    }
  }

  //
  // Few rows of x: lanes run along k
  //

  struct Dot {
    const uint8_t* w[8];
    const uint8_t* x;
    int64_t x_row;         // bytes
    const int32_t* lanes;  // sums of lanes, if they correct
    int64_t lane_row;
    const int32_t* shift;  // of rows of `x`, if they have zero points
    const float* scale;    // `kRunRoom` apart
    const int32_t* offset;
    int64_t runs, size;  // of the step
    void* sums;          // vectors of rows and rows of `x`: floats if summed by lanes, else integers
  };

  template <int kRows, int kM, bool kZero, bool kShift>
  static void dot_lanes(const Dot& a) {
    F sums[kRows][kM];
    float* memory = static_cast<float*>(a.sums);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) sums[i][m] = V::load_f(memory + (i * kM + m) * L);
    constexpr int kAll = kM + kShift;  // and the row of ones
    const int64_t vectors = a.size < kCodes ? 1 : a.size / kCodes, together = a.size < kCodes ? kCodes / a.size : 1;
    int64_t at = 0;
    for (int64_t run = 0, v = 0; run < a.runs; run += together, ++v) {
      I acc[kRows][kAll];
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        I offset = V::zero();
        if (kCorrects && kZero) offset = several(a.offset + i * kRunRoom + run, together);
#pragma GCC unroll 8
        for (int m = 0; m < kAll; ++m) {
          acc[i][m] = V::zero();
          if (kCorrects) acc[i][m] = V::load(a.lanes + m * a.lane_row + v * L);
          if (kCorrects && kZero) acc[i][m] = V::mul(acc[i][m], offset);
        }
      }
      for (int64_t j = 0; j < vectors; ++j, at += 4 * L) {
        I w[kRows];
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) w[i] = V::load(a.w[i] + at);
#pragma GCC unroll 8
        for (int m = 0; m < kAll; ++m) {
          const I x = V::load(a.x + m * a.x_row + at);
#pragma GCC unroll 8
          for (int i = 0; i < kRows; ++i) acc[i][m] = V::dot(acc[i][m], w[i], x);
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const F scale = several_f(a.scale + i * kRunRoom + run, together);
#pragma GCC unroll 8
        for (int m = 0; m < kM; ++m) {
          if (kShift) acc[i][m] = V::add(acc[i][m], V::mul(acc[i][kM], V::spread(-a.shift[m])));
          sums[i][m] = V::fma(V::to_f(acc[i][m]), scale, sums[i][m]);
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) V::store_f(memory + (i * kM + m) * L, sums[i][m]);
  }

  // The same of half of the rows at a time: there are not registers for all sums.
  template <int kRows, int kM, bool kZero, bool kShift>
  static void dot_halves(const Dot& a) {
    constexpr int kHalf = kRows / 2;
    Dot b = a;
    dot_lanes<kHalf, kM, kZero, kShift>(b);
    for (int i = 0; i < kHalf; ++i) b.w[i] = a.w[kHalf + i];
    b.scale += kHalf * kRunRoom;
    b.offset += kHalf * kRunRoom;
    b.sums = static_cast<float*>(b.sums) + kHalf * kM * L;
    dot_lanes<kHalf, kM, kZero, kShift>(b);
  }

  EQQ_INLINE I several(const int32_t* p, int64_t n) {
    if constexpr (kCodes > 16)
      if (n > 1) return V::lanes(p, static_cast<int>(n));
    return V::spread(*p);
  }
  EQQ_INLINE F several_f(const float* p, int64_t n) {
    if constexpr (kCodes > 16)
      if (n > 1) return V::lanes_f(p, static_cast<int>(n));
    return V::spread_f(*p);
  }

  template <int kRows, int kM>
  static void dot_whole(const Dot& a) {
    I acc[kRows][kM];
    int32_t* memory = static_cast<int32_t*>(a.sums);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) acc[i][m] = V::load(memory + (i * kM + m) * L);
    for (int64_t at = 0; at < a.size * kBytes; at += 4 * L) {
      I w[kRows];
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) w[i] = V::load(a.w[i] + at);
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) {
        const I x = V::load(a.x + m * a.x_row + at);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) acc[i][m] = V::dot(acc[i][m], w[i], x);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) V::store(memory + (i * kM + m) * L, acc[i][m]);
  }

  using DotStep = void (*)(const Dot&);
  template <bool kZero, bool kShift>
  EQQ_INLINE DotStep lanes_of(int64_t m) {
    constexpr int kRows = V::kDotRows;
    switch (m) {
      case 1: return dot_lanes<kRows, 1, kZero, kShift>;
      case 2: return dot_lanes<kRows, 2, kZero, kShift>;
      case 3: return dot_halves<kRows, 3, kZero, kShift>;
      default: return dot_halves<kRows, 4, kZero, kShift>;
    }
  }
  // `m`: with the row of ones, if there is one.
  EQQ_INLINE DotStep whole_of(int64_t m) {
    constexpr int kRows = V::kDotRows;
    switch (m) {
      case 1: return dot_whole<kRows, 1>;
      case 2: return dot_whole<kRows, 2>;
      case 3: return dot_whole<kRows, 3>;
      case 4: return dot_whole<kRows, 4>;
      default: return dot_whole<kRows, 5>;
    }
  }

  //
  // One row of x: codes are decoded in registers, one row of the weight after the other as they lie in memory
  //

  static constexpr int64_t kScaleCodes = 4096;  // of a row, whose scales are decoded at a time

  // Whether all vectors of codes are of whole blocks, or parts of them, and those have sums by lanes.
  EQQ_INLINE bool in_registers(const Int8Problem& q, const Runs& r) {
    const Problem& p = q.p;
    if (!V::kInRegisters || q.affine || p.m != 1 || r.per_block != 1) return false;
    return r.count == 1 || (by_lanes(r) && r.padded == p.k && p.k % (64 * (8 / p.bits)) == 0);
  }

  // The sum of products of codes, of a row that has one scale.
  template <int kBits, bool kLookUp>
  static int32_t one_scale(const Problem& p, const uint8_t* w, const uint8_t* x, I table) {
    constexpr int kPlanes = 8 / kBits, kTogether = kPlanes >= 4 ? 1 : 4 / kPlanes, kSums = kTogether * kPlanes;
    const int64_t segments = p.k / (64 * kPlanes), rest = p.words - 64 * segments;
    I acc[kSums];
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) acc[i] = V::zero();
    int64_t s = 0;
    for (; s + kTogether <= segments; s += kTogether) {
#pragma GCC unroll 4
      for (int j = 0; j < kTogether; ++j) {
        __builtin_prefetch(w + 64 * (s + j) + kAhead);
        const I bytes = V::load(w + 64 * (s + j));
#pragma GCC unroll 8
        for (int i = 0; i < kPlanes; ++i) {
          I c = V::template codes<kBits>(bytes, i);
          if (kLookUp) c = V::lookup(table, c);
          acc[j * kPlanes + i] = V::dot(acc[j * kPlanes + i], c, V::load(x + 64 * ((s + j) * kPlanes + i)));
        }
      }
    }
    for (; 64 * s < p.words; ++s) {
      // The planes of a last segment that is cut short are short as well.
      const int64_t plane = s < segments ? 64 : rest;
      const I bytes = V::load_some(w + 64 * s, plane);
#pragma GCC unroll 8
      for (int i = 0; i < kPlanes; ++i) {
        const int64_t at = 64 * s * kPlanes + i * plane, count = min64(plane, p.k - at);
        if (count <= 0) continue;
        I c = V::template codes<kBits>(bytes, i);
        if (kLookUp) c = V::lookup(table, c);
        acc[i] = V::dot(acc[i], c, V::load_some(x + at, count));
      }
    }
#pragma GCC unroll 8
    for (int i = 1; i < kSums; ++i) acc[0] = V::add(acc[0], acc[i]);
    return V::sum(acc[0]);
  }

  // Sums of scaled products of `kRegisterRows` rows in blocks: of 16 or 32 codes, or of `per` vectors. They share what
  // is loaded of `x`. Rows past `count` are the last one again.
  template <int kBits, bool kLookUp, int kBlocks, bool kZero>
  static void many_scales(const Problem& p, const Runs& r, const Integers& v, int64_t row, int64_t count,
                          const uint8_t* x, const int32_t* lanes, I table, float* out) {
    constexpr int kPlanes = 8 / kBits, kRows = V::kRegisterRows, kRoom = kScaleCodes / 16 + 32 * kPlanes;
    const int64_t per = max64(r.size / 64, 1), step = round_up(kScaleCodes, r.size * kPlanes);
    // Where floats lie in memory one for each block, they are read there; several are read four at a time.
    const bool direct = p.scale_kind == kScaleFloat32 && p.row_scale == nullptr && kBlocks == 1;
    const bool together = step >= p.k && p.row_scale == nullptr && count == kRows;  // one row's lie behind another's
    // The next rows, as they lie in memory: a line of each in turn would double the time where the weight is not
    // cached.
    const int64_t ahead = max64(kNear, kRows * p.words);
    float room[kRows * kRoom];
    int32_t offset[kRows][kZero ? kRoom : 1];
    const float* scale[kRows];
    const uint8_t* w[kRows];
    F sums[kRows];
    I acc[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      w[i] = p.codes + (row + min64(i, count - 1)) * p.words;
      sums[i] = V::zero_f();
      acc[i] = V::zero();
    }
    for (int64_t from = 0; from < p.k; from += step) {
      const int64_t to = min64(from + step, p.k), first = from / r.size, last = div_up(to, r.size);
      for (int i = 0; i < kRows; ++i) {
        const int64_t at = row + min64(i, count - 1);
        scale[i] = direct ? static_cast<const float*>(p.scale) + at * p.blocks + first
                          : room + i * (together ? p.blocks : kRoom);
        if (!direct && !together) V::scales(&p, at, first, last, room + i * kRoom);
        if (kZero) offsets(p, v, at, first, last, offset[i]);
      }
      if (!direct && together) V::scales(&p, row, 0, kRows * p.blocks, room);
      int64_t block = 0, of_block = 0;  // of this step; vectors of the block so far
      for (int64_t s = from / (64 * kPlanes); s * 64 * kPlanes < to; ++s) {
        I bytes[kRows];
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          const uint8_t* later = w[0] + 64 * (s * kRows + i) + ahead;
          if (ahead == kNear) {
            __builtin_prefetch(later);
          } else {
            __builtin_prefetch(later, 0, 2);  // to L2
          }
          bytes[i] = V::load(w[i] + 64 * s);
        }
#pragma GCC unroll 8
        for (int plane = 0; plane < kPlanes; ++plane) {
          if (of_block == 0) {
            const I lane = V::load(lanes + (first / kBlocks + block) * L);
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i)
              acc[i] = kZero ? V::mul(lane, several(offset[i] + block * kBlocks, kBlocks)) : lane;
          }
          const I xs = V::load(x + 64 * (s * kPlanes + plane));
          const bool ends = ++of_block == per;
#pragma GCC unroll 8
          for (int i = 0; i < kRows; ++i) {
            I c = V::template codes<kBits>(bytes[i], plane);
            if (kLookUp) c = V::lookup(table, c);
            acc[i] = V::dot(acc[i], c, xs);
            if (ends) sums[i] = V::fma(V::to_f(acc[i]), several_f(scale[i] + block * kBlocks, kBlocks), sums[i]);
          }
          if (ends) {
            of_block = 0;
            ++block;
          }
        }
      }
    }
    for (int i = 0; i < kRows; ++i) out[i] = V::sum_f(sums[i]);
  }

  template <int kBits, bool kLookUp>
  static void rows_in_registers(const Problem& p, const Detail& d, const char* shared, int64_t batch, int64_t first,
                                int64_t count) {
    const Runs r = runs_of(p);
    const Integers v = integers_of(p);
    const I table = V::table(v.table);
    const uint8_t* x = reinterpret_cast<const uint8_t*>(shared + d.x) + batch * row_codes(r);
    const int32_t* lanes = reinterpret_cast<const int32_t*>(shared + d.lanes) + batch * lane_vectors(r) * L;
    const int32_t x_sum = reinterpret_cast<const int32_t*>(shared + d.sums)[batch * (r.count + 1)];
    const float x_scale = reinterpret_cast<const float*>(shared)[batch];
    const bool zero = p.zero_point != nullptr;
    auto* several_scales = zero ? many_scales<kBits, kLookUp, 1, true> : many_scales<kBits, kLookUp, 1, false>;
    if (r.size == 32)
      several_scales = zero ? many_scales<kBits, kLookUp, 2, true> : many_scales<kBits, kLookUp, 2, false>;
    if (r.size == 16)
      several_scales = zero ? many_scales<kBits, kLookUp, 4, true> : many_scales<kBits, kLookUp, 4, false>;
    const int64_t weight = first_row(&p, batch);
    if (r.count > 1) {
      for (int64_t n = first; n < first + count; n += V::kRegisterRows) {
        const int64_t rows = min64(V::kRegisterRows, first + count - n);
        float sums[V::kRegisterRows];
        several_scales(p, r, v, weight + n, rows, x, lanes, table, sums);
        for (int64_t i = 0; i < rows; ++i) write(p, batch * p.y_batch + (n + i) * p.y_column, sums[i] * x_scale);
      }
      return;
    }
    for (int64_t n = first; n < first + count; ++n) {
      const int64_t row = weight + n;
      float scale[4 + 1];
      V::scales(&p, row, 0, 1, scale);
      int32_t factor = 1;
      if (zero) offsets(p, v, row, 0, 1, &factor);
      const int32_t sum = one_scale<kBits, kLookUp>(p, p.codes + row * p.words, x, table);
      write(p, batch * p.y_batch + n * p.y_column, static_cast<float>(sum + factor * x_sum) * scale[0] * x_scale);
    }
  }

  static void run_one(const Problem& p, const Detail& d, const char* shared, int64_t batch, int64_t first,
                      int64_t count) {
    if constexpr (V::kInRegisters) {
      const Integers v = integers_of(p);
      const bool look = v.looks_up || v.shift > 0;
      auto* rows = rows_in_registers<8, false>;
      if (p.bits == 4) rows = look ? rows_in_registers<4, true> : rows_in_registers<4, false>;
      if (p.bits == 2) rows = look ? rows_in_registers<2, true> : rows_in_registers<2, false>;
      if (p.bits == 1) rows = look ? rows_in_registers<1, true> : rows_in_registers<1, false>;
      rows(p, d, shared, batch, first, count);
    }
  }

  static void run_few(const Int8Problem& problem, const Detail& d, const char* shared, char* own, int64_t batch,
                      int64_t first, int64_t count) {
    constexpr int kRows = V::kDotRows;
    static_assert(V::kFewRows <= 4 && kRows <= 8, "");
    const Problem& p = problem.p;
    const Runs r = runs_of(p);
    const Integers v = integers_of(p);
    const bool lanes = by_lanes(r), zero = p.zero_point != nullptr;
    const int64_t all = p.m + problem.affine;  // rows of `x`, and the one of ones
    DotStep step = whole_of(all);
    if (lanes) step = zero ? lanes_of<true, false>(p.m) : lanes_of<false, false>(p.m);
    if (lanes && problem.affine) step = zero ? lanes_of<true, true>(p.m) : lanes_of<false, true>(p.m);
    float* scale = reinterpret_cast<float*>(own + d.scale_at);
    int32_t* offset = reinterpret_cast<int32_t*>(scale + (kRows + 1) * kRunRoom + 16);
    int32_t* partial = reinterpret_cast<int32_t*>(own + d.partial_at);
    float* sums = reinterpret_cast<float*>(own + d.sum_at);
    float* totals = sums + kRows * all * L;
    const float* x_scale = reinterpret_cast<const float*>(shared) + batch * d.m_padded;
    const int32_t* x_sums = reinterpret_cast<const int32_t*>(shared + d.sums) + batch * (r.count + 1) * d.m_padded;
    uint8_t* rooms = reinterpret_cast<uint8_t*>(own);
    Dot a;
    a.x_row = row_codes(r) * kBytes;
    a.lane_row = lane_vectors(r) * L;
    a.shift = reinterpret_cast<const int32_t*>(shared) + (p.batch + batch) * d.m_padded;
    a.scale = scale;
    a.offset = offset;
    for (int64_t i = 0; i < count; i += kRows) {
      const int64_t rows = min64(kRows, count - i), row = first_row(&p, batch) + first + i;
      memset(partial, 0, 4 * kRows * all * L);
      memset(sums, 0, 4 * kRows * all * (L + 1));
      Step s = first_step(r);
      if (r.count > 0) do {
          const int64_t position = s.run * r.size + s.offset;
          const int64_t bytes = step_start(r, s) * p.bits / 8, end = bytes + step_codes(s) * p.bits / 8;
          for (int64_t j = 0; j < kRows; ++j) {
            const int64_t at = row + min64(j, rows - 1);
            for (int64_t b = bytes; b < end; b += 64) __builtin_prefetch(p.codes + (at + kRows) * p.words + b);
            step_scales(p, r, v, s, at, scale + j * kRunRoom, offset + j * kRunRoom);
            a.w[j] =
                decode(p, r, v, s, at, offset + j * kRunRoom, true, rooms + kRows * kStepRoom, rooms + j * kStepRoom);
          }
          a.x = reinterpret_cast<const uint8_t*>(shared + d.x) + (batch * all * row_codes(r) + position) * kBytes;
          a.runs = s.runs;
          a.size = s.length;
          a.sums = lanes ? static_cast<void*>(sums) : partial;
          a.lanes = nullptr;
          if (kCorrects && lanes)
            a.lanes = reinterpret_cast<const int32_t*>(shared + d.lanes) + batch * all * a.lane_row +
                      position / max64(r.size, kCodes) * L;
          if (lanes) {
            step(a);
            continue;
          }
          for (int64_t run = 0; run < s.runs; ++run) {
            step(a);
            for (int64_t j = 0; j < kRows; ++j) a.w[j] += s.length * kBytes;
            a.x += s.length * kBytes;
            if (!s.ends) continue;
            for (int64_t j = 0; j < rows; ++j) {
              int32_t ones = 0;
              for (int64_t m = all - 1; m >= 0; --m) {
                int32_t sum = V::sum(V::load(partial + (j * all + m) * L));
                const int32_t x_sum = x_sums[(s.run + run) * d.m_padded + m];
                if (kCorrects) sum += zero ? offset[j * kRunRoom + run] * x_sum : x_sum;
                if (m == p.m) {
                  ones = sum;
                } else {
                  totals[j * p.m + m] += static_cast<float>(sum - a.shift[m] * ones) * scale[j * kRunRoom + run];
                }
              }
            }
            memset(partial, 0, 4 * kRows * all * L);
          }
        } while (next_step(r, s));
      for (int64_t j = 0; j < rows; ++j)
        for (int64_t m = 0; m < p.m; ++m) {
          const float sum = lanes ? V::sum_f(V::load_f(sums + (j * p.m + m) * L)) : totals[j * p.m + m];
          write(p, batch * p.y_batch + m * p.y_row + (first + i + j) * p.y_column, sum * x_scale[m]);
        }
    }
  }

  EQQ_INLINE void write(const Problem& p, int64_t at, float value) {
    if (p.x_type == kFloat32) {
      static_cast<float*>(p.y)[at] = value;
    } else if (p.x_type == kFloat16) {
      static_cast<uint16_t*>(p.y)[at] = V::to_half(value);
    } else {
      const uint32_t bits = float_to_bits(value);
      static_cast<uint16_t*>(p.y)[at] =
          static_cast<uint16_t>(value != value ? bits >> 16 | 64 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
  }

  //
  // Many rows: lanes run along the rows of x
  //

  // GCC would have a pointer for each row, and keep sums of all runs in registers: it has not so many.
  template <typename T>
  EQQ_INLINE void hide(T*& p) {
    __asm__("" : "+r"(p));
  }

  // `kSeveral`: whether the step has several runs.
  template <int kVectors, bool kZero, bool kShift, bool kSeveral>
  static __attribute__((noinline)) void tile(const Panel& a) {
    constexpr int kRows = V::kTileRows, kWidth = kVectors * L;
    constexpr int kThirds = (kRows + 2) / 3;
    const uint8_t* w[kThirds];  // every third row
#pragma GCC unroll 4
    for (int i = 0; i < kThirds; ++i) w[i] = a.w + 3 * i * a.w_row;
    const uint8_t* x = a.x;
    // Copies, since vectors that are stored might be of what `a` points to, for all that GCC knows.
    const int64_t w_row = a.w_row, x_panel = a.x_panel, runs = kSeveral ? a.step.runs : 1, length = a.step.length;
    const int32_t *sums_x = a.sums_x, *offset = a.offset, *weights = a.weights;
    const float* scale = a.scale;
    const bool begins = kSeveral || a.step.begins, ends = kSeveral || a.step.ends;
    int64_t bits = 0;  // of each row so far
    for (int64_t run = 0; run < runs; ++run, sums_x += a.sums_stride, ++offset, ++weights, ++scale) {
      I acc[kRows][kVectors];
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          if (!begins) {
            acc[i][v] = V::load(a.partial + i * kWidth + v * L);
          } else if (!kCorrects) {
            acc[i][v] = V::zero();
          } else {
            acc[i][v] = V::load(sums_x + v * L);
            if (kZero) acc[i][v] = V::mul(acc[i][v], V::spread(offset[i * kRunRoom]));
          }
          if (kShift)
            acc[i][v] = V::add(acc[i][v], V::mul(V::load(a.shift + v * L), V::spread(-weights[i * kRunRoom])));
        }
      float* sums = a.sums;
      hide(sums);
      for (int64_t left = length; left > 0; left -= 64) {
        const int64_t codes = min64(left, 64);
        if (a.next != nullptr && bits % 512 == 0) {
#pragma GCC unroll 16
          for (int i = 0; i < kRows; ++i) __builtin_prefetch(a.next + i * a.next_row + bits / 8, 0, 2);
        }
        bits += codes * a.bits;
        for (const uint8_t* end = x + codes * kBytes * L; x < end; x += 4 * L) {
          I xs[kVectors];
#pragma GCC unroll 2
          for (int v = 0; v < kVectors; ++v) xs[v] = V::load(x + v * x_panel);
#pragma GCC unroll 16
          for (int i = 0; i < kRows; ++i) {
            const I ws = V::word(w[i / 3] + i % 3 * w_row);
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) acc[i][v] = V::dot(acc[i][v], ws, xs[v]);
          }
#pragma GCC unroll 4
          for (int i = 0; i < kThirds; ++i) {
            w[i] += 4;
            hide(w[i]);
          }
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const int at = i * kWidth + v * L;
          if (ends) {
            V::store_f(sums + at, V::fma(V::to_f(acc[i][v]), V::spread_f(scale[i * kRunRoom]), V::load_f(sums + at)));
          } else {
            V::store(a.partial + at, acc[i][v]);
          }
        }
    }
  }

  template <int kVectors, bool kZero, bool kShift>
  EQQ_INLINE void tiles(const Panel& a) {
    a.step.runs > 1 ? tile<kVectors, kZero, kShift, true>(a) : tile<kVectors, kZero, kShift, false>(a);
  }

  template <int kVectors>
  EQQ_INLINE void tiles_of(const Panel& a) {
    if (a.shift == nullptr)
      return a.offset != nullptr ? tiles<kVectors, true, false>(a) : tiles<kVectors, false, false>(a);
    a.offset != nullptr ? tiles<kVectors, true, true>(a) : tiles<kVectors, false, true>(a);
  }

  // Sums of the weight in each run of a step, over codes that are no padding.
  static void sum_weights(const Runs& r, int64_t k, const Step& s, const uint8_t* w, const int32_t* offset,
                          int32_t* out) {
    for (int64_t run = 0; run < s.runs; ++run, w += s.length * kBytes) {
      const int64_t count = max64(min64(s.length, run_length(r, k, s.run + run) - s.offset), 0);
      int32_t sum = kCorrects ? offset[run] * static_cast<int32_t>(count) : 0;
      if (kBytes == 1) {
        for (int64_t i = 0; i < count; ++i) sum += w[i];
      } else {
        const int16_t* values = reinterpret_cast<const int16_t*>(w);
        for (int64_t i = 0; i < count; ++i) sum += values[i];
      }
      out[run] = sum;
    }
  }

  // Memory that results will be written over, of some rows of the weight and of x: stores to so many places do not
  // fetch it in time.
  static void fetch_results(const Problem& p, int64_t at, int64_t count, int64_t lanes) {
    const int64_t item = p.x_type == kFloat32 ? 4 : 2;
    const char* y = static_cast<const char*>(p.y) + at * item;
    const bool across = p.y_row == 1;
    const int64_t rows = across ? count : lanes, next = item * (across ? p.y_column : p.y_row);
    const int64_t bytes = across ? item * lanes : p.y_column == 1 ? item * count : 0;
    for (int64_t i = 0; i < rows; ++i, y += next)
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(y + b, 0, 2);
  }

  static void run_panels(const Int8Problem& problem, const Detail& d, const char* shared, char* own, int64_t batch,
                         int64_t block, int64_t first, int64_t count) {
    const Problem& p = problem.p;
    const Runs r = runs_of(p);
    const Integers v = integers_of(p);
    float* scale = reinterpret_cast<float*>(own + d.scale_at);
    int32_t* offset = reinterpret_cast<int32_t*>(scale + (V::kTileRows + 1) * kRunRoom + 16);
    int32_t* weights = offset + (V::kTileRows + 1) * kRunRoom;
    const int32_t* shifts = reinterpret_cast<const int32_t*>(shared) + (p.batch + batch) * d.m_padded;
    float* sums = reinterpret_cast<float*>(own + d.sum_at);
    uint8_t* rooms = reinterpret_cast<uint8_t*>(own);
    const float* x_scale = reinterpret_cast<const float*>(shared) + batch * d.m_padded;
    const int32_t* x_sums = reinterpret_cast<const int32_t*>(shared + d.sums) + batch * (r.count + 1) * d.m_padded;
    const int64_t start = block * kInt8RowBlock, width = min64(kInt8RowBlock, d.m_padded - start);
    const uint8_t* x =
        reinterpret_cast<const uint8_t*>(shared + d.x) + (batch * d.m_padded + start) * row_codes(r) * kBytes;
    const int64_t real = min64(width, p.m - start), base = batch * p.y_batch + start * p.y_row + first * p.y_column;
    memset(sums, 0, 4 * d.rows * width);
    memset(weights, 0, 4 * V::kTileRows * kRunRoom);  // of rows past the last one too
    Panel a;
    a.x_panel = L * row_codes(r) * kBytes;
    a.sums_stride = d.m_padded;
    a.scale = scale;
    a.weights = weights;
    a.offset = p.zero_point != nullptr ? offset : nullptr;
    a.bits = p.bits;
    a.next_row = p.words;
    Step s = first_step(r);
    Step next = s;  // behind a step of the last rows comes the next one of the first
    for (bool more = r.count > 0; more; s = next) {
      more = next_step(r, next);
      const int64_t position = s.run * r.size + s.offset, from = step_start(r, s);
      a.step = s;
      for (int64_t tile = 0; tile < count; tile += V::kTileRows) {
        const int64_t rows = min64(V::kTileRows, count - tile), row = first_row(&p, batch) + first + tile;
        // Rows that all have the whole step as bytes are multiplied where they lie.
        const bool direct =
            kBytes == 1 && p.bits == 8 && rows == V::kTileRows && in_a_row(r, s) && from + step_codes(s) <= p.k;
        a.w = direct ? p.codes + row * p.words + from : nullptr;
        a.w_row = direct ? p.words : kStepRoom;
        for (int64_t i = 0; i < rows; ++i) {
          step_scales(p, r, v, s, row + i, scale + i * kRunRoom, offset + i * kRunRoom);
          const uint8_t* w = direct ? a.w + i * p.words
                                    : decode(p, r, v, s, row + i, offset + i * kRunRoom, false,
                                             rooms + V::kTileRows * kStepRoom, rooms + i * kStepRoom);
          if (i == 0) a.w = w;  // all rows begin at the same place of their memory
          if (problem.affine) sum_weights(r, p.k, s, w, offset + i * kRunRoom, weights + i * kRunRoom);
        }
        const bool here = tile + V::kTileRows < count;
        const int64_t next_row = here ? row + V::kTileRows : row - tile;
        a.next = here || more ? p.codes + next_row * p.words + step_start(r, here ? s : next) * p.bits / 8 : nullptr;
        if (a.next != nullptr) fetch_scales(p, r, here ? s : next, next_row, V::kTileRows);
        for (int64_t m = 0; m < width; m += 2 * L) {
          a.x = x + (m * row_codes(r) + position * L) * kBytes;
          a.sums_x = x_sums + s.run * d.m_padded + start + m;
          a.shift = problem.affine ? shifts + start + m : nullptr;
          const int64_t lanes = min64(2 * L, width - m);
          if (!more && tile == 0) fetch_results(p, base + m * p.y_row, count, min64(lanes, real - m));
          a.sums = sums + m * d.rows + tile * lanes;
          a.partial = reinterpret_cast<int32_t*>(own + d.partial_at) + m * d.rows + tile * lanes;
          if (lanes == L) {
            tiles_of<1>(a);
          } else {
            tiles_of<2>(a);
          }
          a.next = nullptr;
        }
      }
    }
    for (int64_t m = 0; m < real; m += 2 * L) {
      const int64_t lanes = min64(2 * L, width - m), some = min64(2 * L, real - m);
      const float* tiles = sums + m * d.rows;
      const int64_t at = base + m * p.y_row;
      if constexpr (V::kPacks) {
        for (int64_t l = 0; l < some; l += L)
          for (int64_t i = 0; i < count; i += L)
            V::template put<Int8Kernels>(p, at + l * p.y_row + i * p.y_column, tiles + i * lanes + l, lanes,
                                         x_scale + start + m + l, min64(L, count - i), min64(L, some - l));
      } else if (p.y_row == 1) {
        for (int64_t i = 0; i < count; ++i)
          for (int64_t l = 0; l < some; ++l)
            write(p, at + l + i * p.y_column, tiles[i * lanes + l] * x_scale[start + m + l]);
      } else {
        for (int64_t l = 0; l < some; ++l)
          for (int64_t i = 0; i < count; ++i)
            write(p, at + l * p.y_row + i * p.y_column, tiles[i * lanes + l] * x_scale[start + m + l]);
      }
    }
  }

  static void run(const Int8Problem* problem, const Plan* plan, const void* shared, void* own, int64_t unit) {
    const Detail d = detail_of<Detail>(plan);
    const int64_t chunk = unit % d.chunks, block = unit / d.chunks % d.row_blocks,
                  batch = unit / d.chunks / d.row_blocks;
    const int64_t first = chunk * d.rows, count = min64(d.rows, problem->p.n - first);
    const char* memory = static_cast<const char*>(shared);
    if (in_registers(*problem, runs_of(problem->p))) {
      run_one(problem->p, d, memory, batch, first, count);
    } else if (d.method == kFewMethod) {
      run_few(*problem, d, memory, static_cast<char*>(own), batch, first, count);
    } else {
      run_panels(*problem, d, memory, static_cast<char*>(own), batch, block, first, count);
    }
  }
};

}  // namespace

#endif  // EQQUANT_INT8_KERNELS_H_
