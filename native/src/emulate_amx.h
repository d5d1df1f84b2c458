// The tile instructions of AMX in plain C++, for tests on machines that lack them. Results are those of the hardware to
// the bit: which terms are added in which order, and that subnormal numbers are zero, is the architecture's.
#ifndef EQQUANT_EMULATE_AMX_H_
#define EQQUANT_EMULATE_AMX_H_

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

// Bytes of `a` without a sign, those of `b` with one.
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

static inline float flushed(float a) { return __builtin_fabsf(a) < 0x1p-126f ? __builtin_copysignf(0.0f, a) : a; }
static inline float bf16(const uint8_t* p) {
  const uint32_t bits = static_cast<uint32_t>(p[0]) << 16 | static_cast<uint32_t>(p[1]) << 24;
  float value;
  memcpy(&value, &bits, 4);
  return flushed(value);
}

// Even and odd terms are added up apart, by fused multiply-adds; their sum is then added to what was there.
static inline void dot_bf16(int c, int a, int b) {
  for (int m = 0; m < tiles[c].rows; ++m)
    for (int n = 0; n < tiles[c].columns / 4; ++n) {
      float even = 0, odd = 0, sum;
      for (int k = 0; k < tiles[a].columns / 4; ++k) {
        const uint8_t *x = &tiles[a].bytes[m][4 * k], *y = &tiles[b].bytes[k][4 * n];
        even = flushed(__builtin_fmaf(bf16(x), bf16(y), even));
        odd = flushed(__builtin_fmaf(bf16(x + 2), bf16(y + 2), odd));
      }
      memcpy(&sum, &tiles[c].bytes[m][4 * n], 4);
      sum = flushed(flushed(sum) + flushed(even + odd));
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
#undef _tile_dpbf16ps
#define _tile_loadconfig(p) emulated::load_config(p)
#define _tile_release() ((void)0)
#define _tile_zero(t) emulated::zero(t)
#define _tile_loadd(t, p, stride) emulated::load(t, p, stride)
#define _tile_stored(t, p, stride) emulated::store(t, p, stride)
#define _tile_dpbusd(c, a, b) emulated::dot_bytes(c, a, b)
#define _tile_dpbf16ps(c, a, b) emulated::dot_bf16(c, a, b)

#endif  // EQQUANT_EMULATE_AMX_H_
