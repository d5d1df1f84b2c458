// Quantizing: codes of values, and what scales are chosen from. Both are exact.
#include "unit_data.h"

namespace {

using std::to_string;

// In which larger integers are larger floats, and -0 is next below 0: see `encode.h`.
int32_t float_order(float value) {
  const int32_t bits = static_cast<int32_t>(bits_of(value));
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}

// Rows of values, each block of which has a divisor of one and nothing else.
struct Encode {
  Encode(std::vector<double> values, int64_t k, int bits, int rule = kEven)
      : x(std::move(values)), k(k), bits(bits), rule(rule), divisor(x.size(), 1) {}

  // The packed codes of an instruction set, whose bytes are checked.
  void expect(const Isa& isa, const std::vector<int>& codes) const {
    const int64_t n = static_cast<int64_t>(x.size()) / k, blocks = (k + block - 1) / block;
    std::vector<uint8_t> xs(x.size() * float_bytes(type)), packed(n * packed_bytes(k, bits), 0xff);
    for (size_t i = 0; i < x.size(); ++i) store_float(type, x[i], &xs[i * float_bytes(type)]);
    // One value for each block, and no more.
    const auto of_blocks = [&](std::vector<float> all) {
      if (!all.empty()) all.resize(n * blocks);
      all.shrink_to_fit();
      return all;
    };
    const std::vector<float> divisors = of_blocks(divisor), factors = of_blocks(factor), offsets = of_blocks(offset),
                             shifts = of_blocks(shift);
    EncodeProblem p = {};
    p.x = xs.data();
    p.y = packed.data();
    p.divisor = divisors.data();
    p.factor = factors.empty() ? nullptr : factors.data();
    p.offset = offsets.empty() ? nullptr : offsets.data();
    p.shift = shifts.empty() ? nullptr : shifts.data();
    p.n = n;
    p.k = k;
    p.words = packed_bytes(k, bits);
    p.blocks = blocks;
    p.block_size = block;
    p.bits = bits;
    p.x_type = type;
    p.rule = rule;
    p.nan = nan;
    p.bias = bias;
    std::vector<int32_t> order;
    for (const float step : steps) order.push_back(float_order(step));
    p.steps = order.data();
    p.codes = step_codes.data();
    p.num_steps = static_cast<int64_t>(order.size());
    char why[200];
    expect_accepted(check_encode(p, why, sizeof why));
    const EncodeKernel& kernel = encode_kernel(isa);
    kernel.encode(&p, n / 2, n);  // rows are independent
    for (int64_t i = 0; i < n / 2 * p.words; ++i)
      if (packed[i] != 0xff) fail("byte %d of another row is written", static_cast<int>(i));
    kernel.encode(&p, 0, n / 2);
    // Alone, a code lies where it is alone in a packed row.
    const std::vector<uint8_t> expected = pack(codes, k, bits);
    for (size_t i = 0; i < expected.size(); ++i)
      if (packed[i] != expected[i])
        fail("byte %zu is %02x, not %02x (codes %s)", i, packed[i], expected[i], first_codes(codes).c_str());
  }

  static std::string first_codes(const std::vector<int>& codes) {
    std::string text;
    for (size_t i = 0; i < codes.size() && i < 12; ++i) text += (i > 0 ? " " : "") + to_string(codes[i]);
    return text + (codes.size() > 12 ? " ..." : "");
  }

  std::vector<double> x;
  int64_t k, block = 32;
  int bits, rule, type = kFloat32, nan = 0;
  float bias = 0;
  std::vector<float> divisor, factor, offset, shift, steps;
  std::vector<int32_t> step_codes = {0};
};

void add_packing() {
  for (int bits = 1; bits <= 8; ++bits)
    for (const int64_t k :
         {int64_t{1}, int64_t{7}, segment_codes(bits) - 1, segment_codes(bits), segment_codes(bits) + 1, int64_t{1100}})
      test("encode/" + to_string(bits) + " bits/rows of " + to_string(k) + " codes", [=](const Isa& isa) {
        Random random(4);
        std::vector<int> codes(3 * k);
        for (int& code : codes) code = static_cast<int>(whole(random, 0, (1 << bits) - 1));
        Encode(std::vector<double>(codes.begin(), codes.end()), k, bits).expect(isa, codes);
      });
}

void add_rules() {
  test("encode/nearest/ties go to even", [](const Isa& isa) {
    Encode e({-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 0.49999997f, 1.4999999f}, 8, 4);
    e.bias = 8;
    e.expect(isa, {6, 6, 8, 8, 10, 10, 8, 9});
  });
  test("encode/nearest/clips", [](const Isa& isa) {
    Encode e({-9, -8.5, -8, 7, 7.5, 8, INFINITY, -INFINITY, 3e38f, -3e38f}, 10, 4);
    e.bias = 8;
    e.expect(isa, {0, 0, 0, 15, 15, 15, 15, 0, 15, 0});
  });
  test("encode/up/ties go up", [](const Isa& isa) {
    Encode e({-0.75, -0.5, -0.25, 0, 0.25, 0.5, 1.5, 2.5, 0.4375}, 9, 4, kUp);
    e.bias = 0.5;
    e.expect(isa, {0, 0, 0, 0, 0, 1, 2, 3, 0});
  });
  test("encode/up/clips", [](const Isa& isa) {
    Encode e({-9, -8.5, -7.5, 7, 7.5, 9, INFINITY, -INFINITY}, 8, 4, kUp);
    e.bias = 8.5;
    e.expect(isa, {0, 0, 1, 15, 15, 15, 15, 0});
  });
  test("encode/steps/a step begins a code", [](const Isa& isa) {
    const float step = 1.5f;
    Encode e(
        {-5, nextafterf(-2, -9), -2, -1.75, nextafterf(step, 0), step, nextafterf(step, 9), 100, INFINITY, -INFINITY},
        10, 3, kSteps);
    e.steps = {-2, step};
    e.step_codes = {5, 0, 3};
    e.expect(isa, {5, 5, 0, 0, 0, 3, 3, 3, 3, 5});
  });
  test("encode/steps/minus zero is below zero", [](const Isa& isa) {
    Encode e({-1, -0.0, 0, 1}, 4, 2, kSteps);
    e.steps = {0};
    e.step_codes = {1, 2};
    e.expect(isa, {1, 1, 2, 2});
  });
  test("encode/steps/none", [](const Isa& isa) {
    Encode e({-1, 0, 1}, 3, 2, kSteps);
    e.step_codes = {3};
    e.expect(isa, {3, 3, 3});
  });
  test("encode/steps/as many as codes of 8 bits", [](const Isa& isa) {
    std::vector<double> x;
    std::vector<int> codes;
    Encode e({}, 256, 8, kSteps);
    for (int i = 0; i < 256; ++i) {
      if (i > 0) e.steps.push_back(static_cast<float>(i));
      if (i > 0) e.step_codes.push_back(i * 7 % 256);
      e.x.push_back(i + 0.5);
      codes.push_back(i * 7 % 256);
    }
    e.divisor.assign(256, 1);
    e.expect(isa, codes);
  });
  for (const int rule : {kSteps, kEven, kUp})
    test(std::string("encode/NaN has a code of its own/") + (rule == kSteps  ? "steps"
                                                             : rule == kEven ? "nearest"
                                                                             : "up"),
         [rule](const Isa& isa) {
           Encode e({NAN, 1, -NAN, 1}, 4, 4, rule);
           e.nan = 9;
           if (rule == kSteps) e.step_codes = {1};
           e.expect(isa, {9, 1, 9, 1});
         });
}

void add_blocks() {
  test("encode/blocks/divisors", [](const Isa& isa) {  // of the second row too; the last block is shorter
    Encode e({2, 4, 6, 8, 3, 6, 2, 4, 6, 8, 3, 6}, 6, 4);
    e.block = 4;
    e.divisor = {2, 3, 1, 0.5};
    e.expect(isa, {1, 2, 3, 4, 1, 2, 2, 4, 6, 8, 6, 12});
  });
  test("encode/blocks/a divisor of zero makes zeros", [](const Isa& isa) {
    Encode e({5, -5, INFINITY, NAN, 5, 5}, 6, 4);
    e.block = 4;
    e.divisor = {0, 1};
    e.bias = 8;
    e.expect(isa, {8, 8, 8, 8, 13, 13});
  });
  test("encode/blocks/a factor replaces a divisor of one alone", [](const Isa& isa) {
    Encode e({2, 4, 6, 8}, 4, 4);
    e.block = 2;
    e.divisor = {1, 2};
    e.factor = {1.5, 7};
    e.expect(isa, {3, 6, 3, 4});
  });
  test("encode/blocks/an offset is subtracted first", [](const Isa& isa) {
    Encode e({2, 4, 6, 8}, 4, 4);
    e.block = 2;
    e.divisor = {2, 1};
    e.offset = {-2, 5};
    e.expect(isa, {2, 3, 1, 3});
  });
  test("encode/blocks/a shift is added last", [](const Isa& isa) {
    Encode e({2, 4, 6, 8}, 4, 4);
    e.block = 2;
    e.divisor = {2, 0};
    e.shift = {3, 5};
    e.expect(isa, {4, 5, 5, 5});
  });
  test("encode/blocks/each of 1100 codes", [](const Isa& isa) {  // which are encoded 512 at a time
    for (const int64_t block : {1, 7, 16, 48, 100, 512, 600}) {
      Encode e({}, 1100, 8);
      e.block = block;
      e.divisor.clear();
      std::vector<int> codes;
      for (int i = 0; i < 2200; ++i) {
        const int64_t at = i / 1100 * ((1100 + block - 1) / block) + i % 1100 / block;
        codes.push_back(i * 3 % 256);
        e.x.push_back(codes.back() * static_cast<double>(1 + at % 5));
        e.divisor.resize(at + 1);
        e.divisor[at] = static_cast<float>(1 + at % 5);
      }
      e.expect(isa, codes);
    }
  });
}

void add_types() {
  for (const int type : {kBFloat16, kFloat16})
    test(type == kBFloat16 ? "encode/x/bfloat16" : "encode/x/float16", [type](const Isa& isa) {
      Encode e({-2.5, -1, 0.5, 1.5, 2.5, 7.25, 100, -100, INFINITY, NAN, 0.25, 3, 4, 5, 6, 7, 8.5, 2}, 18, 4);
      e.type = type;
      e.bias = 8;
      e.nan = 1;
      e.expect(isa, {6, 7, 8, 10, 10, 15, 15, 0, 15, 1, 8, 11, 12, 13, 14, 15, 15, 10});
    });
}

void expect_reduced(const Isa& isa, int kind, std::vector<float> x, double expected) {
  float y[3] = {-77, -77, -77};
  // The row in the middle of three, of which others are not reduced.
  const int64_t k = static_cast<int64_t>(x.size());
  std::vector<float> rows;
  for (int i = 0; i < 3; ++i) rows.insert(rows.end(), x.begin(), x.end());
  rows.shrink_to_fit();
  const ReduceProblem p = {rows.data(), y, 3, k, kind};
  encode_kernel(isa).reduce(&p, 1, 2);
  if (y[0] != -77 || y[2] != -77) fail("another row is written");
  if (!near(y[1], expected, 0))
    fail("kind %d of %d numbers is %.9g, not %.9g", kind, static_cast<int>(k), y[1], expected);
}

void add_reductions() {
  const char* const names[] = {"largest magnitude", "value of largest magnitude", "least value", "largest value"};
  for (int kind = kLargest; kind <= kHigh; ++kind) {
    const std::string name = std::string("reduce/") + names[kind];
    test(name + "/wherever it is", [kind](const Isa& isa) {
      for (const int k : {1, 2, 15, 16, 17, 31, 32, 33, 48, 65})
        for (int at = 0; at < k; ++at)
          for (const float value : {5.5f, -5.5f}) {
            std::vector<float> x(k);
            for (int i = 0; i < k; ++i) x[i] = static_cast<float>(i % 3 - 1);
            x[at] = value;
            float low = 0, high = 0;
            for (const float number : x) {
              low = std::min(low, number);
              high = std::max(high, number);
            }
            expect_reduced(isa, kind, x,
                           kind == kLargest     ? 5.5f
                           : kind == kAtLargest ? value
                           : kind == kLow       ? low
                                                : high);
          }
    });
    test(name + "/NaN and infinities make NaN", [kind](const Isa& isa) {
      for (const int k : {1, 16, 37})
        for (int at = 0; at < k; ++at)
          for (const float value : {NAN, -NAN, INFINITY, -INFINITY}) {
            std::vector<float> x(k, 1);
            x[at] = value;
            expect_reduced(isa, kind, x, NAN);
          }
    });
    test(name + "/zeros of both signs", [kind](const Isa& isa) {
      for (const int k : {1, 16, 17}) {
        expect_reduced(isa, kind, std::vector<float>(k, 0.0f), 0);
        expect_reduced(isa, kind, std::vector<float>(k, -0.0f), 0);
      }
    });
    test(name + "/of nothing is zero", [kind](const Isa& isa) { expect_reduced(isa, kind, {}, 0); });
    test(name + "/largest floats", [kind](const Isa& isa) {
      std::vector<float> x(20, 1);
      x[3] = x[18] = -3.4028235e38f;
      expect_reduced(isa, kind, x, kind == kLargest ? 3.4028235e38f : kind == kHigh ? 1 : -3.4028235e38f);
    });
  }
  test("reduce/value of largest magnitude/the first of both signs", [](const Isa& isa) {
    for (const int k : {2, 16, 17, 40})
      for (int at = 0; at < k; ++at)
        for (const float sign : {1.0f, -1.0f}) {
          std::vector<float> x(k, 1);
          for (int i = at; i < k; ++i) x[i] = (i == at ? 1 : i % 2 ? -1 : 1) * 4 * sign;
          expect_reduced(isa, kAtLargest, x, 4 * sign);
        }
  });
  test("reduce/least value/is at most zero", [](const Isa& isa) { expect_reduced(isa, kLow, {3, 2, 5}, 0); });
  test("reduce/largest value/is at least zero", [](const Isa& isa) { expect_reduced(isa, kHigh, {-3, -2, -5}, 0); });
}

}  // namespace

void add_encode_tests() {
  add_packing();
  add_rules();
  add_blocks();
  add_types();
  add_reductions();
}
