// Times of single products in one thread, without XLA, to look at while writing a kernel. The figures
// that count come from `benchmarks/cpu_matmul.py`.
//
//   bench [rounds] [isa] [coarse]
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <chrono>
#include <random>
#include <vector>

#include "codecs.h"
#include "core/matmul.h"

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
  const Codec* codec = nullptr;
  int scale_bits = 0;  // of scales that are codes, 256 weights of which share a scale
  bool offsets = false;
};

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// One case: of `m` rows of `x`, or transposed if that is negative.
struct Data {
  std::vector<uint8_t> codes, scale;
  std::vector<float> table, x, y, from_0, from_126, from_128;  // the last three are integers
};

Problem problem_of(const Case& c, int64_t n, int64_t k, int64_t m, bool coarse, Data& data) {
  Problem p = {};
  p.coarse = coarse;
  p.transpose = m < 0;
  p.m = m < 0 ? -m : m;
  p.batch = 1;
  p.n = n;
  p.k = k;
  p.bits = c.bits;
  p.values = c.values;
  p.scale_kind = c.scale_kind;
  p.block_size = c.block ? c.block : k;
  p.codec = c.codec;
  p.words = row_bytes(&p);
  p.blocks = k / p.block_size;
  p.x_row = p.transpose ? n : k;
  p.y_row = p.transpose ? k : n;
  p.x_column = p.y_column = 1;
  p.x = data.x.data();
  p.y = data.y.data();
  p.codes = data.codes.data();
  p.scale = data.scale.data();
  p.table = c.scale_bits > 0 ? data.from_0.data() : data.table.data();
  if (c.scale_bits > 0) {
    p.scale_codes = data.codes.data();
    p.scale_table = data.from_0.data();
    p.scale_bits = c.scale_bits;
    p.scale_words = packed_bytes(p.blocks, c.scale_bits);
    p.scale_block_size = 256 / c.block;
    p.scale_blocks = k / 256;
  }
  if (c.offsets) {
    p.offset = p.scale;
    p.offset_codes = p.scale_codes;
  }
  if (c.codec != nullptr) p.table = c.codec->kind == kTrellis ? data.from_126.data() : data.from_128.data();
  return p;
}

template <typename Run>
void print_best(int rounds, const Problem& p, const Run& run) {
  double best = 1e9;
  for (int r = 0; r < rounds; ++r) {
    const double start = seconds();
    if (!run()) exit(1);
    const double time = seconds() - start;
    if (time < best) best = time;
  }
  const double weights = static_cast<double>(p.n * p.k);
  printf("%7.2f %7.1f ", weights / best / 1e9, weights * static_cast<double>(p.m) / best / 1e9);
}

void print_heading(const Isa& isa, const char* what, const std::vector<int64_t>& rows) {
  printf("%s%s: weights per ns, and multiply-adds per ns\n%-10s", isa.name, what, "");
  for (int64_t m : rows) printf("   M = %4ld     ", static_cast<long>(m));
  printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? atoi(argv[1]) : 5;
  const char* only = argc > 2 ? argv[2] : nullptr;
  const bool coarse = argc > 3;
  const Case cases[] = {{"nf4", 4, 0, kScaleFloat32, 64},
                        {"mxfp4", 4, 0, kScaleE8M0, 32},
                        {"nvfp4", 4, 0, kScaleE4M3, 16},
                        {"q4_0", 4, 0, kScaleFloat16, 32},
                        {"int2", 2, 0, kScaleFloat32, 64},
                        {"ternary", 2, 0, kScaleFloat32, 0},
                        {"binary", 1, 0, kScaleFloat32, 0},
                        {"int8", 8, 1, kScaleFloat32, 0},
                        {"fp8", 8, 2, kScaleFloat32, 0},
                        {"mxfp8", 8, 2, kScaleE8M0, 32},
                        {"dynamic8", 8, 0, kScaleFloat32, 256},
                        {"q2_k", 2, 0, kScaleFloat16, 16, nullptr, 4, true},
                        {"q3_k", 3, 1, kScaleFloat16, 16, nullptr, 6},
                        {"q4_k", 4, 0, kScaleFloat16, 32, nullptr, 6, true},
                        {"q5_k", 5, 1, kScaleFloat16, 32, nullptr, 6, true},
                        {"q6_k", 6, 1, kScaleFloat16, 16, nullptr, 8},
                        {"trellis2", 8, 1, kScaleFloat32, 0, &all_codecs()[1].codec},
                        {"grid of 8", 8, 1, kScaleFloat32, 32, &all_codecs()[4].codec}};
  const Case integers[] = {{"int8", 8, 1, kScaleFloat32, 0},    {"q8_0", 8, 1, kScaleFloat16, 32},
                           {"int4", 4, 0, kScaleFloat32, 64},   {"q4_0", 4, 0, kScaleFloat16, 32},
                           {"ternary", 2, 0, kScaleFloat32, 0}, {"binary", 1, 0, kScaleFloat32, 0}};
  const int64_t n = 1024, k = 4096;
  std::mt19937 random(0);
  Data data = {std::vector<uint8_t>(n * k),
               std::vector<uint8_t>(n * k, 60),
               std::vector<float>(256),
               std::vector<float>(2048 * k),
               std::vector<float>(2048 * k),
               {},
               {},
               {}};
  for (auto& c : data.codes) c = static_cast<uint8_t>(random() & 0x77);
  for (auto& t : data.table) t = static_cast<float>(random() % 1000) / 500 - 1;
  for (int i = 0; i < 256; ++i) {
    data.from_0.push_back(static_cast<float>(i));
    data.from_126.push_back(static_cast<float>(i - 126));
    data.from_128.push_back(static_cast<float>(i - 128));
  }
  for (auto& v : data.x) v = static_cast<float>(random() % 1000) / 500 - 1;
  std::vector<float> whole(256);
  NoPool pool;
  for (int i = 0; i < num_isas(); ++i) {
    const Isa& isa = *isa_at(i);
    if (only != nullptr && strcmp(only, isa.name) != 0) continue;
    const std::vector<int64_t> rows = {1, 4, 8, 12, 16, 128, -1, -16, -128};
    print_heading(isa, "", rows);
    for (const Case& c : cases) {
      printf("%-10s", c.name);
      for (int64_t m : rows) {
        const Problem p = problem_of(c, n, k, m, coarse, data);
        print_best(rounds, p, [&] { return run_problem(isa, p, pool, 1); });
      }
      printf("\n");
    }
    const std::vector<int64_t> few = {1, 4, 16, 128};
    print_heading(isa, ", x quantized to int8 inside", few);
    for (const Case& c : integers) {
      printf("%-10s", c.name);
      for (int64_t m : few) {
        Int8Problem q = {};
        q.p = problem_of(c, n, k, m, coarse, data);
        for (int j = 0; j < 256; ++j) whole[j] = static_cast<float>(j - (1 << (c.bits - 1)));
        q.p.table = whole.data();
        print_best(rounds, q.p, [&] { return run_int8(isa, q, pool, 1); });
      }
      printf("\n");
    }
  }
  return 0;
}
