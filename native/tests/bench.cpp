// Times of single products in one thread, without XLA: what a kernel reaches while it is being written. The figures
// that count are those of `benchmarks/cpu_matmul.py`.
//
//   bench [rounds] [isa]
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <chrono>
#include <random>
#include <vector>

#include "matmul.h"

namespace {

struct NoPool {
  template <typename F>
  void Schedule(F&& f) {
    f();
  }
};

struct Case {
  const char* name;
  int bits, values, scale_kind;
  int64_t block;
};

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 5;
  const char* only = argc > 2 ? argv[2] : nullptr;
  const Case cases[] = {{"nf4", 4, 0, kScaleFloat32, 64},   {"mxfp4", 4, 0, kScaleE8M0, 32},
                        {"nvfp4", 4, 0, kScaleE4M3, 16},    {"q4_0", 4, 0, kScaleFloat16, 32},
                        {"int2", 2, 0, kScaleFloat32, 64},  {"ternary", 2, 0, kScaleFloat32, 0},
                        {"binary", 1, 0, kScaleFloat32, 0}, {"int8", 8, 1, kScaleFloat32, 0},
                        {"fp8", 8, 2, kScaleFloat32, 0},    {"dynamic8", 8, 0, kScaleFloat32, 256}};
  const int64_t n = 1024, k = 4096;
  std::mt19937 random(0);
  std::vector<uint8_t> codes(n * k), scale(n * k, 60);
  std::vector<float> table(256), x(2048 * k), y(2048 * k);
  for (auto& c : codes) c = static_cast<uint8_t>(random() & 0x77);
  for (auto& t : table) t = static_cast<float>(random() % 1000) / 500 - 1;
  for (auto& v : x) v = static_cast<float>(random() % 1000) / 500 - 1;
  NoPool pool;
  for (int i = 0; i < num_isas(); ++i) {
    const Isa& isa = *isa_at(i);
    if (only != nullptr && strcmp(only, isa.name) != 0) continue;
    printf("%s: weights per ns, and multiply-adds per ns\n%-10s", isa.name, "");
    const int64_t rows[] = {1, 4, 8, 12, 16, 128, -1, -16, -128};
    for (int64_t m : rows) printf("   M = %4ld     ", static_cast<long>(m));
    printf("\n");
    for (const Case& c : cases) {
      printf("%-10s", c.name);
      for (int64_t m : rows) {
        Problem p = {};
        p.transpose = m < 0;
        p.m = m < 0 ? -m : m;
        p.batch = 1;
        p.n = n;
        p.k = k;
        p.bits = c.bits;
        p.values = c.values;
        p.scale_kind = c.scale_kind;
        p.block_size = c.block ? c.block : k;
        p.words = k * c.bits / 8;
        p.blocks = k / p.block_size;
        const int64_t inner = p.transpose ? n : k, outer = p.transpose ? k : n;
        p.x_row = inner;
        p.y_row = outer;
        p.x_column = p.y_column = 1;
        p.x = x.data();
        p.y = y.data();
        p.codes = codes.data();
        p.scale = scale.data();
        p.table = table.data();
        double best = 1e9;
        for (int r = 0; r < rounds; ++r) {
          const double start = seconds();
          if (!run_problem(isa, p, pool, 1)) return 1;
          const double time = seconds() - start;
          if (time < best) best = time;
        }
        printf("%7.2f %7.1f ", static_cast<double>(n * k) / best / 1e9, static_cast<double>(n * k * p.m) / best / 1e9);
      }
      printf("\n");
    }
  }
  return 0;
}
