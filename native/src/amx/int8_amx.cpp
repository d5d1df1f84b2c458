// Integer products on AMX: `tdpbusd` multiplies 16 rows of the weight by 16 of x, 64 codes at a time. One row of x
// stays with AVX-512.
//
// x is packed in panels of 16 rows: a tile of it, 16 groups of four codes of each row, is 1 KB in a row. Rows of the
// weight are multiplied where they lie if they have a byte for each code, and decoded a step at a time otherwise: well
// before tiles are loaded, since a load stalls on bytes that are still on their way to the cache.
#include "amx/amx.h"
#include "float/avx512.h"
#include "int8/int8_vnni.h"

namespace {

using Kernels8 = Int8Kernels<Vnni>;

constexpr int64_t kGroupRows = 32;         // of the weight that are multiplied at a time: two tiles
constexpr int64_t kMostUnitRows = 256;     // of the weight in a unit
constexpr int64_t kMostStripRows = 1024;   // of the weight that a panel of x meets in turn
constexpr int64_t kCachedBytes = 1 << 20;  // of x or of the weight that a unit reads again and again: they stay in L2
constexpr int64_t kMostPanels = 16;
constexpr int64_t kLongRun = 512;                // codes of a run, above which tiles add up whole steps
constexpr int64_t kDecoded = 1024;               // codes of a row that are decoded at a time
constexpr int64_t kStretchRuns = 256;            // whose scales are decoded at a time
constexpr int64_t kStretch = kStretchRuns + 16;  // and room to write more
constexpr int64_t kPartValues = 1 << 14;         // of x, for which another thread is worth while

struct Detail {
  int64_t rows, chunks, strip;        // of the weight in a unit; units of all its rows; rows that a panel meets in turn
  int64_t panels, block, row_blocks;  // of x; those in a unit; units of all of them
  int64_t group, pieces;              // panels of a part of the preparation, and parts of those
  int64_t sums, x;                    // where they are in shared memory: sums of codes for each tile, and codes
  int64_t scale, results;             // likewise in the memory of a thread
};

bool takes(const Int8Problem& q) { return q.p.m + q.affine > 1 && q.p.k > 0; }

EQQ_INLINE int64_t row_codes(const Runs& r) { return round_up(r.padded, 64); }
// Panels begin where pages do.
EQQ_INLINE int64_t panel_bytes(const Runs& r) { return round_up(16 * row_codes(r), 4096); }
EQQ_INLINE char* page(const void* p) {
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p) + 4095) & ~uintptr_t{4095});
}
EQQ_INLINE int64_t row_tiles(const Runs& r) { return row_codes(r) / depth_of(r); }
EQQ_INLINE bool is_long(const Runs& r) { return r.count == 1 || r.size > kLongRun; }
// How far scales of rows are apart. A single one of each needs no room: what is too much the next row writes over.
EQQ_INLINE int64_t stretch_of(const Runs& r) { return r.count == 1 ? 1 : kStretch; }
// Those of all rows of a strip.
EQQ_INLINE int64_t stretches(const Runs& r, int64_t strip) { return round_up(strip * stretch_of(r), 16) + 16; }
// Whether rows of the weight are multiplied where they lie.
EQQ_INLINE bool is_direct(const Problem& p, const Runs& r) { return p.bits == 8 && r.padded == p.k; }

void plan(const Int8Problem* problem, int64_t threads, Plan* out) {
  const Problem& p = problem->p;
  if (!takes(*problem)) return kInt8Avx512Vnni.plan(problem, threads, out);
  const Runs r = runs_of(p);
  Detail d;
  d.panels = div_up(p.m, 16);
  // With many rows of x the weight stays in L2, and each pair of panels meets many of its rows: so y is written nearly
  // in its order. With fewer it is x that stays.
  if (d.panels > kMostPanels && r.count == 1 && (is_direct(p, r) || row_codes(r) <= kDecoded)) {
    const int64_t chunks = div_up(p.n, max64(min64(kCachedBytes / row_codes(r), kMostStripRows), kGroupRows));
    const int64_t enough = div_up(4 * threads, div_up(d.panels, 2) * p.batch);  // for all threads
    d.rows = d.strip = round_up(div_up(p.n, max64(chunks, enough)), kGroupRows);
    d.chunks = div_up(p.n, d.rows);
    const int64_t least =
        max64(div_up(d.panels * d.chunks * p.batch, 8 * threads), (int64_t{1} << 19) / (16 * d.rows * p.k));
    d.block = min64(round_up(max64(least, 1), 2), kMostPanels);
    d.row_blocks = div_up(d.panels, d.block);
  } else {
    d.block = min64(max64(kCachedBytes / (16 * row_codes(r)), 2), min64(kMostPanels, d.panels));
    d.row_blocks = div_up(d.panels, d.block);
    int64_t rows = div_up(p.n * p.batch * d.row_blocks, 8 * threads);
    rows = max64(rows, (int64_t{1} << 19) / (p.m * p.k));
    d.rows = min64(round_up(min64(rows, p.n), 16), kMostUnitRows);
    d.chunks = div_up(p.n, d.rows);
    d.strip = is_long(r) ? kGroupRows : 16;
  }
  d.group = min64(max64(max64(kPartValues / (16 * p.k), d.panels / (8 * threads)), 1), d.panels);
  const int64_t groups = div_up(d.panels, d.group);
  // Where there are fewer panels than threads, several share one: each finds the scales of all rows for itself.
  d.pieces = groups == d.panels ? max64(min64(div_up(threads, groups * p.batch), 16 * p.k / kPartValues), 1) : 1;
  d.sums = round_up(8 * p.batch * d.panels * 16, 64);
  d.x = d.sums + 64 * p.batch * d.panels * row_tiles(r);
  out->shared_bytes = d.x + 4096 + (p.batch * d.panels + problem->affine) * panel_bytes(r);  // and a panel of ones
  out->parts = p.batch * groups * d.pieces;
  out->units = p.batch * d.row_blocks * d.chunks;
  d.scale = d.strip * kDecoded;
  d.results = round_up(d.scale + 2 * 3 * 4 * stretches(r, d.strip), 4096);
  out->own_bytes = 4096 + d.results + 2 * max64(d.block, 2) * 4 * kGroupRows * 16;
  set_detail(d, out);
}

//
// x
//

// Packs some of a panel: `pieces` of them, of which this is one.
void pack_panel(const Int8Problem& q, const Runs& r, const Detail& d, char* shared, int64_t batch, int64_t panel,
                int64_t piece) {
  const Problem& p = q.p;
  const int64_t depth = depth_of(r), at = batch * d.panels + panel;
  Packed a = {batch, 16 * panel, piece, d.pieces, (panel + 1) % d.group > 0, nullptr, nullptr, nullptr};
  a.out = reinterpret_cast<uint8_t*>(page(shared + d.x)) + at * panel_bytes(r);
  if (piece == 0) {
    a.scales = reinterpret_cast<float*>(shared) + 16 * at;
    a.shifts = reinterpret_cast<int32_t*>(a.scales) + 16 * p.batch * d.panels;
  }
  int32_t* sums = reinterpret_cast<int32_t*>(shared + d.sums) + 16 * at * row_tiles(r);
  const I factor = Vnni::spread(p.zero_point != nullptr ? 1 : integers_of(p).lowest), ones = _mm512_set1_epi8(1);
  pack_rows<Kernels8>(q, r, a, [=](int64_t position, int64_t width) {
    for (int64_t tile = 0; tile < width / depth; ++tile) {
      I sum = Vnni::zero();
      for (int64_t i = tile * depth / 4; i < (tile + 1) * depth / 4; ++i)
        sum = Vnni::dot(sum, ones, Vnni::load(a.out + 16 * position + 64 * i));
      Vnni::store(sums + 16 * (position / depth + tile), Vnni::mul(sum, factor));
    }
  });
}

// A panel of rows that are all ones: its products are sums of the weight.
void pack_ones(const Problem& p, const Runs& r, uint8_t* out) {
  memset(out, 0, 16 * row_codes(r));
  for (int64_t run = 0; run < r.count; ++run, out += 16 * r.size) {
    const int64_t length = run_length(r, p.k, run);
    memset(out, 1, 64 * (length / 4));
    for (int64_t i = length / 4 * 4; i < length; ++i)
      for (int64_t lane = 0; lane < 16; ++lane) out[16 * (i / 4 * 4) + 4 * lane + i % 4] = 1;
  }
}

void prepare(const Int8Problem* problem, const Plan* plan, void* memory, int64_t part) {
  const Problem& p = problem->p;
  if (!takes(*problem)) return kInt8Avx512Vnni.prepare(problem, plan, memory, part);
  const Runs r = runs_of(p);
  const Detail d = detail_of<Detail>(plan);
  if (problem->affine && part == 0)
    pack_ones(p, r,
              reinterpret_cast<uint8_t*>(page(static_cast<char*>(memory) + d.x)) + p.batch * d.panels * panel_bytes(r));
  const int64_t piece = part % d.pieces, groups = div_up(d.panels, d.group);
  const int64_t group = part / d.pieces % groups, batch = part / d.pieces / groups;
  for (int64_t i = group * d.group; i < min64((group + 1) * d.group, d.panels); ++i)
    pack_panel(*problem, r, d, static_cast<char*>(memory), batch, i, piece);
}

//
// The weight
//

// Whole segments of a row as bytes, 64 codes 1 KB after the other.
template <int kBits>
EQQ_INLINE void unpack(const uint8_t* bytes, int64_t segments, I table, bool look_up, uint8_t* out) {
  for (int64_t s = 0; s < segments; ++s) {
    const I all = Vnni::load(bytes + 64 * s);
#pragma GCC unroll 8
    for (int i = 0; i < 8 / kBits; ++i, out += 1024) {
      const I codes = Vnni::codes<kBits>(all, i);
      Vnni::store(out, look_up ? Vnni::lookup(table, codes) : codes);
    }
  }
}

// The codes of a step of some rows as tiles of 16 rows and 64 codes, each 1 KB; those of the next 16 rows are
// `16 * kDecoded` bytes on.
void decode(const Problem& p, const Runs& r, const Integers& v, const Step& s, int64_t row, int64_t count,
            uint8_t* decoded) {
  const int64_t from = Kernels8::step_start(r, s), segment = 64 * (8 / p.bits), codes = step_codes(s);
  const uint8_t* bytes = p.codes + row * p.words + from * p.bits / 8;
  const bool whole = in_a_row(r, s) && from % segment == 0 && codes % segment == 0 && from + codes <= p.k;
  const bool look_up = v.looks_up || v.shift > 0;
  const I table = look_up ? Vnni::table(v.table) : Vnni::zero();
  for (int64_t i = 0; i < count; ++i, bytes += p.words) {
    uint8_t* out = decoded + i / 16 * 16 * kDecoded + i % 16 * 64;
    if (whole) {
      if (p.bits == 8) unpack<8>(bytes, codes / segment, table, false, out);
      if (p.bits == 4) unpack<4>(bytes, codes / segment, table, look_up, out);
      if (p.bits == 2) unpack<2>(bytes, codes / segment, table, look_up, out);
      if (p.bits == 1) unpack<1>(bytes, codes / segment, table, look_up, out);
    } else {
      uint8_t room[kStepRoom], codes_of_row[kStepRoom];
      int32_t unused[kRunRoom];
      const uint8_t* at = Kernels8::decode(p, r, v, s, row + i, unused, true, room, codes_of_row);
      for (int64_t j = 0; j < codes; j += 64) Vnni::store(out + 16 * j, Vnni::load(at + j));
    }
  }
}

// Scales of runs `first` to `last`, and what codes are off, of some rows `stretch_of` apart.
void decode_scales(const Problem& p, const Runs& r, const Integers& v, int64_t row, int64_t count, int64_t first,
                   int64_t last, float* scale, int32_t* offset) {
  const int64_t from = first / r.per_block, to = (last - 1) / r.per_block + 1, stretch = stretch_of(r);
  const bool together = r.count == 1 && p.row_scale == nullptr;
  if (together) Vnni::scales(&p, row, 0, count, scale);
  for (int64_t i = 0; i < count; ++i, ++row, scale += stretch, offset += stretch) {
    if (!together && p.scale_kind == kScaleFloat32 && p.row_scale == nullptr) {
      const float* scales = static_cast<const float*>(p.scale) + row * p.blocks + from;
      for (int64_t j = 0; j < to - from; j += 16)
        Vnni::store_f(scale + j, _mm512_maskz_loadu_ps(first_few(to - from - j), scales + j));
    } else if (!together) {
      Vnni::scales(&p, row, from, to, scale);
    }
    if (p.zero_point != nullptr) Kernels8::offsets(p, v, row, from, to, offset);
  }
}

//
// Products
//

// `kGroupRows` rows of the weight, one or two panels, and one step.
struct Block {
  const uint8_t* w;
  int64_t w_row, w_next, w_below;  // bytes to the next row, 64 codes and 16 rows
  const uint8_t* x;
  int64_t x_panel;        // bytes
  const int32_t* sums_x;  // of the tiles of these runs
  const int32_t* off;     // of long runs, their sums for either panel
  const float* scale;     // for rows and runs, `stretch` apart
  const int32_t* offset;  // likewise what codes are off; null if it is in `sums_x`
  const int32_t* shift;   // of the panels, what their codes are too much
  int32_t* weights;       // for rows and runs, `stretch` apart: sums of the weight; null without zero points of x
  int64_t stretch;
  float* sums;       // of the tiles of results: 16 x 16; those of a panel lie side by side
  int32_t* partial;  // likewise those of a run that has not ended, or room for a page
  int64_t runs, length, depth;
  bool begins, ends;     // runs
  bool first, last;      // whether there are no runs before, or after
  int64_t y;             // where results begin
  int64_t lanes, count;  // of those: rows of x, and of the weight
  const float* x_scale;
};

EQQ_INLINE I sum_of_tiles(const int32_t* sums, int64_t tiles) {
  I sum = Vnni::load(sums);
  for (int64_t i = 1; i < tiles; ++i) sum = Vnni::add(sum, Vnni::load(sums + 16 * i));
  return sum;
}

// Sums of products of codes are brought to those of what they mean. `at`: where the row and run are among scales.
template <bool kCorrects>
EQQ_INLINE I corrected(const Block& a, I sum, I off, I shift, int64_t at) {
  if (!kCorrects) return Vnni::add(sum, off);
  sum = Vnni::add(sum, a.offset != nullptr ? Vnni::mul(off, Vnni::spread(a.offset[at])) : off);
  if (a.weights == nullptr) return sum;
  return _mm512_sub_epi32(sum, Vnni::mul(shift, Vnni::spread(a.weights[at])));
}

// Memory that results of a block will be written over: stores to so many places do not fetch it in time.
struct Lines {
  const char* at;
  int64_t rows, bytes, next;
  EQQ_INLINE void some(Lines& l, int64_t rows) {
    for (const int64_t rest = max64(l.rows - rows, 0); l.rows > rest; --l.rows, l.at += l.next)
      for (int64_t i = 0; i < l.bytes; i += 64) _mm_prefetch(l.at + i, _MM_HINT_T1);
  }
};

EQQ_INLINE Lines results_of(const Problem& p, const Block& a) {
  const int64_t item = p.x_type == kFloat32 ? 4 : 2;
  const char* y = static_cast<const char*>(p.y) + item * a.y;
  if (!a.ends || !a.last) return {y, 0, 0, 0};
  if (p.y_row == 1) return {y, a.count, item * a.lanes, item * p.y_column};
  return {y, a.lanes, p.y_column == 1 ? item * a.count : 0, item * p.y_row};
}

// Takes a tile of sums, of 16 rows of the weight and a panel: keeps it for the runs to come, or scales and writes it.
EQQ_INLINE void put_tile(const Problem& p, const Block& a, int64_t half, int64_t panel, F* tile) {
  if (!a.last) {
    float* sums = a.sums + 256 * (2 * panel + half);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) Vnni::store_f(sums + 16 * i, tile[i]);
    return;
  }
  const int64_t lanes = min64(16, a.lanes - 16 * panel), count = min64(16, a.count - 16 * half);
  const int64_t base = a.y + 16 * panel * p.y_row + 16 * half * p.y_column;
  const F scale = Vnni::load_f(a.x_scale + 16 * panel);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) tile[i] = _mm512_mul_ps(tile[i], scale);
  write_square(p, base, count, lanes, tile);
}

// Sums so far of a tile.
EQQ_INLINE void take_tile(const Block& a, int64_t half, int64_t panel, F* tile) {
  const float* sums = a.sums + 256 * (2 * panel + half);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) tile[i] = a.first ? Vnni::zero_f() : Vnni::load_f(sums + 16 * i);
}

// Runs of some blocks. Four tiles take turns: a result is stored two runs after it was multiplied, and scaled one run
// later. It is stored in the quarter of a page of what was just loaded: a load of a tile waits for earlier stores to
// addresses that are a multiple of 4 KB away.
template <bool kCorrects>
void short_runs(const Problem& p, const Block& a, Ahead& ahead) {
  F sums[16];
  take_tile(a, 0, 0, sums);
  Lines y = results_of(p, a);
  Lines::some(y, y.rows);
  const int64_t tiles = a.length / a.depth;
  const I shift = kCorrects ? Vnni::load(a.shift) : Vnni::zero();
  settle(a.w);
#define EQQ_RUN(TILE, STORED, A, B)                                                          \
  {                                                                                          \
    const int64_t run = first + TILE;                                                        \
    if (run < a.runs) {                                                                      \
      _tile_zero(TILE);                                                                      \
      for (int64_t t = 0; t < tiles; ++t) {                                                  \
        const int64_t k = run * a.length + t * a.depth;                                      \
        _tile_loadd(A, a.w + k / 64 * a.w_next + k % 64, a.w_row);                           \
        _tile_loadd(B, a.x + 16 * k, 64);                                                    \
        _tile_dpbusd(TILE, A, B);                                                            \
        Ahead::some(ahead, ahead.lines);                                                     \
      }                                                                                      \
    }                                                                                        \
    if (run >= 2 && run - 2 < a.runs) _tile_stored(STORED, a.partial + 256 * TILE, 64);      \
    if (run >= 3 && run - 3 < a.runs) {                                                      \
      const int32_t* results = a.partial + 256 * ((TILE + 3) % 4);                           \
      const I off = sum_of_tiles(a.sums_x + 16 * (run - 3) * tiles, tiles);                  \
      _Pragma("GCC unroll 16") for (int i = 0; i < 16; ++i) {                                \
        const int64_t at = i * kStretch + run - 3;                                           \
        const I sum = corrected<kCorrects>(a, Vnni::load(results + 16 * i), off, shift, at); \
        sums[i] = Vnni::fma(Vnni::to_f(sum), Vnni::spread_f(a.scale[at]), sums[i]);          \
      }                                                                                      \
    }                                                                                        \
  }
  for (int64_t first = 0; first < a.runs + 3; first += 4) {
    EQQ_RUN(0, 2, 4, 6)
    EQQ_RUN(1, 3, 5, 7)
    EQQ_RUN(2, 0, 4, 6)
    EQQ_RUN(3, 1, 5, 7)
  }
#undef EQQ_RUN
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) Vnni::store_f(a.sums + 16 * i, sums[i]);
}

// A block whose long run has ended. Its sums are scaled and written while the next block is multiplied: a tile is
// stored some time after its last product.
struct Finished {
  const Block* block;
  int64_t tiles = 0;  // that are not done
  alignas(64) int32_t results[4][16][16];
};

template <bool kCorrects>
EQQ_INLINE void finish_tile(const Problem& p, Finished& f) {
  const Block& a = *f.block;
  const int64_t which = --f.tiles, half = which % 2, panel = which / 2, row = 16 * half;
  const I off = Vnni::load(a.off + 16 * panel), shift = kCorrects ? Vnni::load(a.shift + 16 * panel) : Vnni::zero();
  F tile[16];
  take_tile(a, half, panel, tile);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    const int64_t at = (row + i) * a.stretch;
    const I sum = corrected<kCorrects>(a, Vnni::load(f.results[which][i]), off, shift, at);
    tile[i] = Vnni::fma(Vnni::to_f(sum), Vnni::spread_f(a.scale[at]), tile[i]);
  }
  put_tile(p, a, half, panel, tile);
}

// A long run, or a part of it.
template <bool kTwoPanels, bool kCorrects>
void long_run(const Problem& p, const Block& a, Finished& finished, Ahead& shared_ahead) {
  const uint8_t *w = a.w, *below = a.w + a.w_below, *x = a.x, *beside = a.x + a.x_panel;
  int32_t* partial = a.partial;
  settle(a.w);
  settle(a.x);
  Lines y = results_of(p, a);
  const int64_t y_rows = div_up(64 * y.rows, a.length);
  Ahead ahead = shared_ahead;
  if (a.begins) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  } else {
    _tile_loadd(0, partial, 64);
    _tile_loadd(1, partial + 256, 64);
    if (kTwoPanels) _tile_loadd(2, partial + 512, 64);
    if (kTwoPanels) _tile_loadd(3, partial + 768, 64);
  }
  for (int64_t k = 0; k < a.length; k += 64, w += a.w_next, below += a.w_next) {
    _tile_loadd(4, w, a.w_row);
    _tile_loadd(6, x + 16 * k, 64);
    _tile_dpbusd(0, 4, 6);
    if (kTwoPanels) {
      _tile_loadd(7, beside + 16 * k, 64);
      _tile_dpbusd(2, 4, 7);
    }
    _tile_loadd(5, below, a.w_row);
    _tile_dpbusd(1, 5, 6);
    if (kTwoPanels) _tile_dpbusd(3, 5, 7);
    Ahead::some(ahead, ahead.lines);
    Lines::some(y, y_rows);
    if (k > 0 && finished.tiles > 0) finish_tile<kCorrects>(p, finished);
  }
  shared_ahead = ahead;
  while (finished.tiles > 0) finish_tile<kCorrects>(p, finished);
  int32_t* out = a.ends ? finished.results[0][0] : partial;
  _tile_stored(0, out, 64);
  _tile_stored(1, out + 256, 64);
  if (kTwoPanels) _tile_stored(2, out + 512, 64);
  if (kTwoPanels) _tile_stored(3, out + 768, 64);
  if (!a.ends) return;
  finished.block = &a;
  finished.tiles = kTwoPanels ? 4 : 2;
}

// Sums of the weight in the runs of a step, or in what it has of one: the products of the panel of ones.
void sum_weights(const Problem& p, const Runs& r, const Integers& v, const Step& s, const Block& a, const uint8_t* ones,
                 int64_t rows) {
  alignas(64) int32_t results[32][16];
  settle(a.w);
  for (int64_t run = 0; run < s.runs; ++run) {
    for (int64_t half = 0; half < rows; half += 16) {
      _tile_zero(0);
      for (int64_t k = run * s.length; k < (run + 1) * s.length; k += a.depth) {
        _tile_loadd(4, a.w + half / 16 * a.w_below + k / 64 * a.w_next + k % 64, a.w_row);
        _tile_loadd(6, ones + 16 * k, 64);
        _tile_dpbusd(0, 4, 6);
      }
      _tile_stored(0, results[half], 64);
    }
    const int32_t count = static_cast<int32_t>(run_length(r, p.k, s.run + run));
    for (int64_t i = 0; i < rows; ++i) {
      int32_t* sum = a.weights + i * a.stretch + run;
      if (s.begins) *sum = (a.offset != nullptr ? a.offset[i * a.stretch + run] : v.lowest) * count;
      *sum += results[i][0];
    }
  }
}

void run(const Int8Problem* problem, const Plan* plan, const void* memory, void* own_memory, int64_t unit) {
  const Problem& p = problem->p;
  if (!takes(*problem)) return kInt8Avx512Vnni.run(problem, plan, memory, own_memory, unit);
  const Runs r = runs_of(p);
  const Integers v = integers_of(p);
  const Detail d = detail_of<Detail>(plan);
  const int64_t chunk = unit % d.chunks, x_block = unit / d.chunks % d.row_blocks,
                batch = unit / d.chunks / d.row_blocks;
  const int64_t first = chunk * d.rows, rows = min64(d.rows, p.n - first), weight = first_row(&p, batch) + first;
  const int64_t panel = x_block * d.block, panels = min64(d.block, d.panels - panel), at = batch * d.panels + panel;
  const char* shared = static_cast<const char*>(memory);
  char* own = page(own_memory);
  uint8_t* decoded = reinterpret_cast<uint8_t*>(own);
  int32_t* partial = reinterpret_cast<int32_t*>(own + d.results);
  float* sums = reinterpret_cast<float*>(partial + max64(d.block, 2) * kGroupRows * 16);
  const float* x_scale = reinterpret_cast<const float*>(shared) + 16 * at;
  const uint8_t* x = reinterpret_cast<const uint8_t*>(page(shared + d.x)) + at * panel_bytes(r);
  const int32_t* x_sums = reinterpret_cast<const int32_t*>(shared + d.sums) + at * 16 * row_tiles(r);
  const uint8_t* ones = reinterpret_cast<const uint8_t*>(page(shared + d.x)) + p.batch * d.panels * panel_bytes(r);
  const int32_t* shift = reinterpret_cast<const int32_t*>(x_scale) + 16 * p.batch * d.panels;
  const bool is_long = ::is_long(r), corrects = p.zero_point != nullptr || problem->affine;
  const bool strips = d.strip > kGroupRows;
  const int64_t group_rows = is_long ? kGroupRows : 16, pair = is_long ? 2 : 1;
  Block blocks[2];  // the last one may still be needed, and so are its scales
  alignas(64) int32_t offs[2][32];
  Finished finished;
  int turn = 0, scale_turn = 0, off_turn = 0;
  configure(depth_of(r), 1 << 4 | 1 << 5);
  // Of a weight that is decoded the next rows; with strips instead the next panels of x.
  const char* codes = reinterpret_cast<const char*>(p.codes + weight * p.words);
  const bool w_ahead = !is_direct(p, r) && !strips;
  Ahead ahead;
  ahead.at = ahead.end = codes;
  if (w_ahead) {
    ahead.end = codes + min64(d.strip, rows) * p.words;
    ahead.lines = div_up(depth_of(r) * p.bits, (is_long ? 16 : 32) * div_up(panels, pair));
    Ahead::some(ahead, d.strip * p.words);
  }
  for (int64_t strip = 0, count; strip < rows; strip += count) {
    count = min64(d.strip, rows - strip);
    if (count > group_rows) count = count / group_rows * group_rows;
    const bool direct = is_direct(p, r) && count >= group_rows;
    const int64_t row = weight + strip, next = strip + count;
    const int64_t most = is_long && direct ? r.size : is_long && !strips ? kDecoded / 2 : kDecoded;  // some stay in L1
    if (w_ahead) ahead.end = codes + min64(next + d.strip, rows) * p.words;
    Step s = first_step(r, most);
    int64_t stretch = 0, known = 0;  // runs whose scales are decoded
    float* scale = nullptr;
    int32_t *offset = nullptr, *weights = nullptr;
    do {
      const int64_t position = s.run * r.size + s.offset;
      if (s.run + s.runs > known) {
        stretch = s.run;
        known = r.per_block > 1 ? s.run + 1 : min64(s.run + kStretchRuns, r.count);
        scale = reinterpret_cast<float*>(own + d.scale) + (scale_turn ^= 1) * 3 * stretches(r, d.strip);
        offset = reinterpret_cast<int32_t*>(scale + stretches(r, d.strip));
        weights = offset + stretches(r, d.strip);
        decode_scales(p, r, v, row, count, stretch, known, scale, offset);
      }
      if (!direct) decode(p, r, v, s, row, count, decoded);
      for (int64_t i = 0; i < panels; i += pair) {
        const bool two = is_long && panels - i > 1;
        const int64_t m = 16 * (panel + i), run_tiles = r.size / depth_of(r);
        const int32_t* sums_x = x_sums + i * 16 * row_tiles(r) + 16 * s.run * run_tiles;
        int32_t* off = offs[off_turn ^= 1];
        for (int64_t j = 0; is_long && s.ends && j <= two; ++j)
          Vnni::store(off + 16 * j, sum_of_tiles(sums_x + j * 16 * row_tiles(r), run_tiles));
        if (strips && i + 2 < panels) {
          ahead.at = reinterpret_cast<const char*>(x + (i + 2) * panel_bytes(r));
          ahead.end = ahead.at + min64(2, panels - i - 2) * panel_bytes(r);
          ahead.lines = div_up(ahead.end - ahead.at, div_up(count, group_rows) * s.length);
        }
        for (int64_t group = 0; group < count; group += group_rows) {
          const int64_t at = group * stretch_of(r) + (s.run - stretch);
          Block& a = blocks[turn ^= 1];
          a.w = direct ? p.codes + (row + group) * p.words + position : decoded + group * kDecoded;
          a.w_row = direct ? p.words : 64;
          a.w_next = direct ? 64 : 1024;
          a.w_below = direct ? 16 * p.words : 16 * kDecoded;
          a.x = x + i * panel_bytes(r) + 16 * position;
          a.x_panel = panel_bytes(r);
          a.sums_x = sums_x;
          a.off = off;
          a.scale = scale + at;
          a.offset = p.zero_point != nullptr ? offset + at : nullptr;
          a.shift = shift + 16 * i;
          a.weights = problem->affine ? weights + at : nullptr;
          a.stretch = stretch_of(r);
          a.sums = sums + i * kGroupRows * 16;
          a.partial = is_long ? partial + i * kGroupRows * 16 : partial;
          a.runs = s.runs;
          a.length = s.length;
          a.depth = depth_of(r);
          a.begins = s.begins;
          a.ends = s.ends;
          a.first = s.run == 0;
          a.last = s.run + s.runs == r.count;
          a.y = batch * p.y_batch + m * p.y_row + (first + strip + group) * p.y_column;
          a.lanes = min64(two ? 32 : 16, p.m - m);
          a.count = min64(group_rows, count - group);
          a.x_scale = x_scale + 16 * i;
          if (problem->affine && i == 0) sum_weights(p, r, v, s, a, ones + 16 * position, a.count);
          if (!is_long) {
            corrects ? short_runs<true>(p, a, ahead) : short_runs<false>(p, a, ahead);
          } else if (two) {
            corrects ? long_run<true, true>(p, a, finished, ahead) : long_run<true, false>(p, a, finished, ahead);
          } else {
            corrects ? long_run<false, true>(p, a, finished, ahead) : long_run<false, false>(p, a, finished, ahead);
          }
        }
      }
    } while (next_step(r, s, most));
    // Results of short runs: other panels were multiplied since their lines were prefetched.
    for (int64_t i = 0; !is_long && i < panels; ++i) {
      Block& a = blocks[0];
      const int64_t m = 16 * (panel + i);
      a.first = false;
      a.last = true;
      a.sums = sums + i * kGroupRows * 16;
      a.y = batch * p.y_batch + m * p.y_row + (first + strip) * p.y_column;
      a.lanes = min64(16, p.m - m);
      a.count = count;
      a.x_scale = x_scale + 16 * i;
      F tile[16];
      take_tile(a, 0, 0, tile);
      put_tile(p, a, 0, 0, tile);
    }
  }
  while (finished.tiles > 0) corrects ? finish_tile<true>(p, finished) : finish_tile<false>(p, finished);
  _tile_release();
}

}  // namespace

extern const Int8Kernel kInt8Amx = {plan, prepare, run};
