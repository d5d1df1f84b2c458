// The configuration of tiles, for kernels that use AMX.
#ifndef EQQUANT_AMX_H_
#define EQQUANT_AMX_H_

#include <immintrin.h>
#include <stdint.h>

#ifdef EQQUANT_EMULATE
#include "emulate_amx.h"
#endif

#include "runs.h"

namespace {

struct alignas(64) TileConfig {
  uint8_t palette, start, reserved[14];
  uint16_t columns[16];
  uint8_t rows[16];
};

// What was written before is in memory after. GCC does not know that loads of tiles and of their configuration read it.
EQQ_INLINE void settle(const void* p) { __asm__ volatile("" : : "r"(p) : "memory"); }

// Tiles 0 to 3 are results, 4 and 5 rows of the weight, 6 and 7 of x; `depth` bytes are multiplied at a time.
EQQ_INLINE void configure(int64_t depth) {
  TileConfig config = {};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    config.columns[i] = static_cast<uint16_t>(i == 4 || i == 5 ? depth : 64);
    config.rows[i] = static_cast<uint8_t>(i < 6 ? 16 : depth / 4);
  }
  settle(&config);
  _tile_loadconfig(&config);
}

// Likewise for floats: tiles 0 to 3 are results, 4 to 6 terms of x, 7 one of the weight; `depth` codes are multiplied.
EQQ_INLINE void configure_floats(int64_t depth) {
  TileConfig config = {};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    config.columns[i] = static_cast<uint16_t>(i == 7 ? 2 * depth : 64);
    config.rows[i] = static_cast<uint8_t>(i >= 4 && i < 7 ? depth / 2 : 16);
  }
  settle(&config);
  _tile_loadconfig(&config);
}

}  // namespace

#endif  // EQQUANT_AMX_H_
