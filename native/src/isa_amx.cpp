// Floats on AMX: tiles of 16 rows. The weight is the left operand, as its rows lie in memory; x is packed to be the right one.
//
// Floats are split into terms of bfloat16: three hold a float32, and one holds any value of a table of integers or of
// small floats. Terms that are both small are left out: three products of terms, or six where the table needs three of
// them. One row of x, transposed products, and tables of floats with zero points are AVX-512's.
#include "amx.h"
#include "int8_avx512.h"

namespace {

struct Lanes : Avx512Lanes {
  static constexpr int kGroup = 4;
};

using Kernels8 = Int8Kernels<Lanes>;

//
// Floats
//

constexpr int64_t kFloatRows = 32;     // of the weight in a unit, at most
constexpr int64_t kFloatBlock = 256;   // rows of x for which decoded rows are used
constexpr int64_t kFloatStride = 2 * kStep + 64;  // bytes of a decoded row of one term

struct Detail {
  int64_t rows, chunks, row_blocks, m_padded, panels;
  int64_t x_terms, w_terms;
  int64_t x, term;  // where packed x is in shared memory, and bytes of one of its terms
  int64_t scales, sums;
  int64_t mine;  // 1; AVX-512's own details are zero here
};

// The first three terms of a float: each is the bfloat16 next to what is left.
EQQ_INLINE void split(float value, float* terms) {
  for (int i = 0; i < 3; ++i) {
    uint32_t bits = Kernels8::float_to_bits(value);
    const bool finite = (bits & 0x7f800000) != 0x7f800000;
    uint32_t near = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    // What would round to infinity is cut; infinity is itself, and NaN stays one.
    if (!finite || (near & 0x7f800000) == 0x7f800000) near = bits & 0xffff0000;
    if (value != value) near = 0x7fc00000;
    terms[i] = Kernels8::bits_to_float(near);
    value = finite ? value - terms[i] : 0.0f;
  }
}

// How many terms the values of a table need: one or three. Those that are not finite are one.
EQQ_INLINE int64_t table_terms(const Problem& p) {
  for (int i = 0; i < 1 << p.bits; ++i) {
    float terms[3];
    split(p.table[i], terms);
    if (terms[1] != 0 && terms[1] == terms[1]) return 3;
  }
  return 1;
}

// Whether values less a zero point are integers that one term holds.
EQQ_INLINE bool small_integers(const Problem& p) {
  for (int i = 0; i < 1 << p.bits; ++i)
    if (!(p.table[i] >= -1 && p.table[i] <= 256) || p.table[i] != static_cast<float>(static_cast<int>(p.table[i]))) return false;
  return true;
}

bool takes(const Problem& p) {
  return !p.transpose && p.m > 1 && p.k > 0 && (p.zero_point == nullptr || small_integers(p));
}

void plan(const Problem* problem, int64_t threads, Plan* out) {
  const Problem& p = *problem;
  if (!takes(p)) return kMatmulAvx512Vbmi.plan(problem, threads, out);
  const Runs r = runs_of(p);
  Detail d;
  d.mine = 1;
  d.w_terms = table_terms(p);
  // Two terms have the 11 bits of a float16, and are far more exact than a result of 16 bits.
  const bool exact = p.precision == kExact && p.x_type == kFloat32;
  d.x_terms = p.x_type == kBFloat16 ? 1 : exact ? 3 : 2;
  if (!exact) d.w_terms = min64(d.w_terms, 2);
  d.m_padded = round_up(p.m, 16);
  d.row_blocks = div_up(d.m_padded, kFloatBlock);
  int64_t rows = div_up(p.n * p.batch * d.row_blocks, 4 * threads);
  rows = max64(rows, (int64_t{1} << 18) / max64(p.m * p.k, 1));
  d.rows = max64(min64(round_up(min64(rows, p.n), 16), kFloatRows), 16);
  d.chunks = div_up(p.n, d.rows);
  d.panels = div_up(d.m_padded, 32);
  d.x = 3 * 1024;
  d.term = 2 * d.m_padded * r.padded;
  out->shared_bytes = round_up(d.x + p.batch * d.x_terms * d.term, 64);
  out->parts = p.batch * d.panels;
  out->units = p.batch * d.row_blocks * d.chunks;
  d.scales = round_up(d.rows * d.w_terms * kFloatStride + kStepRoom, 64);
  d.sums = d.scales + round_up(4 * d.rows * kRunRoom, 64);
  out->own_bytes = d.sums + 4 * d.rows * min64(d.m_padded, kFloatBlock);
  static_assert(sizeof d == sizeof out->detail, "the last detail says whose they are");
  memcpy(out->detail, &d, sizeof d);
}

void prepare(const Problem* problem, const Plan* plan, void* memory, int64_t part) {
  const Problem& p = *problem;
  if (!takes(p)) return kMatmulAvx512Vbmi.prepare(problem, plan, memory, part);
  const Runs r = runs_of(p);
  Detail d;
  memcpy(&d, plan->detail, sizeof d);
  if (part == 0) {  // the terms of the table
    float* tables = static_cast<float*>(memory);
    for (int i = 0; i < 256; ++i) {
      float terms[3];
      split(p.table[i % (1 << p.bits)], terms);
      for (int t = 0; t < 3; ++t) tables[256 * t + i] = terms[t];
    }
  }
  const int64_t batch = part / d.panels, first = part % d.panels * 32, lanes = min64(32, d.m_padded - first);
  uint8_t* x = static_cast<uint8_t*>(memory) + d.x + batch * d.x_terms * d.term + 2 * first * r.padded;
  for (int64_t run = 0; run < r.count; ++run) {
    const int64_t length = run_length(r, p.k, run), start = run_start(r, run);
    for (int64_t at = 0; at < r.size; at += 128) {
      const int64_t room = min64(128, r.size - at), count = max64(min64(room, length - at), 0);
      for (int64_t i = 0; i < lanes; ++i) {
        float values[128] = {0};
        if (first + i < p.m && count > 0)
          Kernels8::read_floats(p, batch * p.x_batch + (first + i) * p.x_row + (start + at) * p.x_column, count, values);
        for (int64_t j = 0; j < room; j += 2) {
          float one[3], two[3];
          split(values[j], one);
          split(values[j + 1], two);
          for (int64_t t = 0; t < d.x_terms; ++t) {
            const uint32_t pair = Kernels8::float_to_bits(one[t]) >> 16 | Kernels8::float_to_bits(two[t]);
            memcpy(x + t * d.term + ((run * r.size + at + j) * lanes + 2 * i) * 2, &pair, 4);
          }
        }
      }
    }
  }
}

// The terms of the codes of one run of a step; what is beyond the codes is zero.
void decode(const Problem& p, const Detail& d, const float* tables, const uint8_t* codes, int64_t count, int64_t length,
            float zero, uint8_t* out) {
  const __m512i high = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21,
                                        19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  const __m512 off = _mm512_set1_ps((p.values == kValueInteger ? p.table[0] : 0.0f) - zero);
  for (int64_t at = 0; at < length; at += 32) {
    alignas(64) uint8_t some[32] = {0};
    const int64_t real = max64(min64(32, count - at), 0), room = min64(32, length - at);
    memcpy(some, codes + at, real);
    const __m512i c0 = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(some)));
    const __m512i c1 = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(some + 16)));
    const __mmask32 keep = real == 32 ? ~0u : (1u << real) - 1;
    for (int64_t t = 0; t < d.w_terms; ++t) {
      __m512 w0, w1;
      if (p.bits < 8) {
        const __m512 table = _mm512_loadu_ps(tables + 256 * t);
        w0 = _mm512_sub_ps(_mm512_permutexvar_ps(c0, table), _mm512_set1_ps(zero));
        w1 = _mm512_sub_ps(_mm512_permutexvar_ps(c1, table), _mm512_set1_ps(zero));
      } else if (p.values == kValueInteger) {
        w0 = _mm512_add_ps(_mm512_cvtepi32_ps(c0), off);
        w1 = _mm512_add_ps(_mm512_cvtepi32_ps(c1), off);
      } else {
        w0 = _mm512_sub_ps(_mm512_i32gather_ps(c0, tables + 256 * t, 4), _mm512_set1_ps(zero));
        w1 = _mm512_sub_ps(_mm512_i32gather_ps(c1, tables + 256 * t, 4), _mm512_set1_ps(zero));
      }
      const __m512i both = _mm512_permutex2var_epi16(_mm512_castps_si512(w0), high, _mm512_castps_si512(w1));
      _mm512_mask_storeu_epi16(out + t * kFloatStride + 2 * at, room == 32 ? ~0u : 0xffffu, _mm512_maskz_mov_epi16(keep, both));
    }
  }
}

// One tile of results for each half of up to 32 rows and 32 lanes, from all products of terms, the smallest first.
template <bool kTwoRows, bool kTwoLanes>
void multiply(const Detail& d, const uint8_t* w, const uint8_t* x, int64_t lanes, int64_t length, float (*results)[2][16][16]) {
  const int64_t depth = min64(length, 32), most = max64(d.w_terms, d.x_terms) - 1;
  const int64_t w_row = d.w_terms * kFloatStride, x_row = 4 * lanes;
  settle(w);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t order = most; order >= 0; --order)
    for (int64_t i = 0; i <= order; ++i) {
      const int64_t j = order - i;
      if (i >= d.w_terms || j >= d.x_terms) continue;
      for (int64_t k = 0; k < length; k += depth) {
        const uint8_t *ws = w + i * kFloatStride + 2 * k, *xs = x + j * d.term + 2 * k * lanes;
        _tile_loadd(4, ws, w_row);
        _tile_loadd(6, xs, x_row);
        _tile_dpbf16ps(0, 4, 6);
        if (kTwoLanes) {
          _tile_loadd(7, xs + 64, x_row);
          _tile_dpbf16ps(1, 4, 7);
        }
        if (kTwoRows) {
          _tile_loadd(5, ws + 16 * w_row, w_row);
          _tile_dpbf16ps(2, 5, 6);
          if (kTwoLanes) _tile_dpbf16ps(3, 5, 7);
        }
      }
    }
  _tile_stored(0, results[0][0], 64);
  if (kTwoLanes) _tile_stored(1, results[0][1], 64);
  if (kTwoRows) _tile_stored(2, results[1][0], 64);
  if (kTwoRows && kTwoLanes) _tile_stored(3, results[1][1], 64);
}

void run(const Problem* problem, const Plan* plan, const void* shared, void* memory, int64_t unit) {
  const Problem& p = *problem;
  if (!takes(p)) return kMatmulAvx512Vbmi.run(problem, plan, shared, memory, unit);
  const Runs r = runs_of(p);
  Detail d;
  memcpy(&d, plan->detail, sizeof d);
  const Integers raw = {};
  const int64_t chunk = unit % d.chunks, block = unit / d.chunks % d.row_blocks, batch = unit / d.chunks / d.row_blocks;
  const int64_t first = chunk * d.rows, count = min64(d.rows, p.n - first);
  const int64_t start = block * kFloatBlock, width = min64(kFloatBlock, d.m_padded - start);
  char* own = static_cast<char*>(memory);
  uint8_t* decoded = reinterpret_cast<uint8_t*>(own);
  uint8_t* room = decoded + d.rows * d.w_terms * kFloatStride;
  float* scales = reinterpret_cast<float*>(own + d.scales);
  float* sums = reinterpret_cast<float*>(own + d.sums);
  const float* tables = static_cast<const float*>(shared);
  const uint8_t* x = static_cast<const uint8_t*>(shared) + d.x + batch * d.x_terms * d.term + 2 * start * r.padded;
  memset(sums, 0, 4 * d.rows * width);
  configure(2 * min64(r.size, 32));
  Step s = first_step(r);
  do {
    const int64_t from = run_start(r, s.run) + s.offset;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = first_row(&p, batch) + first + i, block0 = s.run / r.per_block;
      decode_scales_avx512(&p, row, block0, (s.run + s.runs - 1) / r.per_block + 1, scales + i * kRunRoom);
      const int64_t end = run_start(r, s.run + s.runs - 1) + run_length(r, p.k, s.run + s.runs - 1);
      const int64_t to = s.runs == 1 ? min64(end, from + s.length) : end;
      const uint8_t* codes = to > from ? some_codes(p, raw, row, from, to, room) : room;
      for (int64_t run = 0; run < s.runs; ++run) {
        const int64_t real = max64(min64(s.length, run_length(r, p.k, s.run + run) - s.offset), 0);
        float zero = 0.0f;
        if (p.zero_point != nullptr) {
          const int64_t block_of_run = (s.run + run) / r.per_block;
          unpack_zero_points(p, row, block_of_run, block_of_run + 1, &zero);
        }
        decode(p, d, tables, real > 0 ? codes + run_start(r, s.run + run) + s.offset - from : codes, real, s.length, zero,
               decoded + i * d.w_terms * kFloatStride + 2 * run * s.length);
      }
    }
    for (int64_t m = 0; m < width; m += 32) {
      const int64_t lanes = min64(32, width - m);
      // Short sums are more exact than one long one.
      alignas(64) float results[2][2][16][16], step_sums[kFloatRows][2][16] = {};
      for (int64_t run = 0; run < s.runs; ++run) {
        const uint8_t* w = decoded + 2 * run * s.length;
        const uint8_t* xs = x + 2 * (m * r.padded + ((s.run + run) * r.size + s.offset) * lanes);
        if (lanes > 16) {
          count > 16 ? multiply<true, true>(d, w, xs, lanes, s.length, results)
                     : multiply<false, true>(d, w, xs, lanes, s.length, results);
        } else {
          count > 16 ? multiply<true, false>(d, w, xs, lanes, s.length, results)
                     : multiply<false, false>(d, w, xs, lanes, s.length, results);
        }
        for (int64_t i = 0; i < count; ++i)
          for (int64_t v = 0; v < lanes / 16; ++v) {
            float* sum = step_sums[i][v];
            const __m512 scale = _mm512_set1_ps(scales[i * kRunRoom + (r.per_block == 1 ? run : 0)]);
            _mm512_store_ps(sum, _mm512_fmadd_ps(_mm512_load_ps(results[i / 16][v][i % 16]), scale, _mm512_load_ps(sum)));
          }
      }
      for (int64_t i = 0; i < count; ++i)
        for (int64_t v = 0; v < lanes / 16; ++v) {
          float* sum = sums + i * width + m + 16 * v;
          _mm512_storeu_ps(sum, _mm512_add_ps(_mm512_load_ps(step_sums[i][v]), _mm512_loadu_ps(sum)));
        }
    }
  } while (next_step(r, s));
  _tile_release();
  const int64_t base = batch * p.y_batch + start * p.y_row + first * p.y_column, real = min64(width, p.m - start);
  for (int64_t m = 0; m < real; ++m)
    for (int64_t i = 0; i < count; ++i) Kernels8::write(p, base + m * p.y_row + i * p.y_column, sums[i * width + m]);
}

}  // namespace

extern const MatmulKernel kMatmulAmx = {plan, prepare, run};
extern const Isa kIsaAmx = {"amx", &kMatmulAmx, &kDecodeAvx512Vbmi, &kInt8Amx};
