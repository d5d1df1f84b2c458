// Integer products on AMX: `tdpbusd` multiplies tiles of 16 rows of the weight, as they lie in memory, by packed `x`.
#include "amx.h"
#include "int8_avx512.h"

namespace {

struct Amx : Avx512Lanes {
  static constexpr int kGroup = 4, kTileRows = 16;
  static constexpr bool kTiles = true, kInRegisters = true;
  EQQ_INLINE I dot(I acc, I w, I x) { return _mm512_dpbusd_epi32(acc, w, x); }

  template <bool kTwoRows, bool kTwoLanes>
  static void block(const Panel& a, int64_t row) {
    alignas(64) int32_t results[2][2][16][16];
    const int64_t length = a.step.length, depth = min64(length, 64), x_row = 4 * a.lanes;
    settle(a.w);
    for (int64_t run = 0; run < a.step.runs; ++run) {
      const uint8_t* w = a.w + row * kStepRoom + run * length;
      const uint8_t* x = a.x + run * length * a.lanes;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t k = 0; k < length; k += depth) {
        _tile_loadd(4, w + k, kStepRoom);
        _tile_loadd(6, x + k * a.lanes, x_row);
        _tile_dpbusd(0, 4, 6);
        if (kTwoLanes) {
          _tile_loadd(7, x + k * a.lanes + 64, x_row);
          _tile_dpbusd(1, 4, 7);
        }
        if (kTwoRows) {
          _tile_loadd(5, w + k + 16 * kStepRoom, kStepRoom);
          _tile_dpbusd(2, 5, 6);
          if (kTwoLanes) _tile_dpbusd(3, 5, 7);
        }
      }
      _tile_stored(0, results[0][0], 64);
      if (kTwoLanes) _tile_stored(1, results[0][1], 64);
      if (kTwoRows) _tile_stored(2, results[1][0], 64);
      if (kTwoRows && kTwoLanes) _tile_stored(3, results[1][1], 64);
      for (int64_t i = 0; i < (kTwoRows ? 32 : 16); ++i)
        for (int64_t v = 0; v < (kTwoLanes ? 2 : 1); ++v) {
          const int64_t at = (row + i) * a.stride + v * L;
          I sum = load(results[i / 16][v][i % 16]);
          if (!a.step.begins) {
            sum = _mm512_add_epi32(sum, load(a.partial + at));
          } else {
            I off = load(a.sums_x + run * a.sums_stride + v * L);
            if (a.offset != nullptr) off = mul(off, spread(a.offset[(row + i) * kRunRoom + run]));
            sum = _mm512_add_epi32(sum, off);
          }
          if (a.step.ends) {
            store_f(a.sums + at, fma(to_f(sum), spread_f(a.scale[(row + i) * kRunRoom + run]), load_f(a.sums + at)));
          } else {
            store(a.partial + at, sum);
          }
        }
    }
  }

  static void tiles(const Panel& a) {
    for (int64_t row = 0; row < a.rows; row += 32) {
      if (a.rows - row > 16) {
        a.lanes > L ? block<true, true>(a, row) : block<true, false>(a, row);
      } else {
        a.lanes > L ? block<false, true>(a, row) : block<false, false>(a, row);
      }
    }
  }
};

using Kernels8 = Int8Kernels<Amx>;

void run_int8(const Int8Problem* problem, const Plan* plan, const void* shared, void* own, int64_t unit) {
  configure(min64(runs_of(problem->p).size, 64));
  Kernels8::run(problem, plan, shared, own, unit);
  _tile_release();
}

}  // namespace

extern const Int8Kernel kInt8Amx = {Kernels8::plan, Kernels8::prepare, run_int8};
