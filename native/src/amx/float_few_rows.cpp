// Two to four rows of floats on AMX, times a weight of small integers.
//
// Numbers of x become integers of 31 bits, relative to the largest of a group of codes, and these four slices of a
// byte. Each slice is a row of a tile of its own: one product of tiles, of 16 rows of the weight and 64 codes, meets
// all slices of all rows. That is eight times the codes that tiles of bfloat16 take at a time, and sums of slices are
// exact.
//
// With two rows of x, slices of a group of codes stand in half of a tile, and the next group in the other half, with
// zeros in between. So one tile of results sums both groups apart, before they are scaled.
//
// One row stays with AVX-512, which need not write decoded codes to memory for tiles to load them.
#include "amx/float_few_tiles.h"

namespace {

int64_t grain_of(const Problem& p) {
  if (p.blocks <= 1 || p.block_size % 64 == 0) return 64;
  return p.block_size == 32 ? 32 : 0;
}

EQQ_INLINE int64_t x_rows_of(const Problem& p) { return p.m > 2 ? 4 : 2; }

bool accepts(const Problem* problem) {
  const Problem& p = *problem;
  // A group of codes with slices of all rows fills no more than a tile.
  return !p.transpose && p.k > 0 && p.m > 1 && p.m <= kMostRowsOfX && x_rows_of(p) * 64 <= kSlots * grain_of(p) &&
         integer_factor(p) > 0;
}

void plan(const Problem* problem, int64_t threads, Plan* out) {
  const Problem& p = *problem;
  Detail d;
  d.x_rows = x_rows_of(p);
  d.groups = kSlots / d.x_rows;
  d.grain = grain_of(p);
  d.flush = d.groups * d.grain / 64;
  d.step = p.bits == 1 ? kMostTiles : 4;
  d.tiles = round_up(div_up(p.k, 64), d.step);
  d.factor = integer_factor(p);
  const int64_t rows = max64(div_up(p.n * p.batch, 8 * threads), (int64_t{1} << 18) / p.k);
  d.rows = min64(round_up(min64(rows, p.n), kStrip), kUnitRows);
  d.chunks = div_up(p.n, d.rows);
  d.batch_bytes = flag_at(d) + 64;
  out->shared_bytes = p.batch * d.batch_bytes;
  out->parts = p.batch;
  out->units = p.batch * d.chunks;
  // Decoded steps, results, sums, scales, what codes are off, and the codes of a row.
  out->own_bytes = 2 * d.step * 2 * kTile + 2 * 2 * kTile + 2 * kTile + 4 * kStrip * kStretch * 4 + 64 * kMostTiles +
                   round_up(kStepRoom, 64);
  set_detail(d, out);
}

//
// x
//

// Up to sixteen numbers of a row, from `k` on; zeros beyond the last.
EQQ_INLINE F read_some(const Problem& p, int64_t at, int64_t k) {
  if (p.x_column == 1) return load_some(p.x, p.x_type, at + k, first_few(p.k - k));
  float values[16] = {0};
  for (int64_t i = 0; i < min64(p.k - k, 16); ++i)
    _mm_store_ss(values + i, _mm512_castps512_ps128(load_some(p.x, p.x_type, at + (k + i) * p.x_column, 1)));
  return _mm512_loadu_ps(values);
}

EQQ_INLINE float power_of_two(int exponent) {
  const int32_t bits = (127 + exponent) << 23;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Sixteen numbers as slices: four numbers in each quarter, low slices first. They go to rows of a tile below each
// other. Returns the sums of each slice.
EQQ_INLINE __m128i write_slices(I numbers, uint8_t* out) {
  const I slices = slices_apart(numbers);
  _mm_store_si128(reinterpret_cast<__m128i*>(out), _mm512_castsi512_si128(slices));
  _mm_store_si128(reinterpret_cast<__m128i*>(out + 64), _mm512_extracti32x4_epi32(slices, 1));
  _mm_store_si128(reinterpret_cast<__m128i*>(out + 128), _mm512_extracti32x4_epi32(slices, 2));
  _mm_store_si128(reinterpret_cast<__m128i*>(out + 192), _mm512_extracti32x4_epi32(slices, 3));
  const I four = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), slices);
  const __m256i two = _mm256_add_epi32(_mm512_castsi512_si256(four), _mm512_extracti64x4_epi64(four, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
}

// Packs x. Returns whether its numbers are ordinary.
//
// A number much smaller than the largest of its group keeps few bits. If many are, a row of the weight may multiply
// only such numbers.
bool pack(const Problem& p, const Detail& d, int64_t batch, char* shared) {
  Flush* flushes = reinterpret_cast<Flush*>(shared);
  uint8_t* tiles = reinterpret_cast<uint8_t*>(flushes + flushes_of(d));
  int64_t tiny = 0;
  for (int64_t row = 0; row < p.m; ++row) {
    const int64_t at = batch * p.x_batch + row * p.x_row;
    for (int64_t group = 0; group * d.grain < p.k; ++group) {
      F values[4];
      I most = _mm512_setzero_si512();
      for (int64_t i = 0; i < d.grain / 16; ++i) {
        values[i] = read_some(p, at, group * d.grain + 16 * i);
        most = larger_magnitudes(most, values[i]);
      }
      const uint32_t largest = _mm512_reduce_max_epu32(most);
      const int exponent = static_cast<int>(largest >> 23) - 127;
      if (largest == 0) continue;
      if (exponent < -64 || exponent > 64) return false;
      const int64_t slot = group % d.groups * d.x_rows + row;
      Flush& flush = flushes[group / d.groups];
      __m128i sums = _mm_setzero_si128();
      for (int64_t i = 0; i < d.grain / 16; ++i) {
        const I numbers = _mm512_cvtps_epi32(_mm512_mul_ps(values[i], _mm512_set1_ps(power_of_two(29 - exponent))));
        tiny += __builtin_popcount(_mm512_cmplt_epu32_mask(_mm512_abs_epi32(numbers), _mm512_set1_epi32(1 << 16)) &
                                   _mm512_cmp_ps_mask(values[i], _mm512_setzero_ps(), _CMP_NEQ_OQ));
        const int64_t k = group * d.grain + 16 * i;
        sums = _mm_add_epi32(sums, write_slices(numbers, tiles + k / 64 * kTile + k % 64 * 16 + 16 * slot));
      }
      _mm_store_si128(reinterpret_cast<__m128i*>(flush.slices + 4 * slot), sums);
      for (int slice = 0; slice < 4; ++slice)
        flush.factor[4 * slot + slice] = power_of_two(exponent - 29 + 8 * slice) / static_cast<float>(d.factor);
    }
    if (tiny > p.k / 64) return false;
    tiny = 0;
  }
  const I lowest = _mm512_set1_epi32(p.zero_point == nullptr ? lowest_integer(p, d.factor) : 0);
  for (Flush* flush = flushes; flush < flushes + flushes_of(d); ++flush)
    _mm512_store_si512(flush->off, _mm512_mullo_epi32(_mm512_load_si512(flush->slices), lowest));
  return true;
}

void prepare(const Problem* problem, const Plan* plan, void* memory, int64_t batch) {
  const Detail d = detail_of<Detail>(plan);
  char* shared = static_cast<char*>(memory) + batch * d.batch_bytes;
  memset(shared, 0, d.batch_bytes);
  shared[flag_at(d)] = pack(*problem, d, batch, shared);
}

bool accepts_packed(const Problem* problem, const Plan* plan, const void* memory) {
  const Detail d = detail_of<Detail>(plan);
  for (int64_t batch = 0; batch < problem->batch; ++batch)
    if (!static_cast<const char*>(memory)[batch * d.batch_bytes + flag_at(d)]) return false;
  return true;
}

//
// Units
//

// Adds the slices of the sums of a strip up, of which `count` rows are real, and writes them from `base` on.
void write_strip(const Problem& p, const Detail& d, int64_t base, int64_t count, const float* sums) {
  for (int64_t half = 0; half < count; half += 16) {
    F square[16];
    for (int64_t i = 0; i < 16; ++i) square[i] = _mm512_load_ps(sums + 16 * (half + i));
    avx512::Simd::transpose(square);
    const int64_t at = base + half * p.y_column, rows = min64(16, count - half);
    for (int64_t m = 0; m < p.m; ++m) {
      F sum = _mm512_setzero_ps();  // small slices first
      for (int slice = 0; slice < 4; ++slice)
        for (int64_t slot = m; slot < kSlots; slot += d.x_rows) sum = _mm512_add_ps(sum, square[4 * slot + slice]);
      if (p.y_column == 1) {
        store_some(p, at + m * p.y_row, sum, first_few(rows));
      } else {
        alignas(64) float values[16];
        _mm512_store_ps(values, sum);
        for (int64_t i = 0; i < rows; ++i)
          store_some(p, at + m * p.y_row + i * p.y_column, _mm512_set1_ps(values[i]), 1);
      }
    }
  }
}

// The group of each slice of a result.
I groups_of_lanes(const Detail& d) {
  alignas(64) int32_t lanes[16];
  for (int i = 0; i < 16; ++i) lanes[i] = static_cast<int32_t>(i / 4 / d.x_rows);
  return _mm512_load_si512(lanes);
}

// A step of `tiles` tiles, whose results are added up a few at a time.
template <int kBits>
EQQ_INLINE void multiply_step(Unit& u, Work& a, int64_t strip, int64_t step, int64_t tiles, const Flush* flushes_x,
                              Pending& last) {
  const Problem& p = u.p;
  const Detail& d = u.d;
  const int64_t flushes = d.step / d.flush;
  for (int64_t i = 0; i < flushes && i * d.flush < tiles; ++i) {
    const int64_t flush = step * flushes + i, group = flush * d.groups;
    if (group > 0 && group % kStretch == 0 && p.blocks > 1) u.fetch(strip, group / kStretch);
    const int64_t slot = p.blocks > 1 ? group / kStretch & 1 : 0, end = min64((i + 1) * d.flush, tiles);
    if (last.turn == 0) {
      multiply_some<kBits, 1>(a, i * d.flush, end, last);
    } else {
      multiply_some<kBits, 0>(a, i * d.flush, end, last);
    }
    last = {1 - last.turn, group % kStretch, u.scale + 512 * slot,
            p.zero_point == nullptr ? nullptr : u.off + 512 * slot, flushes_x + flush};
  }
}

template <int kBits>
void run_unit(const Problem& p, const Detail& d, const char* shared, char* own, int64_t batch, int64_t first,
              int64_t count) {
  const Flush* flushes_x = reinterpret_cast<const Flush*>(shared);
  const uint8_t* x = reinterpret_cast<const uint8_t*>(flushes_x + flushes_of(d));
  uint8_t* decoded[2] = {reinterpret_cast<uint8_t*>(own), reinterpret_cast<uint8_t*>(own) + d.step * 2 * kTile};
  own += 2 * d.step * 2 * kTile;
  Work a;
  a.results = reinterpret_cast<float (*)[512]>(own);
  a.sums = reinterpret_cast<float*>(own + 4 * kTile);
  own += 6 * kTile;
  float* scale = reinterpret_cast<float*>(own);
  int32_t* off = reinterpret_cast<int32_t*>(scale + 2 * kStrip * kStretch);
  own += 4 * kStrip * kStretch * 4;
  const int64_t weight = first_row(&p, batch) + first;
  const int64_t whole = p.k / (512 / kBits) * (512 / kBits);
  uint8_t *const bytes = reinterpret_cast<uint8_t*>(own), *const room = bytes + 64 * kMostTiles;
  const I table = integers_table(p, d.factor);
  Unit u = {p, d, weight, count, whole, table, lowest_integer(p, d.factor), scale, off, bytes, room};
  a.lanes = groups_of_lanes(d);
  const int64_t strips = div_up(count, kStrip), tiles = div_up(p.k, 64), steps = div_up(tiles, d.step);
  const int64_t strip_bytes = kStrip * p.words;
  const uint8_t* codes = p.codes + weight * p.words;
  const auto tiles_in = [&](int64_t step) { return min64(d.step, tiles - step * d.step); };
  const auto is_direct = [&](int64_t strip, int64_t step) { return u.direct(strip, step * d.step + tiles_in(step)); };
  // Has a step decoded meanwhile, or at once what takes long.
  const auto begin = [&](int64_t strip, int64_t step, uint8_t* out) {
    const bool direct = is_direct(strip, step);
    const int64_t segments = direct && kBits < 8 ? tiles_in(step) / (8 / kBits) : 0;
    a.decoding = {codes + strip * strip_bytes + step * d.step * 8 * p.bits, p.words, segments, 0, u.table, out};
    if (!direct) u.decode_slowly(strip, step * d.step, tiles_in(step), out);
  };
  const auto finish = [&] {
    if constexpr (kBits < 8)
      while (a.decoding.done < kStrip * a.decoding.segments) Decoding::rows<kBits, 2 * kBits>(a.decoding);
  };
  configure(64, 1 << 6 | 1 << 7);
  int64_t turn = 0;
  begin(0, 0, decoded[0]);
  finish();
  for (int64_t strip = 0; strip < strips; ++strip) {
    memset(a.sums, 0, 2 * kTile);
    // Before the first results, pending ones are zero.
    memset(a.results, 0, 4 * kTile);
    clear_results<0>();
    clear_results<1>();
    static const Flush none = {};
    Pending last = {1, 0, scale, nullptr, &none};
    a.ahead.at = reinterpret_cast<const char*>(codes + (strip + 1) * strip_bytes);
    a.ahead.end = reinterpret_cast<const char*>(codes + min64(kStrip * (strip + 2), count) * p.words);
    u.fetch(strip, 0);
    for (int64_t step = 0; step < steps; ++step, turn ^= 1) {
      const bool direct = kBits == 8 && is_direct(strip, step);
      a.w = direct ? codes + strip * strip_bytes + step * d.step * 64 : decoded[turn];
      a.w_row = direct ? p.words : 64;
      a.w_next = direct ? 64 : 2 * kTile;
      a.w_below = direct ? 16 * p.words : kTile;
      a.x = x + step * d.step * kTile;
      a.decoding.segments = a.decoding.done = 0;
      if (step + 1 < steps) {
        begin(strip, step + 1, decoded[turn ^ 1]);
      } else if (strip + 1 < strips) {
        begin(strip + 1, 0, decoded[turn ^ 1]);
      }
      multiply_step<kBits>(u, a, strip, step, tiles_in(step), flushes_x, last);
      finish();
    }
    last.turn == 0 ? store_results<0>(a.results) : store_results<1>(a.results);
    add_results(a, last);
    write_strip(p, d, batch * p.y_batch + (first + kStrip * strip) * p.y_column, min64(kStrip, count - kStrip * strip),
                a.sums);
  }
  _tile_release();
}

void run(const Problem* problem, const Plan* plan, const void* memory, void* own, int64_t unit) {
  const Problem& p = *problem;
  const Detail d = detail_of<Detail>(plan);
  const int64_t batch = unit / d.chunks, first = unit % d.chunks * d.rows, count = min64(d.rows, p.n - first);
  const char* shared = static_cast<const char*>(memory) + batch * d.batch_bytes;
  const auto run_some = p.bits == 8 ? run_unit<8> : p.bits == 4 ? run_unit<4> : p.bits == 2 ? run_unit<2> : run_unit<1>;
  run_some(p, d, shared, static_cast<char*>(own), batch, first, count);
}

}  // namespace

namespace amx {
extern const MatmulKernel kMatmul = {plan, prepare, run, accepts, accepts_packed, &kMatmulManyAmx};
}
