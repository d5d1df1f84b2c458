// Products of floats with a weight, by each method that kernels have: they choose it by the rows of x.
#include "unit_product.h"

namespace {

using std::to_string;

// A test for each method.
void by_methods(
    const std::string& name, const Form& form, const std::function<void(Product&)>& change = [](Product&) {}) {
  for (const Method& method : kMethods)
    test("matmul/" + name + "/" + method.name, [=](const Isa& isa) {
      Product product(Weight(form), method, form.stack);
      change(product);
      product.check(isa);
    });
}

void add_widths() {
  for (int bits = 1; bits <= 8; ++bits)
    for (const Table table : {kAnyFloats, kIntegers}) {
      Form form;
      form.bits = bits;
      form.table = table;
      form.k = segment_codes(bits) + 64 + 37;  // a segment, and one that is cut short
      by_methods(to_string(bits) + " bits/" + (table == kIntegers ? "integers" : "table of floats"), form);
    }
  Form form;
  form.table = kHalves;
  by_methods("4 bits/halves", form);
  form.bits = 8;
  form.table = kE4M3;
  by_methods("8 bits/e4m3", form);
  form.table = kE5M2;
  by_methods("8 bits/e5m2", form);
}

void add_scales() {
  for (int kind = kScaleFloat32; kind <= kScaleUE4M4; ++kind) {
    Form form;
    form.scale_kind = kind;
    form.block = 16;
    by_methods(std::string("scales/") + kScaleNames[kind], form);
    if (kind == kScaleFloat32) continue;
    form.block = form.k;
    by_methods(std::string("scales/") + kScaleNames[kind] + ", one for each row", form);
  }
  Form form;
  form.row_scales = true;
  by_methods("scales/of rows and blocks", form);
  form.row_scales = false;
  for (const int bits : {4, 6}) {
    form.scale_bits = bits;
    by_methods("scales/of scales of " + to_string(bits) + " bits", form);
  }
  form.block = 8;
  form.scale_block = 8;
  form.scale_integers = true;
  by_methods("scales/of scales, integers", form);
  form.block = 16;
  form.scale_block = 24;  // slabs of columns begin inside of these
  form.k = 1100;
  by_methods("scales/of scales, integers, in blocks of 24", form);
}

void add_blocks() {
  for (const int64_t block : {7, 16, 32, 48, 64, 128, 165})
    for (const int bits : {4, 8}) {
      Form form;
      form.bits = bits;
      form.block = block;  // the last is shorter
      const std::string name = "blocks of " + to_string(block) + "/" + to_string(bits) + " bits";
      by_methods(name, form);
      form.table = kIntegers;
      by_methods(name + ", integers", form);
      form.k = 256;
      by_methods(name + ", whole segments", form);
    }
}

// Columns are divided among threads.
void add_columns() {
  for (const int bits : {4, 8})
    for (const int64_t block : {16, 32, 64}) {
      Form form;
      form.bits = bits;
      form.n = 2048;
      form.k = 4 * segment_codes(4);
      form.block = block;
      test("matmul/many columns/" + to_string(bits) + " bits/blocks of " + to_string(block),
           [=](const Isa& isa) { Product(Weight(form), {"", 1, true}).check(isa); });
    }
}

// Scales are decoded some thousand codes at a time.
void add_long_rows() {
  for (const int bits : {1, 4, 8}) {
    Form form;
    form.bits = bits;
    form.n = 6;
    form.k = 2 * 4096 + segment_codes(bits) + 37;
    form.block = 32;
    form.scale_kind = kScaleFloat16;
    by_methods("long rows/" + to_string(bits) + " bits", form);
    test("matmul/long rows/" + to_string(bits) + " bits, more scales than there is room for", [=](const Isa& isa) {
      Form longer = form;
      longer.k = 40000;
      Product(Weight(longer), kMethods[0]).check(isa);
    });
  }
}

void add_zero_points() {
  for (const int bits : {1, 2, 3, 4, 8})
    for (const int64_t block : {16, 32, 165}) {
      Form form;
      form.bits = bits;
      form.table = kIntegers;
      form.zero_points = true;
      form.block = block;
      by_methods("zero points/" + to_string(bits) + " bits/blocks of " + to_string(block), form);
    }
  Form form;
  form.zero_points = true;
  by_methods("zero points/table of floats", form);
}

void add_offsets() {
  for (const int bits : {2, 4, 5, 8}) {
    Form form;
    form.bits = bits;
    form.table = kIntegers;
    form.offsets = true;
    by_methods("offsets/" + to_string(bits) + " bits", form);
    form.scale_bits = 6;
    by_methods("offsets/" + to_string(bits) + " bits, of scales of scales", form);
  }
  // Offsets of one sign, times numbers of one sign: a sum of them all, one after the other, would lose three bits.
  test("matmul/offsets/many rows of the weight, transposed", [](const Isa& isa) {
    Form form;
    form.bits = 1;
    form.table = kIntegers;
    form.offsets = true;
    form.n = 16384;
    form.k = 64;
    form.block = 16;
    Product product(Weight(form), {"", 1, true});
    for (double& number : product.x) number = fabs(number);
    product.tolerance = 0x1p-22;
    product.check(isa);
  });
}

void add_codecs() {
  for (const NamedCodec& one : all_codecs()) {
    Form form;
    form.set_codec(one);
    form.k = 1100;
    form.block = form.k;
    form.row_scales = true;
    form.stack = 2;
    by_methods(one.name + "/one scale for each row", form, [](Product& product) { product.selected = {1, 0}; });
    for (const double number : {double{NAN}, double{INFINITY}, 1e30, 1e-30})
      test("matmul/" + one.name + "/one row with " + to_string(number), [=](const Isa& isa) {
        Product product(Weight(form), kMethods[0], 2);
        product.x_at(1, 7) = number;
        product.check(isa);
      });
    form.row_scales = false;
    form.n = 70;  // several slabs
    form.k = 700;
    form.block = 32;
    form.scale_bits = 4;
    form.scale_block = 8;
    form.scale_integers = true;
    by_methods(one.name + "/scales of scales", form, [](Product& product) { product.selected = {1, 0}; });
    form.scale_bits = 0;
    for (const int64_t block : {128, 384}) {  // whole segments
      form.block = block;
      for (const int type : {kFloat32, kBFloat16, kFloat16})
        test("matmul/" + one.name + "/blocks of " + to_string(block) + "/" + kTypeNames[type], [=](const Isa& isa) {
          Product product(Weight(form), kMethods[0], 2);
          product.x_type = type;
          product.layout.x_by_columns = block == 128;
          product.layout.gap = 3;
          product.check(isa);
        });
    }
  }
}

// Lengths of one less, one more than tiles and segments.
void add_tails() {
  for (const int64_t k : {1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257}) {
    Form form;
    form.k = k;
    form.block = std::min<int64_t>(k, 32);
    by_methods("tail/K " + to_string(k) + ", 4 bits", form);
    form.bits = 8;
    form.table = kIntegers;
    by_methods("tail/K " + to_string(k) + ", 8 bits", form);
  }
  for (const int64_t k : {1, 7, 8, 9, 511, 513}) {
    Form form;
    form.bits = 1;
    form.k = form.block = k;
    by_methods("tail/K " + to_string(k) + ", 1 bit", form);
  }
  for (const int64_t n : {1, 2, 3, 4, 5, 11, 12, 15, 16, 17, 24, 25, 47, 49, 63, 65}) {
    Form form;
    form.n = n;
    form.k = 64;
    by_methods("tail/N " + to_string(n), form);
    form.table = kIntegers;
    by_methods("tail/N " + to_string(n) + ", integers", form);
  }
  // Rows of x; a few hundred are multiplied in parts.
  for (const int64_t m : {2, 4, 5, 6, 7, 8, 9, 12, 13, 15, 16, 17, 24, 25, 48, 300})
    for (const bool transpose : {false, true})
      for (const Table table : {kAnyFloats, kIntegers}) {
        Form form;
        form.k = m < 100 ? 96 : 33;
        form.n = 7;
        form.table = table;
        const std::string name = "matmul/tail/M " + to_string(m) + (table == kIntegers ? ", integers" : "") +
                                 (transpose ? ", transposed" : "");
        test(name, [=](const Isa& isa) { Product(Weight(form), {"", m, transpose}).check(isa); });
      }
  // Rows that are longer than the part decoded at a time, or the part with one scale as integers: 512 codes, and 1,024.
  for (const int bits : {4, 8}) {
    Form form;
    form.bits = bits;
    form.n = 5;
    form.k = 1100;
    form.table = kIntegers;
    by_methods("tail/K 1100, " + to_string(bits) + " bits", form);
    form.k = 4608;  // and the scales decoded at a time: of 4,096 codes
    form.table = kAnyFloats;
    by_methods("tail/K 4608, " + to_string(bits) + " bits", form);
  }
  test("matmul/tail/nothing to add up is zero", [](const Isa& isa) {
    float y[6], scale[3] = {}, table[16] = {};
    for (float& number : y) number = 7;
    Problem p = {};
    p.batch = p.stack = p.block_size = 1;
    p.m = 2;
    p.n = 3;
    p.bits = 4;
    p.scale = scale;
    p.table = table;
    p.y = y;
    p.x_column = p.y_column = 1;
    p.y_row = 3;
    char why[200];
    expect_accepted(check_problem(p, why, sizeof why));
    Pool pool;
    run_problem(isa, p, pool, kThreads);
    for (int i = 0; i < 6; ++i)
      if (y[i] != 0) fail("y[%d] is %.9g, not 0", i, y[i]);
  });
}

void add_layouts() {
  for (const Table table : {kAnyFloats, kIntegers}) {
    Form form;
    form.table = table;
    const std::string name = table == kIntegers ? ", integers" : "";
    by_methods("layout/x by columns" + name, form, [](Product& p) { p.layout.x_by_columns = true; });
    by_methods("layout/y by columns" + name, form, [](Product& p) { p.layout.y_by_columns = true; });
    by_methods("layout/both by columns, with gaps" + name, form, [](Product& p) {
      p.layout.x_by_columns = p.layout.y_by_columns = true;
      p.layout.gap = 3;
    });
    by_methods("layout/rows with gaps" + name, form, [](Product& p) { p.layout.gap = 3; });
  }
  Form form;
  form.stack = 3;
  by_methods("batch", form);
  const auto select = [](Product& p) { p.selected = {2, -1, 5}; };  // the last, the first, the last
  by_methods("selected", form, select);
  form.bits = 5;
  by_methods("selected/5 bits", form, select);
  form.zero_points = form.row_scales = true;
  by_methods("selected/zero points and scales of rows", form, select);
  form.zero_points = form.row_scales = false;
  form.offsets = true;
  by_methods("selected/offsets", form, select);
}

void add_types() {
  for (const Table table : {kAnyFloats, kIntegers}) {
    Form form;
    form.table = table;
    const std::string name = table == kIntegers ? ", integers" : "";
    by_methods("x/bfloat16" + name, form, [](Product& p) { p.x_type = kBFloat16; });
    by_methods("x/float16" + name, form, [](Product& p) { p.x_type = kFloat16; });
    by_methods("x/float16 by columns" + name, form, [](Product& p) {
      p.x_type = kFloat16;
      p.layout.x_by_columns = p.layout.y_by_columns = true;
    });
    by_methods("x/coarse" + name, form, [](Product& p) { p.coarse = true; });
    by_methods("x/coarse bfloat16" + name, form, [](Product& p) {
      p.coarse = true;
      p.x_type = kBFloat16;
    });
  }
  // Numbers that are no parts of integers in the range of floats, in the last row of the last batch. Kernels of
  // integers leave it to others, with all that belongs to the weight of that batch.
  for (const int exponent : {100, -100}) {
    Form form;
    form.table = kIntegers;
    form.block = 64;
    form.stack = 2;
    form.zero_points = form.row_scales = true;
    by_methods(exponent > 0 ? "x/a large row" : "x/a tiny row", form, [exponent](Product& p) {
      for (int64_t i = 0; i < p.inner; ++i) {
        double& number = p.x_at(p.batch * p.m - 1, i);
        number = ldexp(number, exponent);
      }
    });
  }
  // Half of x is small, and the rest, which is large, meets zeros. Kernels of integers may not lose it.
  for (const int bits : {4, 8}) {
    Form form;
    form.bits = bits;
    form.table = kIntegers;
    form.block = 64;
    by_methods("x/small beside large/" + to_string(bits) + " bits", form, [](Product& p) {
      const Form& of = p.w.form;
      for (size_t i = 0; i < p.x.size(); ++i)
        if (i % p.inner % 2 == 0) p.x[i] = ldexp(p.x[i], 30);
      for (size_t i = 0; i < p.w.codes.size(); ++i)
        if ((p.transpose ? i / of.k : i % of.k) % 2 == 0) p.w.codes[i] = 1 << (of.bits - 1);  // means zero
      p.w.pack_codes();
    });
  }
}

void add_special_x() {
  const std::pair<const char*, double> specials[] = {
      {"NaN", NAN}, {"infinity", INFINITY}, {"minus infinity", -INFINITY}};
  for (const auto& [name, special] : specials) {
    for (const Table table : {kAnyFloats, kIntegers})
      for (const int bits : {4, 8}) {
        // One number of the first row of x, in the padded tail. Other rows are as they were.
        Form form;
        form.table = table;
        form.bits = bits;
        form.block = bits == 4 ? 64 : form.k;
        const std::string of = std::string("special/x has ") + name + "/" + to_string(bits) + " bits" +
                               (table == kIntegers ? ", integers" : "");
        by_methods(of, form, [special = special](Product& p) { p.x_at(0, p.inner - 1) = special; });
      }
    Form form;
    form.table = kIntegers;
    form.offsets = true;  // a part of the sum, so that infinities of both are numbers of one sign
    for (const int at : {0, 3})
      by_methods(std::string("special/x has ") + name + " at " + to_string(at) + "/offsets", form,
                 [special = special, at](Product& p) {
                   p.x_at(0, at) = special;
                   p.exact_infinities = true;
                 });
  }
}

void add_special_weights() {
  const std::pair<const char*, uint32_t> scales[] = {{"NaN", 0x7fc00000}, {"infinity", 0x7f800000}};
  for (const auto& [name, bits] : scales)
    for (const Table table : {kAnyFloats, kIntegers})
      for (const int64_t block : {32, 165}) {
        // One scale of the second row of the weight. Transposed, it is a part of all sums of some columns.
        Form form;
        form.table = table;
        form.block = block;
        const std::string of = std::string("special/a scale is ") + name + "/blocks of " + to_string(block) +
                               (table == kIntegers ? ", integers" : "");
        by_methods(of, form, [bits = bits](Product& p) { p.w.set_scale(1, p.w.blocks - 1, bits); });
      }
  // So large or tiny that products with scales of x would be infinite or subnormal, where results are not.
  for (const int exponent : {110, -118})
    for (const int64_t block : {32, 165}) {
      Form form;
      form.table = kIntegers;
      form.block = block;
      by_methods(
          std::string("special/a scale is ") + (exponent > 0 ? "large" : "tiny") + "/blocks of " + to_string(block),
          form, [exponent](Product& p) { p.w.set_scale(1, 0, bits_of(ldexpf(1.25f, exponent))); });
    }
  // Kernels of integers leave such a row of the weight, with all that belongs to it, to others.
  Form form;
  form.table = kIntegers;
  form.zero_points = form.row_scales = true;
  by_methods("special/a scale is NaN/zero points and scales of rows", form,
             [](Product& p) { p.w.set_scale(1, 0, bits_of(NAN)); });
  // Consecutive integers that are no bytes.
  for (const float shift : {-172.0f, 200.0f}) {
    Form beyond;
    beyond.bits = 8;
    beyond.table = kIntegers;
    beyond.block = 64;
    by_methods(std::string("special/integers from ") + (shift < 0 ? "-300" : "72"), beyond, [shift](Product& p) {
      for (float& value : p.w.table) value += shift;
    });
  }
  // A number that no code means may be anything.
  for (const int bits : {1, 2, 4, 8}) {
    Form unused;
    unused.bits = bits;
    by_methods("special/an unused code means NaN/" + to_string(bits) + " bits", unused, [](Product& p) {
      for (int& code : p.w.codes) code |= 1;
      p.w.pack_codes();
      p.w.table[0] = NAN;
    });
  }
}

}  // namespace

void add_matmul_tests() {
  add_widths();
  add_scales();
  add_blocks();
  add_columns();
  add_long_rows();
  add_zero_points();
  add_offsets();
  add_codecs();
  add_tails();
  add_layouts();
  add_types();
  add_special_x();
  add_special_weights();
}
