// What kernels on AMX share: the configuration of tiles, and memory that is fetched ahead.
#pragma once

#include <immintrin.h>
#include <stdint.h>

#ifdef EQQUANT_EMULATE
#include "amx/emulate_amx.h"
#endif

#include "float/slices.h"

namespace {

struct alignas(64) TileConfig {
  uint8_t palette, start, reserved[14];
  uint16_t columns[16];
  uint8_t rows[16];
};

// Earlier stores are in memory afterwards. GCC does not know that loads of tiles and of their configuration read it.
EQQ_INLINE void settle(const void* p) { __asm__ volatile("" : : "r"(p) : "memory"); }

// Tiles 0 to 3 are results. `weights` has a bit for each tile that holds rows of the weight; the rest holds x. `bytes`
// of a row are multiplied at a time.
EQQ_INLINE void configure(int64_t bytes, int weights) {
  TileConfig config = {};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    const bool of_weight = weights >> i & 1;
    config.columns[i] = static_cast<uint16_t>(of_weight ? bytes : 64);
    config.rows[i] = static_cast<uint8_t>(i < 4 || of_weight ? 16 : bytes / 4);
  }
  settle(&config);
  _tile_loadconfig(&config);
}

// Memory that is fetched while something else is computed, some lines at a time: hardware gives up on many rows in
// turn.
struct Ahead {
  const char *at = nullptr, *end = nullptr;
  int64_t lines = 0;
  EQQ_INLINE void fetch_some(Ahead& a, int64_t lines) {
    const char* to = a.end - a.at < 64 * lines ? a.end : a.at + 64 * lines;
    for (; a.at < to; a.at += 64) _mm_prefetch(a.at, _MM_HINT_T1);
  }
};

}  // namespace
