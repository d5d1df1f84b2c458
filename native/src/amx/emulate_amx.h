// The tile instructions of AMX in plain C++, for tests on machines that lack them. Sums of integers equal the
// hardware's to the bit.
#pragma once

#include <stdint.h>
#include <string.h>

namespace emulated {

struct Tile {
  alignas(64) uint8_t bytes[16][64];
  int rows, columns;  // of bytes
};
static thread_local Tile tiles[8];

static inline void load_config(const void* p) {
  const uint8_t* config = static_cast<const uint8_t*>(p);
  for (int i = 0; i < 8; ++i) {
    memset(tiles[i].bytes, 0, sizeof tiles[i].bytes);
    tiles[i].columns = config[16 + 2 * i] | config[17 + 2 * i] << 8;
    tiles[i].rows = config[48 + i];
  }
}
static inline void zero(int t) { memset(tiles[t].bytes, 0, sizeof tiles[t].bytes); }
static inline void load(int t, const void* p, int64_t stride) {
  zero(t);
  for (int i = 0; i < tiles[t].rows; ++i)
    memcpy(tiles[t].bytes[i], static_cast<const uint8_t*>(p) + i * stride, tiles[t].columns);
}
static inline void store(int t, void* p, int64_t stride) {
  for (int i = 0; i < tiles[t].rows; ++i)
    memcpy(static_cast<uint8_t*>(p) + i * stride, tiles[t].bytes[i], tiles[t].columns);
}

// Bytes of `a` are unsigned, bytes of `b` signed.
static inline void dot_bytes(int c, int a, int b) {
  for (int m = 0; m < tiles[c].rows; ++m)
    for (int n = 0; n < tiles[c].columns / 4; ++n) {
      uint32_t sum;
      memcpy(&sum, &tiles[c].bytes[m][4 * n], 4);
      for (int k = 0; k < tiles[a].columns; ++k)
        sum += static_cast<uint32_t>(tiles[a].bytes[m][k] * static_cast<int8_t>(tiles[b].bytes[k / 4][4 * n + k % 4]));
      memcpy(&tiles[c].bytes[m][4 * n], &sum, 4);
    }
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbusd
#define _tile_loadconfig(p) emulated::load_config(p)
#define _tile_release() ((void)0)
#define _tile_zero(t) emulated::zero(t)
#define _tile_loadd(t, p, stride) emulated::load(t, p, stride)
#define _tile_stored(t, p, stride) emulated::store(t, p, stride)
#define _tile_dpbusd(c, a, b) emulated::dot_bytes(c, a, b)
