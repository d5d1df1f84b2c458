// Trellis codes: the search finds the best sequence, and every instruction set the same.
#include <cmath>
#include <random>
#include <vector>

#include "unit.h"

namespace {

constexpr uint32_t kFirst = 0x3195, kSecond = 0x394D;

using std::to_string;

// Rows of normally distributed values, with weights of their errors and perhaps feedback.
struct Rows {
  Rows(int64_t n, int64_t k, int bits, bool feedback) : n(n), k(k), bits(bits) {
    std::mt19937 random(static_cast<unsigned>(97 * k + bits));
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < n * k; ++i) {
      values.push_back(36 * normal(random));
      weights.push_back(std::fabs(normal(random)) + 0.1f);
    }
    for (int64_t i = 0; feedback && i < k * k; ++i)
      corrections.push_back(i / k < i % k ? normal(random) / static_cast<float>(k) : 0);
  }

  int64_t words() const { return (k / 128 * 128 + (k % 128 + 15) / 16 * 16) * bits / 8; }

  std::vector<uint8_t> encode(const Isa& isa) const {
    std::vector<uint8_t> packed(n * words(), 0xff);
    TrellisProblem p = {};
    p.values = values.data();
    p.weights = weights.data();
    p.feedback = corrections.empty() ? nullptr : corrections.data();
    p.y = packed.data();
    p.n = n;
    p.rows = corrections.empty() ? n : n * k * k / static_cast<int64_t>(corrections.size());
    p.k = k;
    p.words = words();
    p.bits = bits;
    p.multipliers = kSecond << 16 | kFirst;
    char why[200];
    if (check_trellis(p, why, sizeof why) != nullptr) fail("refused: %s", why);
    auto* memory = static_cast<TrellisMemory*>(allocate_aligned(trellis_bytes(p)));
    encode_kernel(isa).trellis(&p, 0, n, memory);
    free_aligned(memory);
    return packed;
  }

  // The values of a row, bit by bit.
  std::vector<int> decode(const uint8_t* packed) const {
    std::vector<int> found;
    for (int64_t first = 0; first < k; first += 128) {
      const int64_t count = k - first < 128 ? (k - first + 15) / 16 * 16 : 128, size = count * bits;
      for (int64_t i = 0; i < count && first + i < k; ++i) {
        uint32_t window = 0;
        for (int bit = 0; bit < 12; ++bit) {
          const int64_t at = (i * bits + bit) % size;
          window |= static_cast<uint32_t>(packed[at / 8] >> at % 8 & 1) << bit;
        }
        const uint32_t product = window * kFirst & 0xffff, high = product * kSecond >> 16;
        found.push_back(static_cast<int>((product & 63) + (product >> 8 & 63) + (high & 63) + (high >> 8 & 63)) - 123);
      }
      packed += size / 8;
    }
    return found;
  }

  // The weighted squared error of a row, where each error is taken from the values that follow.
  double error(int64_t row, const uint8_t* packed) const {
    const std::vector<int> found = decode(packed);
    std::vector<double> errors(k);
    double sum = 0;
    for (int64_t i = 0; i < k; ++i) {
      errors[i] = values[row * k + i] - found[i];
      for (int64_t j = 0; j < i && !corrections.empty(); ++j) errors[i] -= corrections[j * k + i] * errors[j];
      sum += weights[row * k + i] * errors[i] * errors[i];
    }
    return sum;
  }

  int64_t n, k;
  int bits;
  std::vector<float> values, weights, corrections;
};

// Codes of 16 values of one bit are 16 bits, so all can be tried; the search leaves the lowest 11 as it guessed them.
void expect_best(const Isa& isa, bool feedback) {
  const Rows rows(4, 16, 1, feedback);
  const std::vector<uint8_t> packed = rows.encode(isa);
  for (int64_t row = 0; row < rows.n; ++row) {
    const uint8_t* own = &packed[2 * row];
    const double found = rows.error(row, own);
    for (int free = 0; free < 32; ++free) {
      const uint8_t other[2] = {own[0], static_cast<uint8_t>((own[1] & 7) | free << 3)};
      // With feedback paths are compared by their own errors alone, so a better one may have been dropped early.
      if (rows.error(row, other) < found * (feedback ? 0.5 : 0.9999)) fail("sequence %d is better", free);
    }
  }
}

// A change of a right problem, which is refused unless `accepted`.
void check(const std::string& name, const std::function<void(TrellisProblem&)>& change, bool accepted = false) {
  test("check/trellis/" + name, [=](const Isa&) {
    static const float values[256] = {};
    TrellisProblem p = {};
    p.values = p.weights = values;
    p.n = p.rows = 2;
    p.k = 128;
    p.bits = 2;
    p.words = 32;
    change(p);
    char why[200];
    if ((check_trellis(p, why, sizeof why) == nullptr) != accepted) fail(accepted ? "it is refused" : "it is accepted");
  });
}

void add_checks() {
  using P = TrellisProblem;
  check("nothing wrong", [](P&) {}, true);
  check("0 bits", [](P& p) { p.bits = 0, p.words = 0; });
  check("5 bits", [](P& p) { p.bits = 5, p.words = 80; });
  check("a byte too few", [](P& p) { --p.words; });
  check("a byte too many", [](P& p) { ++p.words; });
  check("129 values", [](P& p) { p.k = 129, p.words = 36; }, true);
  check("129 values in as many bytes as 128", [](P& p) { p.k = 129; });
  check("feedback of a segment", [](P& p) { p.feedback = p.values; }, true);
  check("feedback of more", [](P& p) { p.feedback = p.values, p.k = 129, p.words = 36; });
}

}  // namespace

void add_trellis_tests() {
  add_checks();
  test("trellis/best sequence", [](const Isa& isa) { expect_best(isa, false); });
  test("trellis/best sequence/feedback", [](const Isa& isa) { expect_best(isa, true); });
  for (const int bits : {1, 2, 3, 4})
    for (const bool feedback : {false, true})
      for (const int64_t k : {int64_t{1}, int64_t{16}, int64_t{50}, int64_t{127}, int64_t{128}, int64_t{300}}) {
        if (feedback && k > 128) continue;
        const std::string name = to_string(bits) + " bits/" + to_string(k) + (feedback ? "/feedback" : "");
        test("trellis/as generic/" + name, [=](const Isa& isa) {
          const Rows rows(3, k, bits, feedback);
          if (rows.encode(isa) != rows.encode(*isa_at(0))) fail("other codes than those of generic code");
        });
        test("trellis/error/" + name, [=](const Isa& isa) {
          const Rows rows(8, k, bits, feedback);
          const std::vector<uint8_t> packed = rows.encode(isa);
          double found = 0, zeros = 0;
          for (int64_t row = 0; row < rows.n; ++row) found += rows.error(row, &packed[row * rows.words()]);
          for (size_t i = 0; i < rows.values.size(); ++i)
            zeros += rows.weights[i] * std::pow(static_cast<double>(rows.values[i]), 2);
          // A code of `bits` bits cannot do better than 4^-bits; half of that in decibels is expected, but not of a few
          // values, whose windows overlap all around.
          const double most = k < 50 ? 0.9 : std::pow(2, -bits);
          if (found > zeros * most) fail("the error is %.3f of the energy", found / zeros);
        });
      }
  test("trellis/a row is alone", [](const Isa& isa) {
    const Rows rows(3, 200, 2, false);
    Rows last(1, 200, 2, false);
    last.values.assign(rows.values.begin() + 400, rows.values.end());
    last.weights.assign(rows.weights.begin() + 400, rows.weights.end());
    const std::vector<uint8_t> all = rows.encode(isa), one = last.encode(isa);
    if (!std::equal(one.begin(), one.end(), all.begin() + 2 * rows.words())) fail("another row changes its codes");
  });
  test("trellis/each matrix has its own feedback", [](const Isa& isa) {
    Rows both(4, 50, 2, true), last(2, 50, 2, true);
    for (float& number : last.corrections) number = -number;
    last.values.assign(both.values.begin() + 100, both.values.end());
    last.weights.assign(both.weights.begin() + 100, both.weights.end());
    both.corrections.insert(both.corrections.end(), last.corrections.begin(), last.corrections.end());
    const std::vector<uint8_t> all = both.encode(isa), one = last.encode(isa);
    if (!std::equal(one.begin(), one.end(), all.begin() + 2 * both.words())) fail("another matrix changes its codes");
  });
}
