// Products of integers: codes of x times codes of a weight, and floats that are quantized inside.
#include "unit_data.h"

namespace {

using std::to_string;

struct Method {
  const char* name;
  int64_t m;
};
constexpr Method kMethods[] = {{"one row", 1}, {"three rows", 3}, {"ten rows", 10}, {"many rows", 33}};

// What x is.
enum Kind {
  kSignedCodes,
  kUnsignedCodes,
  kAffineCodes,  // with zero points
  kOwnScales,    // floats, which get scales of their own
  kOwnAffine,    // and zero points
  kGivenScales,
  kGivenAffine,
};
constexpr const char* kNames[] = {
    "signed codes",         "unsigned codes",           "affine codes", "floats, own scales", "floats, own zero points",
    "floats, given scales", "floats, given zero points"};

struct Int8Product {
  Int8Product(const Weight& weight, int64_t m, Kind kind, int64_t batch = 1)
      : w(weight), m(m), batch(batch), k(weight.form.k), kind(kind), x(batch * m * k), scales(batch * m),
        zeros(batch * m) {
    Random random(3);
    for (double& number : x)
      number = is_float() ? static_cast<double>(whole(random, -120, 100)) / 16
                          : static_cast<double>(whole(random, is_affine() ? 0 : -128, is_affine() ? 255 : 127));
    // Given to floats, they clip some.
    for (float& scale : scales) scale = static_cast<float>(whole(random, 40, 60)) / 1000;
    for (uint8_t& zero : zeros) zero = static_cast<uint8_t>(whole(random, 0, 255));
  }

  bool is_float() const { return kind >= kOwnScales; }
  bool is_affine() const { return kind == kAffineCodes || kind == kOwnAffine || kind == kGivenAffine; }
  bool is_given() const { return kind != kOwnScales && kind != kOwnAffine; }

  // A row of x as integers less their zero point, and their scale; NaN if a number is not finite.
  float quantize(int64_t row, std::vector<double>* integers) const {
    const double* numbers = &x[row * k];
    float scale = is_given() ? scales[row] : 0, zero = is_affine() && is_given() ? zeros[row] : 0;
    integers->assign(k, 0);
    if (!is_float()) {
      for (int64_t i = 0; i < k; ++i) (*integers)[i] = numbers[i] - zero;
      return scale;
    }
    float low = 0, high = 0;
    for (int64_t i = 0; i < k; ++i) {
      if (!std::isfinite(numbers[i])) return NAN;
      low = std::min(low, static_cast<float>(numbers[i]));
      high = std::max(high, static_cast<float>(numbers[i]));
    }
    if (kind == kOwnScales) scale = std::max(-low, high) / 127;
    if (kind == kOwnAffine) {
      scale = fmaf(high, 1 / 255.0f, -(low * (1 / 255.0f)));
      zero = scale > 0 ? std::min(nearbyintf(-low / scale), 255.0f) : 0;
    }
    const float least = is_affine() ? 0 : -128, most = is_affine() ? 255 : 127;
    for (int64_t i = 0; i < k && scale > 0; ++i)
      (*integers)[i] =
          std::min(std::max(nearbyintf(static_cast<float>(numbers[i]) / scale + zero), least), most) - zero;
    return scale;
  }

  void check(const Isa& isa) const {
    const int64_t n = w.form.n, x_item = is_float() ? float_bytes(type) : 1;
    Int8Problem q = {};
    Problem& p = q.p;
    w.describe(&p);
    p.batch = batch;
    p.stack = w.form.stack;
    p.selected = selected.empty() ? nullptr : selected.data();
    p.m = m;
    p.x_type = type;
    layout.describe(k, n, &p);
    q.form = is_float() ? kFloats : kind == kSignedCodes ? kSigned : kUnsigned;
    q.affine = is_affine();
    q.x_scale = is_given() ? scales.data() : nullptr;
    q.x_zero = is_affine() && is_given() ? zeros.data() : nullptr;
    std::vector<uint8_t> bytes(batch * p.x_batch * x_item, 0xff);
    for (int64_t i = 0; i < batch * m * k; ++i) {
      const int64_t b = i / (m * k), row = i / k % m, column = i % k;
      uint8_t* to = &bytes[x_item * (b * p.x_batch + row * p.x_row + column * p.x_column)];
      if (is_float()) {
        store_float(type, x[i], to);
      } else {
        *to = static_cast<uint8_t>(static_cast<int>(x[i]) + (kind == kUnsignedCodes ? 128 : 0));
      }
    }
    p.x = bytes.data();
    Results y(&p);
    char why[200];
    expect_accepted(check_int8(q, why, sizeof why));
    Pool pool;
    run_int8(isa, q, pool, kThreads);
    std::vector<double> integers;
    for (int64_t row = 0; row < batch * m; ++row) {
      const float scale = quantize(row, &integers);
      const int64_t matrix = matrix_of(selected, row / m, w.form.stack);
      for (int64_t o = 0; o < n; ++o)
        check_number(row, o, matrix * n + o, integers, scale, y.take(p, row / m, row % m, o));
    }
    y.expect_gaps();
  }

  void check_number(int64_t row, int64_t o, int64_t n, const std::vector<double>& integers, float scale,
                    double actual) const {
    double expected = 0, magnitude = 0;
    for (int64_t block = 0; block < w.blocks; ++block) {
      const int64_t first = block * w.form.block, last = std::min(first + w.form.block, k);
      double sum = 0, terms = 0;
      for (int64_t i = first; i < last; ++i) {
        sum += integers[i] * w.value(n, i);
        terms += fabs(integers[i] * w.value(n, i));
      }
      expected += sum * w.scale(n, first) * scale;
      magnitude += terms * fabs(w.scale(n, first) * scale);
    }
    // The sum of a block is exact. It is made a float, and multiplied by up to three scales: four roundings of 2^-24.
    // Several blocks are added up in lanes.
    const double bound = (w.blocks == 1 ? 0x1p-22 * fabs(expected) : 0x1p-21 * magnitude) + rounding(type, expected);
    if (!near(actual, expected, bound))
      fail("y[%d, %d] is %.9g, not %.9g within %.2g", static_cast<int>(row), static_cast<int>(o), actual, expected,
           bound);
  }

  Weight w;
  int64_t m, batch, k;
  Layout layout;
  Kind kind;
  int type = kFloat32;
  std::vector<int32_t> selected;
  std::vector<double> x;  // (batch, m, k): codes, as integers, or floats
  std::vector<float> scales;
  std::vector<uint8_t> zeros;
};

Form integers(int bits = 8) {
  Form form;
  form.bits = bits;
  form.table = kIntegers;
  return form;
}

void by_methods(
    const std::string& name, const Form& form, Kind kind,
    const std::function<void(Int8Product&)>& change = [](Int8Product&) {}) {
  for (const Method& method : kMethods)
    test("int8/" + name + "/" + method.name, [=](const Isa& isa) {
      Int8Product product(Weight(form), method.m, kind, form.stack);
      change(product);
      product.check(isa);
    });
}

void add_kinds() {
  for (int kind = kSignedCodes; kind <= kGivenAffine; ++kind)
    for (const int bits : {4, 8}) {
      Form form = integers(bits);
      const std::string name = std::string(kNames[kind]) + "/" + to_string(bits) + " bits";
      by_methods(name + "/blocks", form, static_cast<Kind>(kind));
      form.zero_points = true;
      by_methods(name + "/zero points", form, static_cast<Kind>(kind));
      form.block = form.k;
      by_methods(name + "/one scale, zero points", form, static_cast<Kind>(kind));
      form.zero_points = false;
      by_methods(name + "/one scale", form, static_cast<Kind>(kind));
    }
}

void add_weights() {
  for (int bits = 1; bits <= 8; ++bits) {
    Form form = integers(bits);
    form.k = segment_codes(bits) + 64 + 37;
    by_methods("weight/" + to_string(bits) + " bits", form, kSignedCodes);
  }
  Form form = integers(4);
  form.table = kAnyIntegers;
  by_methods("weight/4 bits, any integers", form, kSignedCodes);
  for (int kind = kScaleFloat32; kind <= kScaleUE4M4; ++kind) {
    form = integers(4);
    form.scale_kind = kind;
    by_methods(std::string("scales/") + kScaleNames[kind], form, kSignedCodes);
  }
  form = integers(4);
  form.row_scales = true;
  by_methods("scales/of rows and blocks", form, kSignedCodes);
  form.row_scales = false;
  form.scale_bits = 6;
  by_methods("scales/of scales", form, kSignedCodes);
  for (const NamedCodec& one : all_codecs()) {
    form = Form();
    form.set_codec(one);
    form.k = 300;
    by_methods("weight/" + one.name, form, kOwnScales);
    form.block = form.k;
    form.n = 70;
    by_methods("weight/" + one.name + ", one scale", form, kSignedCodes);
  }
  for (const int64_t block : {7, 16, 32, 48, 64, 128})
    for (const int bits : {4, 8}) {
      form = integers(bits);
      form.block = block;
      const std::string name = "blocks of " + to_string(block) + "/" + to_string(bits) + " bits";
      by_methods(name, form, kUnsignedCodes);
      form.zero_points = true;
      by_methods(name + ", zero points of both", form, kAffineCodes);
    }
}

void add_long_blocks() {
  // Runs of so many codes are added up as integers, two in a step of 1024 codes; and the last block is a part of one.
  for (const int64_t block : {512, 700})
    for (const int bits : {4, 8}) {
      Form form = integers(bits);
      form.n = 5;
      form.k = 1300;
      form.block = block;
      const std::string name = "blocks of " + to_string(block) + "/" + to_string(bits) + " bits";
      by_methods(name, form, kSignedCodes);
      form.zero_points = true;
      by_methods(name + ", zero points of both", form, kAffineCodes);
    }
  // Blocks whose sums would not fit in 32 bits are added up in parts.
  Form form = integers();
  form.n = 2;
  form.k = 80005;
  form.block = 40000;
  by_methods("blocks of 40000", form, kUnsignedCodes);
  // 2^31 / 255^2 is 33025 codes: two runs of 32768 just fit, and a longer block must be split in more.
  form.table = kFromZero;
  form.zero_points = true;
  for (const int64_t length : {2 * 32768, 2 * 33088}) {
    form.k = form.block = length;
    by_methods("the largest products of " + to_string(length), form, kAffineCodes, [](Int8Product& product) {
      for (int64_t i = 0; i < 2 * product.k; ++i) product.w.codes[i] = i < product.k ? 255 : 0;
      product.w.zeros = {0, 255};
      product.w.pack_codes();
      for (double& number : product.x) number = 255;
      for (uint8_t& zero : product.zeros) zero = 0;
    });
  }
  // One row takes the scales of 4096 codes at a time.
  for (const int bits : {4, 8})
    for (const int64_t block : {16, 32, 64, 128}) {
      form = integers(bits);
      form.n = 5;
      form.k = 4096 + 512;
      form.block = block;
      const std::string name =
          "int8/blocks of " + to_string(block) + ", more than 4096 codes/" + to_string(bits) + " bits";
      test(name, [=](const Isa& isa) { Int8Product(Weight(form), 1, kSignedCodes).check(isa); });
      form.zero_points = true;
      test(name + ", zero points", [=](const Isa& isa) { Int8Product(Weight(form), 1, kSignedCodes).check(isa); });
    }
  // Whole blocks without padding, but not whole segments.
  for (const int bits : {1, 2, 4})
    for (const int64_t block : {16, 32, 64}) {
      form = integers(bits);
      form.k = segment_codes(bits) + 64;
      form.block = block;
      by_methods("blocks of " + to_string(block) + ", a segment and 64 codes/" + to_string(bits) + " bits", form,
                 kSignedCodes);
    }
}

void add_tails() {
  for (const int64_t k : {1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 1100})
    for (const int bits : {4, 8}) {
      Form form = integers(bits);
      form.n = k > 1000 ? 5 : 13;
      form.k = form.block = k;
      by_methods("tail/K " + to_string(k) + "/" + to_string(bits) + " bits", form, kUnsignedCodes);
    }
  for (const int64_t n : {1, 3, 4, 5, 7, 8, 9, 11, 12, 15, 16, 17, 25, 49}) {
    Form form = integers();
    form.n = n;
    form.k = 64;
    by_methods("tail/N " + to_string(n), form, kSignedCodes);
  }
  for (const int64_t m : {2, 4, 5, 8, 9, 15, 16, 17, 31, 32, 49, 260})
    for (const bool one : {false, true}) {
      Form form = integers(4);
      form.n = 7;
      form.k = 64;
      form.block = one ? 64 : 32;
      test("int8/tail/M " + to_string(m) + (one ? ", one scale" : ", blocks"),
           [=](const Isa& isa) { Int8Product(Weight(form), m, kSignedCodes).check(isa); });
    }
}

void add_layouts() {
  for (const Kind kind : {kSignedCodes, kAffineCodes, kOwnScales, kOwnAffine}) {
    const std::string name = std::string("layout/") + kNames[kind];
    by_methods(name + "/x by columns", integers(), kind, [](Int8Product& p) { p.layout.x_by_columns = true; });
    by_methods(name + "/y by columns", integers(4), kind, [](Int8Product& p) { p.layout.y_by_columns = true; });
    by_methods(name + "/gaps", integers(), kind, [](Int8Product& p) { p.layout.gap = 3; });
    by_methods(name + "/both by columns, with gaps", integers(4), kind, [](Int8Product& p) {
      p.layout.x_by_columns = p.layout.y_by_columns = true;
      p.layout.gap = 3;
    });
    for (const int type : {kBFloat16, kFloat16})
      by_methods(name + (type == kBFloat16 ? "/bfloat16" : "/float16"), integers(), kind,
                 [type](Int8Product& p) { p.type = type; });
  }
  Form form = integers(4);
  form.stack = 3;
  for (const Kind kind : {kSignedCodes, kAffineCodes, kOwnScales}) {
    by_methods(std::string("batch/") + kNames[kind], form, kind);
    by_methods(std::string("selected/") + kNames[kind], form, kind, [](Int8Product& p) { p.selected = {2, -1, 5}; });
  }
  form.block = form.k;
  for (const int bits : {4, 8}) {
    form.bits = bits;
    by_methods("batch/one scale/" + to_string(bits) + " bits", form, kSignedCodes);
  }
  form.block = 32;
  form.bits = 5;
  form.zero_points = true;
  by_methods("selected/5 bits, zero points", form, kAffineCodes, [](Int8Product& p) { p.selected = {2, -1, 5}; });
}

// How rows of x are quantized.
struct Quantizing {
  bool affine = false;
  std::vector<float> scale = {};  // one, or their own
  uint8_t zero = 0;
};

// Every row of x holds the same numbers, and row `i` of the weight takes number `i`. So results are codes of x, times
// their scale.
void expect_quantized(const Isa& isa, const std::vector<float>& numbers, const std::vector<double>& expected,
                      const Quantizing& how = {}, double relative = 0) {
  const int64_t k = static_cast<int64_t>(numbers.size());
  std::vector<uint8_t> codes(k * k, 128);
  for (int64_t i = 0; i < k; ++i) codes[i * k + i] = 129;
  std::vector<float> table(256);
  for (int i = 0; i < 256; ++i) table[i] = static_cast<float>(i - 128);
  for (const Method& method : kMethods) {
    std::vector<float> x, y(method.m * k), ones(k, 1);
    for (int64_t row = 0; row < method.m; ++row) x.insert(x.end(), numbers.begin(), numbers.end());
    const std::vector<float> scales(method.m, how.scale.empty() ? 0 : how.scale[0]);
    const std::vector<uint8_t> zeros(method.m, how.zero);
    Int8Problem q = {};
    Problem& p = q.p;
    p.batch = p.stack = p.blocks = 1;
    p.m = method.m;
    p.n = p.k = p.words = p.block_size = k;
    p.bits = 8;
    p.values = kValueInteger;
    p.codes = codes.data();
    p.scale = ones.data();
    p.table = table.data();
    p.x = x.data();
    p.y = y.data();
    Layout().describe(k, k, &p);
    q.affine = how.affine;
    q.x_scale = how.scale.empty() ? nullptr : scales.data();
    q.x_zero = how.affine && !how.scale.empty() ? zeros.data() : nullptr;
    char why[200];
    expect_accepted(check_int8(q, why, sizeof why));
    Pool pool;
    run_int8(isa, q, pool, kThreads);
    for (int64_t i = 0; i < method.m * k; ++i)
      if (!near(y[i], expected[i % k], relative * fabs(expected[i % k])))
        fail("%.9g becomes %.9g, not %.9g (%s)", x[i], y[i], expected[i % k], method.name);
  }
}

void add_rounding() {
  test("int8/rounding/own scale", [](const Isa& isa) {  // of one: the largest is 127
    expect_quantized(isa, {127, 0.5, 1.5, 2.5, -0.5, -1.5, 1.4375, 126.5, -126.5, -127},
                     {127, 0, 2, 2, 0, -2, 1, 126, -126, -127});
  });
  test("int8/rounding/given scale", [](const Isa& isa) {
    expect_quantized(isa, {1, 3, 5, -1, -3, 253, 254, 300, -255, -257, -1000, 3e38f},
                     {0, 4, 4, 0, -4, 252, 254, 254, -256, -256, -256, 254}, {false, {2}});
  });
  test("int8/rounding/a scale without an inverse", [](const Isa& isa) {  // which is subnormal: its inverse is infinite
    const float unit = 0x1p-140f;
    expect_quantized(isa, {0, unit, -3 * unit, 126 * unit, 1e-30f}, {0, unit, -3 * unit, 126 * unit, 127 * unit},
                     {false, {unit}});
  });
  test("int8/rounding/own zero point", [](const Isa& isa) {  // 55 of 255, where the scale is one but for its rounding
    expect_quantized(isa, {-55, 200, 0.75, 1.25, 100.25, -0.75}, {-55, 200, 1, 1, 100, -1}, {true}, 0x1p-22);
  });
  test("int8/rounding/given zero point", [](const Isa& isa) {
    expect_quantized(isa, {-3, -10, -11, 245, 246, 0.5, 1.5}, {-3, -10, -10, 245, 245, 0, 2}, {true, {1}, 10});
  });
  for (const bool affine : {false, true})
    test(affine ? "int8/rounding/zeros alone, zero points" : "int8/rounding/zeros alone",
         [=](const Isa& isa) { expect_quantized(isa, {0, 0, -0.0f, 0, 0}, {0, 0, 0, 0, 0}, {affine}); });
}

void add_infinities() {
  const std::pair<const char*, double> specials[] = {
      {"NaN", NAN}, {"infinity", INFINITY}, {"minus infinity", -INFINITY}};
  for (const auto& [name, special] : specials)
    for (const Kind kind : {kOwnScales, kOwnAffine, kGivenScales, kGivenAffine})
      for (const int type : {kFloat32, kBFloat16, kFloat16})
        // Its row is NaN, others are as they were.
        by_methods(std::string("special/x has ") + name + "/" + kNames[kind] +
                       (type == kFloat32    ? ""
                        : type == kBFloat16 ? ", bfloat16"
                                            : ", float16"),
                   integers(), kind, [special = special, type](Int8Product& p) {
                     p.type = type;
                     p.x[p.k - 1] = special;
                   });
  for (const int64_t block : {32, 165}) {
    Form form = integers();
    form.block = block;
    by_methods("special/a scale is NaN/blocks of " + to_string(block), form, kSignedCodes,
               [](Int8Product& p) { p.w.set_scale(1, p.w.blocks - 1, 0x7fc00000); });
  }
  // Codes of the largest magnitude everywhere: no sum of products may saturate.
  for (const Kind kind : {kSignedCodes, kUnsignedCodes, kAffineCodes})
    for (const bool high : {false, true}) {
      Form form = integers();
      form.n = 5;
      form.k = form.block = 1100;
      by_methods(std::string("special/largest sums/") + kNames[kind] + (high ? ", high" : ", low"), form, kind,
                 [high](Int8Product& p) {
                   for (double& code : p.x) code = (high ? 127 : -128) + (p.kind == kAffineCodes ? 128 : 0);
                   for (uint8_t& zero : p.zeros) zero = high ? 0 : 255;
                   for (int& code : p.w.codes) code = high ? 255 : 0;
                   p.w.pack_codes();
                 });
    }
  // The same for tables of several ranges: the range decides how many products are added up in 16 bits.
  for (const int range : {15, 31, 63, 127, 128, 255})
    for (const int64_t block : {16, 32, 64, 256}) {
      Form form = integers(4);
      form.n = 5;
      form.k = 256;
      form.block = block;
      by_methods("special/largest sums/of a range of " + to_string(range) + ", blocks of " + to_string(block), form,
                 kSignedCodes, [range](Int8Product& p) {
                   for (int i = 0; i < 16; ++i) p.w.table[i] = static_cast<float>(i * range / 15 - range / 2);
                   for (int64_t row = 0; row < p.w.rows; ++row)
                     for (int64_t k = 0; k < p.k; ++k) p.w.codes[row * p.k + k] = row % 2 == 0 ? 15 : 0;
                   p.w.pack_codes();
                   for (double& code : p.x) code = -128;
                 });
    }
}

// What one row of x meets in registers: whole segments, with blocks of each share of a vector.
void add_registers() {
  for (const int bits : {1, 2, 4, 8})
    for (const int64_t block : {16, 32, 64, 128, 1024})
      for (const bool zeros : {false, true}) {
        Form form = integers(bits);
        form.k = 1024;
        form.block = block;
        form.zero_points = zeros;
        const std::string name = to_string(bits) + " bits, blocks of " + to_string(block);
        by_methods("registers/" + name + (zeros ? ", zero points" : ""), form, kSignedCodes);
        if (zeros || bits == 8) continue;
        form.table = kAnyIntegers;
        by_methods("registers/any integers/" + name, form, kOwnScales);
      }
  // Scales are read where they lie, or decoded for several rows at once, unless each row has one of its own.
  for (const int bits : {4, 8})
    for (const int64_t block : {32, 64}) {
      Form form = integers(bits);
      form.k = 1024;
      form.block = block;
      form.row_scales = true;
      const std::string name = to_string(bits) + " bits, blocks of " + to_string(block);
      by_methods("registers/scales of rows too/" + name, form, kSignedCodes);
    }
  // Scales of one and two bytes, for which a few rows or none have room.
  for (const int kind : {kScaleFloat16, kScaleE4M3})
    for (const int64_t block : {16, 32, 64, 128})
      for (const int64_t k : {1024, 4608, 16384}) {
        Form form = integers(4);
        form.k = k;
        form.block = block;
        form.scale_kind = kind;
        const std::string name = "kind " + to_string(kind) + ", blocks of " + to_string(block) + ", k " + to_string(k);
        by_methods("registers/" + name, form, kSignedCodes);
      }
}

}  // namespace

void add_int8_tests() {
  add_kinds();
  add_weights();
  add_long_blocks();
  add_tails();
  add_layouts();
  add_rounding();
  add_infinities();
  add_registers();
}
