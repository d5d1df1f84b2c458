// Products of integers on AMX: how they are divided, tiles, and what becomes of their results.
#pragma once

#include "amx/amx.h"
#include "core/simd_avx512vnni.h"
#include "int8/pack_avx512.h"
#include "int8/weight.h"

namespace {

using V = avx512vnni::Simd;
using X = Int8X<V>;
using W = Int8Weight<V>;

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
  int64_t panels, block, row_blocks;  // of x; of a unit; units in all
  int64_t group, pieces;              // panels of a part of the preparation, and how many parts
  int64_t sums, x;                    // where they are in shared memory: sums of codes for each tile, and codes
  int64_t scale, results;             // likewise in the memory of a thread
};

bool accepts(const Int8Problem& q) { return q.p.m + q.affine > 1 && q.p.k > 0; }

// Panels begin where pages do.
EQQ_INLINE int64_t panel_bytes(const Runs& r) { return round_up(16 * row_codes(r), 4096); }
EQQ_INLINE char* page(const void* p) {
  return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(p) + 4095) & ~uintptr_t{4095});
}
EQQ_INLINE int64_t row_tiles(const Runs& r) { return row_codes(r) / depth_of(r); }
EQQ_INLINE bool is_long(const Runs& r) { return r.count == 1 || r.size > kLongRun; }
// How far scales of rows are apart. A single scale per row needs no room: the next row writes over the excess.
EQQ_INLINE int64_t stretch_of(const Runs& r) { return r.count == 1 ? 1 : kStretch; }
// The same for all rows of a strip.
EQQ_INLINE int64_t stretches(const Runs& r, int64_t strip) { return round_up(strip * stretch_of(r), 16) + 16; }
// Whether rows of the weight are multiplied where they lie.
EQQ_INLINE bool is_direct(const Problem& p, const Runs& r) { return p.bits == 8 && r.padded == p.k; }

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
  const int32_t* shift;   // the bias of the codes of the panels
  int32_t* weights;       // for rows and runs, `stretch` apart: sums of the weight; null without zero points of x
  int64_t stretch;
  float* sums;       // of the tiles of results: 16 x 16; tiles of a panel lie side by side
  int32_t* partial;  // likewise sums of a run that has not ended, or room for a page
  int64_t runs, length, depth;
  bool begins, ends;     // runs
  bool first, last;      // whether there are no runs before, or after
  int64_t y;             // where results begin
  int64_t lanes, count;  // of these tiles: rows of x, and of the weight
  const float* x_scale;
};

EQQ_INLINE I sum_of_tiles(const int32_t* sums, int64_t tiles) {
  I sum = V::load_int(sums);
  for (int64_t i = 1; i < tiles; ++i) sum = V::add(sum, V::load_int(sums + 16 * i));
  return sum;
}

// Turns sums of products of codes into sums of products of values. `at`: where the row and run are among scales.
template <bool kCorrects>
EQQ_INLINE I corrected(const Block& a, I sum, I off, I shift, int64_t at) {
  if (!kCorrects) return V::add(sum, off);
  sum = V::add(sum, a.offset != nullptr ? V::mul(off, V::broadcast_int(a.offset[at])) : off);
  if (a.weights == nullptr) return sum;
  return _mm512_sub_epi32(sum, V::mul(shift, V::broadcast_int(a.weights[at])));
}

// Prefetches the memory of results of a block: stores to many places do not fetch it in time.
struct Lines {
  const char* at;
  int64_t rows, bytes, next;
  EQQ_INLINE void fetch_some(Lines& l, int64_t rows) {
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
    for (int i = 0; i < 16; ++i) V::store(sums + 16 * i, tile[i]);
    return;
  }
  const int64_t lanes = min64(16, a.lanes - 16 * panel), count = min64(16, a.count - 16 * half);
  const int64_t base = a.y + 16 * panel * p.y_row + 16 * half * p.y_column;
  const F scale = V::load(a.x_scale + 16 * panel);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) tile[i] = _mm512_mul_ps(tile[i], scale);
  write_square(p, base, count, lanes, tile);
}

// Sums so far of a tile.
EQQ_INLINE void take_tile(const Block& a, int64_t half, int64_t panel, F* tile) {
  const float* sums = a.sums + 256 * (2 * panel + half);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) tile[i] = a.first ? V::zero() : V::load(sums + 16 * i);
}

// Runs of some blocks. Four tiles take turns: a result is stored two runs after it was multiplied, and scaled one run
// later. It is stored in the quarter of a page that was just loaded: a load of a tile waits for earlier stores to
// addresses that are a multiple of 4 KB away.
template <bool kCorrects>
void short_runs(const Problem& p, const Block& a, Ahead& ahead) {
  F sums[16];
  take_tile(a, 0, 0, sums);
  Lines y = results_of(p, a);
  Lines::fetch_some(y, y.rows);
  const int64_t tiles = a.length / a.depth;
  const I shift = kCorrects ? V::load_int(a.shift) : V::zero_int();
  settle(a.w);
#define EQQ_RUN(TILE, STORED, A, B)                                                           \
  {                                                                                           \
    const int64_t run = first + TILE;                                                         \
    if (run < a.runs) {                                                                       \
      _tile_zero(TILE);                                                                       \
      for (int64_t t = 0; t < tiles; ++t) {                                                   \
        const int64_t k = run * a.length + t * a.depth;                                       \
        _tile_loadd(A, a.w + k / 64 * a.w_next + k % 64, a.w_row);                            \
        _tile_loadd(B, a.x + 16 * k, 64);                                                     \
        _tile_dpbusd(TILE, A, B);                                                             \
        Ahead::fetch_some(ahead, ahead.lines);                                                \
      }                                                                                       \
    }                                                                                         \
    if (run >= 2 && run - 2 < a.runs) _tile_stored(STORED, a.partial + 256 * TILE, 64);       \
    if (run >= 3 && run - 3 < a.runs) {                                                       \
      const int32_t* results = a.partial + 256 * ((TILE + 3) % 4);                            \
      const I off = sum_of_tiles(a.sums_x + 16 * (run - 3) * tiles, tiles);                   \
      _Pragma("GCC unroll 16") for (int i = 0; i < 16; ++i) {                                 \
        const int64_t at = i * kStretch + run - 3;                                            \
        const I sum = corrected<kCorrects>(a, V::load_int(results + 16 * i), off, shift, at); \
        sums[i] = V::fma(V::to_float(sum), V::broadcast(a.scale[at]), sums[i]);               \
      }                                                                                       \
    }                                                                                         \
  }
  for (int64_t first = 0; first < a.runs + 3; first += 4) {
    EQQ_RUN(0, 2, 4, 6)
    EQQ_RUN(1, 3, 5, 7)
    EQQ_RUN(2, 0, 4, 6)
    EQQ_RUN(3, 1, 5, 7)
  }
#undef EQQ_RUN
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) V::store(a.sums + 16 * i, sums[i]);
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
  const I off = V::load_int(a.off + 16 * panel), shift = kCorrects ? V::load_int(a.shift + 16 * panel) : V::zero_int();
  F tile[16];
  take_tile(a, half, panel, tile);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    const int64_t at = (row + i) * a.stretch;
    const I sum = corrected<kCorrects>(a, V::load_int(f.results[which][i]), off, shift, at);
    tile[i] = V::fma(V::to_float(sum), V::broadcast(a.scale[at]), tile[i]);
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
    Ahead::fetch_some(ahead, ahead.lines);
    Lines::fetch_some(y, y_rows);
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

// Sums of the weight in the runs of a step, or in its part of a run: the products of the panel of ones.
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

}  // namespace
