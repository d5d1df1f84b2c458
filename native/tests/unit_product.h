// A product of floats with a weight: what the named tests change of it, and how they check it.
#ifndef EQQUANT_TESTS_UNIT_PRODUCT_H_
#define EQQUANT_TESTS_UNIT_PRODUCT_H_

#include "unit_data.h"

struct Method {
  const char* name;
  int64_t m;
  bool transpose;
};
constexpr Method kMethods[] = {
    {"one row", 1, false},    {"three rows", 3, false},         {"ten rows", 10, false},
    {"many rows", 33, false}, {"one row, transposed", 1, true}, {"many rows, transposed", 20, true},
};

// x times a weight. A test changes some inputs, and then checks the product.
struct Product {
  Product(const Weight& weight, const Method& method, int64_t batch = 1)
      : w(weight), m(method.m), batch(batch), inner(method.transpose ? weight.form.n : weight.form.k),
        outer(method.transpose ? weight.form.k : weight.form.n), transpose(method.transpose), x(batch * m * inner) {
    Random random(2);
    for (double& number : x) number = static_cast<double>(whole(random, -60, 60)) / 16;  // exact in 16 bits
  }

  double& x_at(int64_t row, int64_t i) { return x[row * inner + i]; }

  void check(const Isa& isa) const {
    Problem p = {};
    w.describe(&p);
    p.batch = batch;
    p.stack = w.form.stack;
    p.selected = selected.empty() ? nullptr : selected.data();
    p.m = m;
    p.transpose = transpose;
    p.coarse = coarse;
    p.x_type = x_type;
    layout.describe(inner, outer, &p);
    const int64_t item = float_bytes(x_type);
    std::vector<uint8_t> bytes(batch * p.x_batch * item, 0xff);  // gaps are NaN
    for (int64_t i = 0; i < batch * m * inner; ++i) {
      const int64_t b = i / (m * inner), row = i / inner % m, column = i % inner;
      store_float(x_type, x[i], &bytes[item * (b * p.x_batch + row * p.x_row + column * p.x_column)]);
    }
    p.x = bytes.data();
    Results y(&p);
    char why[200];
    expect_accepted(check_problem(p, why, sizeof why));
    Pool pool;
    run_problem(isa, p, pool, threads);
    const Dense dense(w);
    std::vector<double> of_rows(batch * m), of_columns(batch * outer);  // the largest error
    for (int64_t i = 0; i < batch * m * outer; ++i) {
      const int64_t b = i / (m * outer), row = i / outer % m, column = i % outer;
      const double error = check_number(dense, b, row, column, y.take(p, b, row, column));
      of_rows[b * m + row] = std::max(of_rows[b * m + row], error);
      of_columns[b * outer + column] = std::max(of_columns[b * outer + column], error);
    }
    y.expect_gaps();
    // A sum of `inner` roundings to 16 bits: 1 / 32600 of the amax each, of numbers that are half of it on average.
    // This is a fifth of it, and ten times an error of float32.
    const double rounded = 0x1p-18 / sqrt(static_cast<double>(inner));
    for (size_t i = 0; rounds_x && i < of_rows.size(); ++i)
      if (of_rows[i] < rounded) fail("row %zu of y is exact", i);
    for (size_t i = 0; rounds_x && i < of_columns.size(); ++i)
      if (of_columns[i] < rounded) fail("column %zu of y is exact", i);
  }

  // The numbers of a weight, and the magnitudes that bound their rounding errors.
  struct Dense {
    explicit Dense(const Weight& w) {
      // Offsets are a product of their own, with the middle of the table.
      double largest = 0;
      for (const float value : w.table) largest = std::max<double>(largest, fabs(value));
      for (int64_t n = 0; n < w.rows; ++n)
        for (int64_t k = 0; k < w.form.k; ++k) {
          numbers.push_back(w.value(n, k) * w.scale(n, k) + w.offset(n, k));
          const double size = w.form.offsets ? largest : fabs(w.value(n, k));
          sizes.push_back(size * fabs(w.scale(n, k)) + fabs(w.offset(n, k)));
        }
    }
    std::vector<double> numbers, sizes;
  };

  // Returns the error relative to the terms.
  double check_number(const Dense& dense, int64_t b, int64_t row, int64_t o, double actual) const {
    const int64_t matrix = matrix_of(selected, b, w.form.stack);
    double expected = 0, magnitude = 0;
    bool has_nan = false;
    for (int64_t i = 0; i < inner; ++i) {
      const double number = x[(b * m + row) * inner + i];
      const int64_t at = (matrix * w.form.n + (transpose ? i : o)) * w.form.k + (transpose ? o : i);
      expected += number * dense.numbers[at];
      magnitude += fabs(number) * dense.sizes[at];
      has_nan = has_nan || std::isnan(number);
    }
    // A float has 24 bits, and is added up in so few steps that 32 roundings are more than there are. Kernels of
    // integers round x to 24 bits of the largest number, which is not more. Coarse ones round it to 16 bits.
    const double bound = magnitude * (coarse ? 0x1p-13 : tolerance) + rounding(x_type, expected);
    // NaN stays NaN. Whether an infinity or NaN comes of infinities is not promised.
    const bool right =
        std::isfinite(expected) || exact_infinities || has_nan ? near(actual, expected, bound) : !std::isfinite(actual);
    if (!right)
      fail("y[%d, %d, %d] is %.9g, not %.9g within %.2g", static_cast<int>(b), static_cast<int>(row),
           static_cast<int>(o), actual, expected, bound);
    return fabs(actual - expected) / magnitude;
  }

  Weight w;
  int64_t m, batch, inner, outer, threads = kThreads;
  Layout layout;
  int x_type = kFloat32;
  double tolerance = 0x1p-19;  // relative to the terms
  bool transpose, coarse = false, exact_infinities = false;
  bool rounds_x = false;  // to 16 bits: only a fast kernel does, so that a fallback that takes its place is seen
  std::vector<int32_t> selected;
  std::vector<double> x;  // (batch, m, inner)
};

#endif  // EQQUANT_TESTS_UNIT_PRODUCT_H_
