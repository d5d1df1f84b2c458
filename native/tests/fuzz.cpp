// Random small problems of every layout, on every instruction set of this machine, against float64. Built with the
// sanitizers it also shows that nothing beyond an array is read or written: each has a block of memory of its own size.
//
//   fuzz [problems] [seed] [instruction set]
//   fuzz grid [cells, 0 for all] [seed] [instruction set]       see `fuzz_grid.h`
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "bounds.h"
#include "codecs.h"
#include "core/matmul.h"
#include "encode/encode.h"
#include "poison.h"

namespace {

using Random = std::mt19937_64;

// What XLA's pool promises, and no more: tasks run at some time, in some thread.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { loop(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      done_ = true;
    }
    some_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  void Schedule(std::function<void()> task) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    some_.notify_one();
  }

 private:
  void loop() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        some_.wait(lock, [this] { return done_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }
  std::mutex mutex_;
  std::condition_variable some_;
  std::deque<std::function<void()>> tasks_;
  bool done_ = false;
  std::vector<std::thread> threads_;
};

// An array in a block of memory of exactly its size, so that the sanitizer sees whatever goes beyond.
template <typename T>
struct Exact {
  explicit Exact(int64_t n) : size(n), data(new T[n > 0 ? n : 1]()) {}
  T& operator[](int64_t i) { return data[i]; }
  int64_t size;
  std::unique_ptr<T[]> data;
};

int64_t below(Random& random, int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); }
bool coin(Random& random, int percent = 50) { return below(random, 100) < percent; }
float normal(Random& random) { return std::normal_distribution<float>()(random); }

float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

// A small float from its definition.
double small_float(uint32_t code, int exponent_bits, int mantissa_bits, int bias, bool is_signed) {
  const uint32_t mantissa = code & ((1u << mantissa_bits) - 1),
                 exponent = code >> mantissa_bits & ((1u << exponent_bits) - 1);
  const double value = exponent == 0 ? ldexp(mantissa, 1 - bias - mantissa_bits)
                                     : ldexp(1 + ldexp(mantissa, -mantissa_bits), static_cast<int>(exponent) - bias);
  return is_signed && (code >> (exponent_bits + mantissa_bits) & 1) ? -value : value;
}

double half(uint16_t bits) { return small_float(bits, 5, 10, 15, true); }

double scale_value(int kind, const uint8_t* at) {
  uint32_t word;
  uint16_t two;
  switch (kind) {
    case kScaleFloat32: memcpy(&word, at, 4); return bits_to_float(word);
    case kScaleFloat16: memcpy(&two, at, 2); return half(two);
    case kScaleBFloat16: memcpy(&two, at, 2); return bits_to_float(static_cast<uint32_t>(two) << 16);
    case kScaleE8M0: return ldexp(1, *at - 127);
    case kScaleE4M3: return small_float(*at, 4, 3, 7, true);
    case kScaleE5M2: return small_float(*at, 5, 2, 15, true);
    default: return small_float(*at, 4, 4, 8, false);
  }
}

uint16_t to_half(float value) {  // of ordinary numbers
  int exponent;
  const double fraction = frexp(fabs(value), &exponent);
  if (fraction == 0 || exponent < -13) return 0;
  const uint32_t mantissa = static_cast<uint32_t>(nearbyint(ldexp(fraction, 11))) - 1024;
  return static_cast<uint16_t>((value < 0 ? 0x8000 : 0) + (static_cast<uint32_t>(exponent + 14) << 10) + mantissa);
}

uint16_t to_bfloat16(float value) { return static_cast<uint16_t>((float_to_bits(value) + 0x8000) >> 16); }

// The matrix of the weight that a batch has, by its definition.
int64_t matrix_of(const Problem& p, int64_t batch) {
  return p.selected == nullptr ? batch : std::min<int64_t>(std::max<int64_t>(p.selected[batch], 0), p.stack - 1);
}

// Scales of a weight, or its offsets, by their definition. They are read from the codes, or from the floats.
double scale_at(const Problem& p, int64_t row, int64_t block, bool offset = false) {
  const uint8_t* floats = static_cast<const uint8_t*>(offset ? p.offset : p.scale);
  const uint8_t* codes = offset ? p.offset_codes : p.scale_codes;
  if (codes == nullptr) return scale_value(p.scale_kind, floats + (row * p.blocks + block) * scale_bytes(p.scale_kind));
  const double outer = scale_value(
      p.scale_kind, floats + (row * p.scale_blocks + block / p.scale_block_size) * scale_bytes(p.scale_kind));
  return static_cast<float>(p.scale_table[code_at(codes + row * p.scale_words, p.blocks, p.scale_bits, block)] *
                            static_cast<float>(outer));
}

// Which matrix of a stack each batch has: any, also beyond the ends, or one that all of them share.
void choose_matrices(Random& random, const Problem& p, Exact<int32_t>& selected) {
  const bool shared = coin(random, 30);
  for (int64_t b = 0; b < p.batch; ++b)
    selected[b] = shared && b > 0 ? selected[0] : static_cast<int32_t>(below(random, p.stack + 2) - 1);
}

// What the grid (`fuzz_grid.h`) determines of a problem. The rest is random.
struct Cell {
  int64_t k, n, m;
  int bits, values;
};

void set_cell(const Cell& cell, Problem* p) {
  p->k = cell.k;
  p->n = cell.n;
  p->m = cell.m;
  p->bits = cell.bits;
  p->values = cell.values;
  if (cell.k * cell.n * cell.m > 10000000) p->batch = 1;
}

// At times, codes that stand for several values.
void choose_codec(Random& random, Problem* p) {
  if (!coin(random, 10)) return;
  const NamedCodec& chosen = all_codecs()[below(random, static_cast<int64_t>(all_codecs().size()))];
  p->codec = &chosen.codec;
  p->bits = chosen.bits;
  p->values = kValueInteger;
}

int codec_index(const Problem& p) {
  for (size_t i = 0; i < all_codecs().size(); ++i)
    if (p.codec == &all_codecs()[i].codec) return static_cast<int>(i);
  return -1;
}

struct Made {
  Problem problem;
  std::shared_ptr<void> keep;
  // Of each result: the exact one, sums of magnitudes and of squares of its terms, and the product of the largest
  // numbers of both rows.
  std::vector<double> expected, magnitude, squares, reach;
  double independent;  // how many results have errors of their own; 0 where few numbers decide
  bool integers;       // whether the table may be of integers
  std::string text;
};

Made make(Random& random, const Cell* cell = nullptr) {
  Made made;
  Problem& p = made.problem;
  p = Problem{};
  const int bits[] = {1, 2, 4, 4, 8, 8, 3, 5, 6, 7};
  p.bits = bits[below(random, coin(random) ? 6 : 10)];
  p.values = p.bits == 8      ? static_cast<int>(below(random, 4))
           : is_split(p.bits) ? static_cast<int>(below(random, 2))
                              : 0;
  p.batch = coin(random, 80) ? 1 : below(random, 4);
  p.m = coin(random, 40) ? 1
      : coin(random)     ? below(random, 12)
      : coin(random, 90) ? below(random, 70)
                         : below(random, 600);
  p.n = coin(random, 90) ? below(random, 40) : below(random, 300);
  p.k = coin(random, 70) ? below(random, 700) : coin(random) ? 128 * below(random, 9) : below(random, 3000);
  if (p.m < 12 && p.n < 40 && coin(random, 8)) p.k = 4097 + below(random, 5000);  // scales are decoded 4096 at a time
  if (cell != nullptr) set_cell(*cell, &p);
  if (cell == nullptr) choose_codec(random, &p);
  const int64_t sizes[] = {16, 32, 64, 128, 256, 48, 1 + below(random, 100), p.k, p.k};
  p.block_size = sizes[below(random, 9)];
  if (p.block_size > p.k) p.block_size = p.k;
  if (p.block_size < 1) p.block_size = 1;
  p.words = row_bytes(&p);
  const bool selects = coin(random, 30);  // from a stack, also beyond its ends
  p.stack = selects ? 1 + below(random, 4) : p.batch;
  p.blocks = (p.k + p.block_size - 1) / p.block_size;
  p.zero_words = packed_bytes(p.blocks, p.bits);
  p.scale_kind = static_cast<int>(below(random, 7));
  p.x_type = static_cast<int>(below(random, 3));
  p.transpose = coin(random, cell != nullptr ? 50 : 30);
  const bool coded = coin(random, 30), offsets = coin(random, p.bits == 3 ? 50 : 20);
  // Scales of scales for 256 weights each, as in GGUF's K-quants.
  const bool consecutive = coin(random), k_quant = consecutive && p.block_size <= 32 && 256 % p.block_size == 0;
  if (coded) {
    p.scale_bits = 1 + static_cast<int>(below(random, 8));
    const int64_t some[] = {8, 16, 32, 256, 1 + below(random, 40)};
    p.scale_block_size = k_quant ? 256 / p.block_size : some[below(random, 5)];
    p.scale_words = packed_bytes(p.blocks, p.scale_bits);
    p.scale_blocks = (p.blocks + p.scale_block_size - 1) / p.scale_block_size;
  }
  if (offsets) p.x_type = kFloat32;
  p.coarse = coin(random, p.x_type == kFloat32 ? 20 : 70);
  const int64_t scales = coded ? p.scale_blocks : p.blocks;  // of a row
  const bool x_turned = coin(random, 30), y_turned = coin(random, 30), zeros = !offsets && coin(random, 30),
             rows = !coded && coin(random, 20);
  const int64_t inner = p.transpose ? p.n : p.k, outer = p.transpose ? p.k : p.n;
  // Rows may be further apart than they are long.
  const int64_t x_pad = coin(random, 20) ? below(random, 5) : 0, y_pad = coin(random, 20) ? below(random, 5) : 0;
  p.x_row = x_turned ? 1 : inner + x_pad;
  p.x_column = x_turned ? p.m + x_pad : 1;
  const bool x_shared = coin(random, 30);  // by all matrices of a batch
  const int64_t x_matrix = (x_turned ? inner : p.m) * (x_turned ? p.x_column : p.x_row),
                x_matrices = x_shared ? std::min<int64_t>(p.batch, 1) : p.batch, x_size = x_matrices * x_matrix;
  p.x_batch = x_shared ? 0 : x_matrix;
  p.y_row = y_turned ? 1 : outer + y_pad;
  p.y_column = y_turned ? p.m + y_pad : 1;
  p.y_batch = (y_turned ? outer : p.m) * (y_turned ? p.y_column : p.y_row);

  struct Arrays {
    Exact<uint8_t> codes, scale, offset, scale_codes, offset_codes, zero;
    Exact<float> row_scale, table, scale_table;
    Exact<uint8_t> x, y;
    Exact<int32_t> selected;
  };
  const int64_t item = p.x_type == kFloat32 ? 4 : 2, width = scale_bytes(p.scale_kind);
  auto arrays = std::make_shared<Arrays>(
      Arrays{Exact<uint8_t>(p.stack * p.n * p.words), Exact<uint8_t>(p.stack * p.n * scales * width),
             Exact<uint8_t>(p.stack * p.n * scales * width), Exact<uint8_t>(p.stack * p.n * p.scale_words),
             Exact<uint8_t>(p.stack * p.n * p.scale_words), Exact<uint8_t>(p.stack * p.n * p.zero_words),
             Exact<float>(p.stack * p.n), Exact<float>(int64_t{1} << p.bits), Exact<float>(int64_t{1} << p.scale_bits),
             Exact<uint8_t>(x_size * item), Exact<uint8_t>(p.batch * p.y_batch * item), Exact<int32_t>(p.batch)});
  Arrays& a = *arrays;
  made.keep = arrays;

  const int codes = 1 << p.bits;
  const int whole =
      static_cast<int>(below(random, 4));  // tables of integers, or of parts of them, have kernels of their own
  const int middle = p.codec == nullptr        ? (coin(random, 25) ? 0 : codes / 2)
                   : p.codec->kind == kTrellis ? 126
                                               : codes / 2;
  const float shift = coin(random, 10) ? 0.5f : 0;
  for (int i = 0; i < codes; ++i) {
    switch (p.values) {
      case kValueInteger: a.table[i] = static_cast<float>(i - middle); break;
      case kValueE4M3: a.table[i] = (i & 127) == 127 ? NAN : static_cast<float>(small_float(i, 4, 3, 7, true)); break;
      case kValueE5M2: a.table[i] = (i & 127) >= 124 ? NAN : static_cast<float>(small_float(i, 5, 2, 15, true)); break;
      default:
        a.table[i] = normal(random);
        if (whole == 1) a.table[i] = static_cast<float>(i - middle) + shift;
        if (whole == 2) a.table[i] = static_cast<float>(below(random, 25) - 12) / 2;
    }
  }
  made.integers = p.values == kValueInteger || whole == 1 || whole == 2;
  // Padding must not matter, so the value of an unused code may be anything.
  const bool hole = p.values == kValueTable && coin(random, 30);
  if (hole) a.table[0] = coin(random) ? NAN : INFINITY;
  for (int64_t i = 0; i < a.codes.size; ++i) a.codes[i] = static_cast<uint8_t>(random());
  if (p.values == kValueE4M3 || p.values == kValueE5M2)
    for (int64_t i = 0; i < a.codes.size; ++i)
      if ((a.codes[i] & 127) >= 120) a.codes[i] &= 0x8f;
  if (hole)  // all codes are ones
    for (int64_t i = 0; i < a.codes.size; ++i)
      a.codes[i] |= is_split(p.bits) ? 255 : p.bits == 1 ? 255 : p.bits == 2 ? 0x55 : p.bits == 4 ? 0x11 : 1;
  for (Exact<uint8_t>* floats : {&a.scale, &a.offset})
    for (int64_t i = 0; i < floats->size / width; ++i) {
      Exact<uint8_t>& scale = *floats;
      const float value = 0.5f + 0.1f * fabsf(normal(random));
      const uint32_t word = float_to_bits(coin(random, 20) ? -value : value);
      const uint16_t two =
          p.scale_kind == kScaleFloat16 ? to_half(bits_to_float(word)) : to_bfloat16(bits_to_float(word));
      switch (p.scale_kind) {
        case kScaleFloat32: memcpy(&scale[4 * i], &word, 4); break;
        case kScaleFloat16:
        case kScaleBFloat16: memcpy(&scale[2 * i], &two, 2); break;
        case kScaleE8M0: scale[i] = static_cast<uint8_t>(120 + below(random, 12)); break;
        // The smallest, which are subnormal, among them.
        case kScaleE5M2: scale[i] = static_cast<uint8_t>(below(random, 80) + (coin(random, 20) ? 128 : 0)); break;
        case kScaleE4M3: scale[i] = static_cast<uint8_t>(below(random, 100) + (coin(random, 20) ? 128 : 0)); break;
        default: scale[i] = static_cast<uint8_t>(below(random, 256));
      }
    }
  for (Exact<uint8_t>* packed : {&a.scale_codes, &a.offset_codes})
    for (int64_t i = 0; i < packed->size; ++i) (*packed)[i] = static_cast<uint8_t>(random());
  const float more = coin(random, 10) ? 0.5f : 0;  // looks like integers
  const int64_t lowest = p.scale_bits == 8 || coin(random) ? a.scale_table.size / 2 : 0;
  for (int64_t i = 0; i < a.scale_table.size; ++i)
    a.scale_table[i] = consecutive ? static_cast<float>(i - lowest) + more : 0.5f + normal(random);
  for (int64_t i = 0; i < a.zero.size; ++i) a.zero[i] = static_cast<uint8_t>(random());
  for (int64_t i = 0; i < a.row_scale.size; ++i) a.row_scale[i] = 1 + 0.5f * normal(random);
  std::vector<double> x(x_size);
  const int outliers =
      p.x_type == kFloat32 && coin(random, 20) ? 1 + static_cast<int>(below(random, 30)) : 0;  // one in so many
  // These may not change other rows, nor make a kernel take more memory than it has.
  const int64_t hostile =
      p.x_type == kFloat32 && !p.transpose && coin(random, 15) ? 1 + below(random, 2 * p.m * inner + 1) : 0;
  for (size_t i = 0; i < x.size(); ++i) {
    float value = normal(random);
    if (outliers > 0 && below(random, outliers) == 0) value = ldexpf(value, static_cast<int>(below(random, 40)));
    if (hostile > 0 && below(random, hostile) == 0) value = coin(random) ? NAN : INFINITY;
    if (p.x_type == kFloat32) {
      memcpy(&a.x[4 * i], &value, 4);
      x[i] = value;
    } else {
      const uint16_t two = p.x_type == kFloat16 ? to_half(value) : to_bfloat16(value);
      memcpy(&a.x[2 * i], &two, 2);
      x[i] = p.x_type == kFloat16 ? half(two) : bits_to_float(static_cast<uint32_t>(two) << 16);
    }
  }
  p.x = a.x.data.get();
  p.y = a.y.data.get();
  p.codes = a.codes.data.get();
  p.scale = a.scale.data.get();
  p.table = a.table.data.get();
  p.zero_point = zeros ? a.zero.data.get() : nullptr;
  p.row_scale = rows ? a.row_scale.data.get() : nullptr;
  p.offset = offsets ? a.offset.data.get() : nullptr;
  if (coded) {
    p.scale_codes = a.scale_codes.data.get();
    p.scale_table = a.scale_table.data.get();
    if (offsets) p.offset_codes = a.offset_codes.data.get();
  }
  choose_matrices(random, p, a.selected);
  p.selected = selects ? a.selected.data.get() : nullptr;

  made.expected.assign(p.batch * p.m * outer, 0);
  made.magnitude = made.squares = made.expected;
  made.reach.assign(p.batch * p.m * outer, 0);
  double largest = 0;  // of what codes may stand for
  for (int i = 0; i < codes; ++i)
    if (std::isfinite(a.table[i])) largest = std::max<double>(largest, fabs(a.table[i]));
  if (zeros) largest += codes - 1;
  for (int64_t i = 0; i < static_cast<int64_t>(made.reach.size()) && !p.transpose; ++i) {
    const int64_t b = i / (p.m * p.n), m = i / p.n % p.m, row = matrix_of(p, b) * p.n + i % p.n;
    double most_x = 0, most_w = 0;
    for (int64_t k = 0; k < p.k; ++k) most_x = std::max(most_x, fabs(x[b * p.x_batch + m * p.x_row + k * p.x_column]));
    for (int64_t block = 0; block < p.blocks; ++block) most_w = std::max(most_w, fabs(scale_at(p, row, block)));
    made.reach[i] = most_x * most_w * largest * (rows ? fabs(a.row_scale[row]) : 1);
  }
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t n = 0; n < p.n; ++n)
      for (int64_t k = 0; k < p.k; ++k) {
        const int64_t row = matrix_of(p, b) * p.n + n, block = k / p.block_size;
        const double value = a.table[code_at(p.codec, &a.codes[row * p.words], p.k, p.bits, k)];
        double w = (value - (zeros ? code_at(&a.zero[row * p.zero_words], p.blocks, p.bits, block) : 0)) *
                   scale_at(p, row, block);
        if (rows) w *= a.row_scale[row];
        double size = fabs(w);
        if (offsets) {  // a product of their own, with the middle of the table
          const double offset = scale_at(p, row, block, true);
          w += offset;
          size = fabs(largest * scale_at(p, row, block) * (rows ? a.row_scale[row] : 1)) + fabs(offset);
        }
        for (int64_t m = 0; m < p.m; ++m) {
          const double number = x[b * p.x_batch + m * p.x_row + (p.transpose ? n : k) * p.x_column];
          const int64_t at = (b * p.m + m) * outer + (p.transpose ? k : n);
          made.expected[at] += number * w;
          made.magnitude[at] += fabs(number) * size;
          made.squares[at] += number * size * number * size;
        }
      }
  // Where all codes stand for one number, results of a row of x are alike.
  bool alike = hole && p.bits < 8;
  for (int i = 1; i < codes && !alike; ++i) alike = a.table[i] == a.table[0];
  const int64_t apart = alike ? 1 : p.transpose ? p.blocks : outer;
  made.independent = outliers > 0 || hostile > 0 ? 0 : static_cast<double>(x_matrices * p.m * apart);
  char text[300];
  snprintf(text, sizeof text,
           "batch %ld of %ld m %ld n %ld k %ld bits %d values %d block %ld scale %d of %d bits, %ld x %d transpose %d "
           "zeros %d rows %d offsets %d turned %d%d shared %d coarse %d codec %d",
           static_cast<long>(p.batch), selects ? static_cast<long>(p.stack) : 0L, static_cast<long>(p.m),
           static_cast<long>(p.n), static_cast<long>(p.k), p.bits, p.values, static_cast<long>(p.block_size),
           p.scale_kind, p.scale_bits, static_cast<long>(p.scale_block_size), p.x_type, p.transpose, zeros, rows,
           offsets, x_turned, y_turned, x_shared, p.coarse, codec_index(p));
  made.text = text;
  return made;
}

double result_at(const Problem& p, int64_t at) {
  if (p.x_type == kFloat32) return static_cast<const float*>(p.y)[at];
  const uint16_t two = static_cast<const uint16_t*>(p.y)[at];
  if (p.x_type == kBFloat16) return bits_to_float(static_cast<uint32_t>(two) << 16);
  if ((two & 0x7c00) != 0x7c00) return half(two);
  return two & 0x3ff ? NAN : copysign(INFINITY, two & 0x8000 ? -1 : 1);
}

int lanes_of(const Isa& isa) {
  return strcmp(isa.name, "avx2") == 0 ? 8 : strncmp(isa.name, "av", 2) == 0 || strcmp(isa.name, "amx") == 0 ? 16 : 4;
}

// Whether the result of `isa` is right, within the bounds of `bounds.h`.
bool right(const Isa& isa, const Made& made, Pool& pool, int threads) {
  const Problem& p = made.problem;
  char why[200];
  if (check_problem(p, why, sizeof why) != nullptr) {
    printf("refused: %s (%s)\n", why, made.text.c_str());
    return false;
  }
  const int64_t outer = p.transpose ? p.k : p.n, inner = p.transpose ? p.n : p.k;
  const double roundings = float_roundings(p, lanes_of(isa));
  // With AMX numbers are integers relative to the largest of some, and where the weight is of integers with VNNI too,
  // and with AVX2 in one row.
  const bool slices = strstr(isa.name, "avx512v") != nullptr || (strcmp(isa.name, "avx2") == 0 && p.m == 1);
  const bool relative = !p.transpose && (strcmp(isa.name, "amx") == 0 || (made.integers && slices));
  const double of_integers = relative ? integer_error(p.coarse, static_cast<double>(inner)) : 0;
  double error = 0, mean = 0;
  memset(p.y, 0xff, p.batch * p.y_batch * (p.x_type == kFloat32 ? 4 : 2));  // all NaN
  if (!run_problem(isa, p, pool, threads)) return false;
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t m = 0; m < p.m; ++m)
      for (int64_t i = 0; i < outer; ++i) {
        const int64_t at = b * p.y_batch + m * p.y_row + i * p.y_column, index = (b * p.m + m) * outer + i;
        const double y = result_at(p, at);
        const double expected = made.expected[index];
        if (p.x_type == kFloat16 && fabs(expected) > 65000 && fabs(y) > 60000) continue;
        if (!std::isfinite(expected)) {
          if (std::isnan(expected)                          ? std::isnan(y)
              : p.x_type == kFloat32 && p.offset != nullptr ? y == expected
                                                            : !std::isfinite(y))
            continue;
          printf("%s: y[%ld, %ld, %ld] is %.9g, not %.9g (%s)\n", isa.name, static_cast<long>(b), static_cast<long>(m),
                 static_cast<long>(i), y, expected, made.text.c_str());
          return false;
        }
        const double integers = of_integers * made.reach[index], magnitude = made.magnitude[index];
        const double squares = made.squares[index], rounding = result_rounding(p.x_type, expected);
        error += (y - expected) * (y - expected);
        mean += mean_square(roundings, squares) + integers * integers;
        const double bound = std::min(most(roundings, magnitude), likely(roundings, squares)) + kSure * integers;
        if (!(fabs(y - expected) <= bound + rounding + 1e-30)) {
          printf("%s: y[%ld, %ld, %ld] is %.9g, not %.9g (%s)\n", isa.name, static_cast<long>(b), static_cast<long>(m),
                 static_cast<long>(i), y, expected, made.text.c_str());
          return false;
        }
      }
  if (p.x_type == kFloat32 && made.independent > 0 && !(error <= most_of_mean(made.independent) * mean)) {
    printf("%s: errors are %.3g times what roundings explain (%s)\n", isa.name, sqrt(error / mean), made.text.c_str());
    return false;
  }
  return true;
}

// Whether decoding has exactly the values of the formula in float32, rounded to the type of the result.
bool decodes(const Isa& isa, const Made& made, Pool& pool, int threads) {
  Problem p = made.problem;
  p.offset = nullptr;
  p.offset_codes = nullptr;
  const int64_t item = p.x_type == kFloat32 ? 4 : 2;
  Exact<uint8_t> dense(p.batch * p.n * p.k * item);
  memset(dense.data.get(), 0xff, dense.size);
  p.x = nullptr;
  p.y = dense.data.get();
  p.m = p.transpose = 0;
  p.clip = threads % 2;
  char why[200];
  if (check_problem(p, why, sizeof why) != nullptr || !run_decode(isa, p, pool, threads)) {
    printf("%s: decoding is refused: %s (%s)\n", isa.name, why, made.text.c_str());
    return false;
  }
  for (int64_t to = 0; to < p.batch * p.n; ++to)
    for (int64_t k = 0; k < p.k; ++k) {
      const int64_t row = matrix_of(p, to / p.n) * p.n + to % p.n;
      const int64_t at = to * p.k + k;
      const float value =
          p.table[code_at(p.codec, p.codes + row * p.words, p.k, p.bits, k)] -
          static_cast<float>(
              p.zero_point ? code_at(p.zero_point + row * p.zero_words, p.blocks, p.bits, k / p.block_size) : 0);
      const float scale =
          static_cast<float>(scale_at(p, row, k / p.block_size)) * (p.row_scale ? p.row_scale[row] : 1.0f);
      const double expected = value * scale;
      double y;
      uint16_t two;
      if (p.x_type == kFloat32) {
        float four;
        memcpy(&four, &dense[4 * at], 4);
        y = four;
      } else {
        memcpy(&two, &dense[2 * at], 2);
        y = p.x_type == kFloat16 ? (two & 0x7c00) == 0x7c00 ? copysign(INFINITY, two & 0x8000 ? -1 : 1) : half(two)
                                 : bits_to_float(static_cast<uint32_t>(two) << 16);
      }
      if (p.x_type == kFloat16 && fabs(expected) > 65500 && (p.clip ? fabs(y) == 65504 : fabs(y) > 65500)) continue;
      const double rounding = p.x_type == kFloat32 ? 0
                            : p.x_type == kFloat16 ? 5e-4 * fabs(expected) + 3e-8
                                                   : 3.95e-3 * fabs(expected);
      if (!(fabs(y - expected) <= rounding)) {
        printf("%s: w[%ld, %ld] is decoded to %.9g, not %.9g (%s)\n", isa.name, static_cast<long>(row),
               static_cast<long>(k), y, expected, made.text.c_str());
        return false;
      }
    }
  return true;
}

// Whether a problem whose arrays are missing or misaligned is refused.
bool refuses_faults(const Made& made) {
  bool all = true;
  const auto check = [&](const char* what, const auto& spoil) {
    char why[200];
    Problem p = made.problem;
    spoil(p);
    if (check_problem(p, why, sizeof why) != nullptr) return;
    printf("%s is not refused (%s)\n", what, made.text.c_str());
    all = false;
  };
  const auto shift = [](auto& p) {
    p = reinterpret_cast<std::decay_t<decltype(p)>>(reinterpret_cast<uintptr_t>(p) + 1);
  };
  const Problem& good = made.problem;
  check("a misaligned table", [&](Problem& p) { shift(p.table); });
  check("misaligned x", [&](Problem& p) { shift(p.x); });
  check("misaligned y", [&](Problem& p) { shift(p.y); });
  if (scale_bytes(good.scale_kind) > 1) check("misaligned scales", [&](Problem& p) { shift(p.scale); });
  if (good.row_scale != nullptr) check("misaligned scales of rows", [&](Problem& p) { shift(p.row_scale); });
  if (good.batch == 0 || good.m == 0 || good.n == 0 || good.k == 0) return all;
  check("no x", [](Problem& p) { p.x = nullptr; });
  check("no y", [](Problem& p) { p.y = nullptr; });
  check("a weight without codes", [](Problem& p) { p.codes = nullptr; });
  check("a weight without scales", [](Problem& p) { p.scale = nullptr; });
  return all;
}

#include "fuzz_encode.h"
#include "fuzz_int8.h"

#include "fuzz_grid.h"

}  // namespace

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 1 << 12);
  const bool whole_grid = argc > 1 && strcmp(argv[1], "grid") == 0;
  if (whole_grid) --argc, ++argv;
  const Grid grid;
  int64_t problems = argc > 1 ? atoll(argv[1]) : whole_grid ? 0 : 1000;
  if (whole_grid && (problems == 0 || problems > grid.size())) problems = grid.size();
  Random random(argc > 2 ? atoll(argv[2]) : 0);
  const std::vector<int64_t> order = whole_grid ? grid.order(random) : std::vector<int64_t>();
  std::vector<const Isa*> isas;
  for (int j = 0; j < num_isas(); ++j)
    if (argc < 4 || strcmp(argv[3], isa_at(j)->name) == 0) isas.push_back(isa_at(j));
  Pool pool(3);
  int64_t wrong = 0;
  for (int64_t i = 0; i < problems && wrong < 10; ++i) {
    const int threads = 1 + static_cast<int>(i / 4 % 4);
    const Cell some = whole_grid ? grid.cell(order[i]) : Cell(), *cell = whole_grid ? &some : nullptr;
    if (i % 4 == 3) {
      const MadeEncode made = make_encode(random, cell);
      for (const Isa* isa : isas) wrong += !right_encode(*isa, made);
    }
    if (whole_grid || i % 2 == 0) {
      const Made made = make(random, cell);
      wrong += !refuses_faults(made);
      for (const Isa* isa : isas) {
        wrong += !right(*isa, made, pool, threads);
        wrong += !decodes(*isa, made, pool, threads);
      }
    }
    if (whole_grid || i % 4 == 1) {
      const MadeInt8 made = make_int8(random, cell);
      for (const Isa* isa : isas) wrong += !right_int8(*isa, made, pool, threads);
    }
  }
  printf("%ld %s on", static_cast<long>(problems), whole_grid ? "cells of the grid" : "problems");
  for (const Isa* isa : isas) printf(" %s", isa->name);
  printf(": %ld wrong\n", static_cast<long>(wrong));
  return wrong > 0 || isas.empty();
}
