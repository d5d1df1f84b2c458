// Decoding to a dense weight, whose results are exact: what codes, scales and zero points mean.
#include "unit_data.h"

namespace {

using std::to_string;

// The dense weight, as numbers, that an instruction set decodes a problem to.
std::vector<double> decode(const Isa& isa, Problem p, int type = kFloat32) {
  const int64_t count = p.batch * p.n * p.k;
  std::vector<uint8_t> dense(count * float_bytes(type), 0xff);
  p.y = dense.data();
  p.x_type = type;
  char why[200];
  expect_accepted(check_problem(p, why, sizeof why));
  Pool pool;
  run_decode(isa, p, pool, kThreads);
  std::vector<double> numbers;
  for (int64_t i = 0; i < count; ++i) numbers.push_back(load_float(type, &dense[i * float_bytes(type)]));
  return numbers;
}

// One row of codes that share a scale of one.
struct Row {
  Row(int bits, std::vector<uint8_t> bytes, int64_t k) : packed(std::move(bytes)), table(int64_t{1} << bits) {
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<float>(i);
    p.batch = p.stack = p.n = p.blocks = 1;
    p.k = p.block_size = k;
    p.bits = bits;
    p.words = static_cast<int64_t>(packed.size());
    p.codes = packed.data();
    p.scale = &scale;
    p.table = table.data();
  }
  std::vector<uint8_t> packed;
  std::vector<float> table;
  float scale = 1;
  Problem p = {};
};

void expect_numbers(const std::vector<double>& actual, const std::vector<double>& expected, int type = kFloat32) {
  for (size_t i = 0; i < expected.size(); ++i)
    if (!near(actual[i], expected[i], rounding(type, expected[i])))
      fail("number %zu is %.9g, not %.9g", i, actual[i], expected[i]);
}

// The bits of XLA's operations in float32: (value - zero point) * (scale * scale of the row).
void check(const Isa& isa, const Weight& w, const std::vector<int32_t>& selected = {}, int type = kFloat32) {
  Problem p = {};
  w.describe(&p);
  p.batch = p.stack = w.form.stack;
  if (!selected.empty()) {
    p.selected = selected.data();
    p.batch = static_cast<int64_t>(selected.size());
  }
  const std::vector<double> dense = decode(isa, p, type);
  for (int64_t i = 0; i < p.batch * p.n; ++i)
    for (int64_t k = 0; k < p.k; ++k) {
      const int64_t matrix = matrix_of(selected, i / p.n, p.stack);
      const int64_t row = matrix * p.n + i % p.n;
      const double expected =
          static_cast<float>(static_cast<float>(w.value(row, k)) * static_cast<float>(w.scale(row, k)));
      const double actual = dense[i * p.k + k];
      if (!near(actual, expected, rounding(type, expected)))
        fail("w[%d, %d, %d] is %.9g, not %.9g", static_cast<int>(i / p.n), static_cast<int>(i % p.n),
             static_cast<int>(k), actual, expected);
    }
}

void check_form(const std::string& name, const Form& form, int type = kFloat32) {
  test("decode/" + name, [=](const Isa& isa) { check(isa, Weight(form), {}, type); });
}

// Codes 0, 1, 2, ... packed by hand: a row of one short segment.
void add_literals() {
  const auto literal = [](int bits, std::vector<uint8_t> bytes, std::vector<double> expected) {
    test("decode/" + to_string(bits) + " bits/packed by hand", [=](const Isa& isa) {
      const Row row(bits, bytes, static_cast<int64_t>(expected.size()));
      expect_numbers(decode(isa, row.p), expected);
    });
  };
  const std::vector<double> eight = {0, 1, 2, 3, 4, 5, 6, 7};
  literal(1, {0x96}, {0, 1, 1, 0, 1, 0, 0, 1});                              // a plane of one byte
  literal(2, {0xb8, 0x9c}, {0, 0, 2, 3, 3, 1, 2, 2});                        // four planes of two bytes
  literal(3, {0x88, 0xdd, 0xf0}, eight);                                     // two bits of each, then the third
  literal(4, {0x40, 0x51, 0x62, 0x73}, eight);                               // two planes of four bytes
  literal(5, {0x40, 0x51, 0x62, 0x73, 0x96}, {0, 17, 18, 3, 20, 5, 6, 23});  // four bits, then one
  literal(6, {0x40, 0x51, 0x62, 0x73, 0xe4, 0x1b}, {0, 49, 18, 35, 36, 21, 54, 7});
  literal(7, {0x40, 0x51, 0x62, 0x73, 0xe4, 0x1b, 0x96}, {0, 113, 82, 35, 100, 21, 54, 71});
  literal(8, {0, 1, 127, 128, 255}, {0, 1, 127, 128, 255});
}

void add_widths() {
  for (int bits = 1; bits <= 8; ++bits) {
    Form form;
    form.bits = bits;
    form.k = 2 * segment_codes(bits) + 37;
    form.n = 5;
    check_form(to_string(bits) + " bits/table of floats", form);
    form.table = kIntegers;
    check_form(to_string(bits) + " bits/integers", form);
    form.zero_points = true;
    check_form(to_string(bits) + " bits/zero points", form);
    // One code less than a segment, a whole one, and one more; and a part of its first plane.
    for (const int64_t k :
         {segment_codes(bits) - 1, segment_codes(bits), segment_codes(bits) + 1, int64_t{3}, int64_t{1}}) {
      form.k = k;
      form.block = std::min<int64_t>(k, 16);
      check_form(to_string(bits) + " bits/rows of " + to_string(k) + " codes", form);
    }
  }
}

void add_fp8() {
  for (const Table table : {kE4M3, kE5M2}) {
    // All codes, infinities and NaN among them.
    test(table == kE4M3 ? "decode/e4m3/every code" : "decode/e5m2/every code", [=](const Isa& isa) {
      std::vector<uint8_t> bytes(256);
      std::vector<double> expected;
      for (int i = 0; i < 256; ++i) {
        bytes[i] = static_cast<uint8_t>(i);
        expected.push_back(table == kE4M3 ? e4m3_value(bytes[i]) : e5m2_value(bytes[i]));
      }
      Row row(8, bytes, 256);
      for (int i = 0; i < 256; ++i) row.table[i] = static_cast<float>(expected[i]);
      row.p.values = table == kE4M3 ? kValueE4M3 : kValueE5M2;
      expect_numbers(decode(isa, row.p), expected);
    });
  }
  test("decode/8 bits/upper half of a table", [](const Isa& isa) {
    Row row(8, {127, 128, 129, 191, 192, 255}, 6);
    for (int i = 0; i < 256; ++i) row.table[i] = static_cast<float>(i) * 1.0009765625f;  // needs more than bfloat16
    expect_numbers(decode(isa, row.p),
                   {row.table[127], row.table[128], row.table[129], row.table[191], row.table[192], row.table[255]});
  });
}

void add_scales() {
  // Each scale belongs to one code, of value 1: the smallest, ordinary ones, the largest, infinities, NaN. The least
  // of e8m0 and bfloat16 are left out: they are subnormal in float32, which a machine may take for zero.
  const std::vector<uint32_t> scales[] = {
      {0, 0x00800000, 0x3f800000, 0xbf800001, 0x7f7fffff, 0x7f800000, 0xff800000, 0x7fc00000},
      {0, 0x0001, 0x83ff, 0x0400, 0x3c00, 0xbc01, 0x7bff, 0x7c00, 0xfc00, 0x7e00},
      {0, 0x0080, 0x3f80, 0xbf81, 0x7f7f, 0x7f80, 0xff80, 0x7fc0},
      {1, 2, 126, 127, 128, 254, 255},
      {0, 0x01, 0x87, 0x08, 0x38, 0xb9, 0x7e, 0x7f, 0xff},
      {0, 0x01, 0x83, 0x04, 0x3c, 0xbd, 0x7b, 0x7c, 0xfc, 0x7d, 0x7f},
      {0, 0x01, 0x0f, 0x10, 0x80, 0x81, 0xfe, 0xff},
  };
  for (int kind = kScaleFloat32; kind <= kScaleUE4M4; ++kind) {
    test(std::string("decode/scales/") + kScaleNames[kind] + "/special bits",
         [kind, all = scales[kind]](const Isa& isa) {
           const int64_t count = static_cast<int64_t>(all.size()), width = scale_bytes(kind);
           std::vector<uint8_t> bytes(count * width);
           std::vector<double> expected;
           for (int64_t i = 0; i < count; ++i) {
             memcpy(&bytes[i * width], &all[i], width);
             expected.push_back(scale_value(kind, all[i]));
           }
           Row row(8, std::vector<uint8_t>(count, 1), count);
           row.p.scale = bytes.data();
           row.p.scale_kind = kind;
           row.p.block_size = 1;
           row.p.blocks = count;
           expect_numbers(decode(isa, row.p), expected);
         });
    Form form;
    form.scale_kind = kind;
    check_form(std::string("scales/") + kScaleNames[kind], form);
    form.row_scales = true;
    check_form(std::string("scales/") + kScaleNames[kind] + "/scales of rows", form);
    form.row_scales = false;
    form.scale_bits = 6;
    check_form(std::string("scales/") + kScaleNames[kind] + "/scales of scales", form);
  }
  for (int bits = 1; bits <= 8; ++bits) {
    Form form;
    form.k = 1100;  // more than a segment of scales of one bit, in blocks of two
    form.block = 2;
    form.n = 3;
    form.scale_bits = bits;
    form.scale_block = 7;
    check_form("scales/codes of " + to_string(bits) + " bits", form);
    form.scale_block = 16;
    form.scale_integers = true;
    check_form("scales/integers of " + to_string(bits) + " bits", form);
  }
}

void add_blocks() {
  for (const int64_t block : {1, 8, 16, 32, 48, 64, 100, 128, 300}) {
    Form form;
    form.k = 300;  // the last block is shorter, but of 1, 100 and 300
    form.block = block;
    check_form("blocks of " + to_string(block), form);
    form.zero_points = true;
    check_form("blocks of " + to_string(block) + "/zero points", form);
  }
}

void add_types() {
  for (const int type : {kBFloat16, kFloat16}) {
    const std::string name = type == kBFloat16 ? "to bfloat16" : "to float16";
    Form form;
    check_form(name, form, type);
    form.bits = 6;
    check_form(name + "/6 bits", form, type);
    // The middle of two numbers goes to the even one; beyond the largest is infinity, or it, if clipped.
    test("decode/" + name + "/ties", [type](const Isa& isa) {
      const float step = type == kBFloat16 ? 0x1p-7f : 0x1p-10f;
      Row row(2, {0xe4}, 4);
      row.table = {1 + step / 2, 1 + 3 * step / 2, -1 - step / 2, 1 + step * 0.51f};
      const std::vector<double> expected = {1, 1 + 2.0 * step, -1, 1.0 + step}, actual = decode(isa, row.p, type);
      for (int i = 0; i < 4; ++i)
        if (actual[i] != expected[i]) fail("%.9g becomes %.9g, not %.9g", row.table[i], actual[i], expected[i]);
    });
    for (const bool clip : {false, true})
      test("decode/" + name + (clip ? "/clipped" : "/not clipped"), [=](const Isa& isa) {
        const double most = type == kBFloat16 ? 0x1.fep127 : 65504;
        Row row(2, {0xe4}, 4);
        row.table = {type == kBFloat16 ? 3.4e38f : 7e4f, -INFINITY, static_cast<float>(most), NAN};
        row.p.clip = clip;
        const double beyond = clip ? most : INFINITY;
        const std::vector<double> expected = {beyond, -beyond, most, NAN}, actual = decode(isa, row.p, type);
        for (int i = 0; i < 4; ++i)
          if (!near(actual[i], expected[i], 0))
            fail("%.9g becomes %.9g, not %.9g", row.table[i], actual[i], expected[i]);
      });
  }
  test("decode/conversion of every float16", [](const Isa&) {  // the same on every instruction set
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const double expected = half_value(static_cast<uint16_t>(bits));
      const float value = half_to_float(static_cast<uint16_t>(bits));
      if (!near(value, expected, 0)) fail("%04x is %.9g, not %.9g", bits, value, expected);
      if (!isnan(expected) && float_to_half(value) != bits)
        fail("%.9g becomes %04x, not %04x", value, float_to_half(value), bits);
    }
  });
}

void add_stacks() {
  Form form;
  form.stack = 3;
  for (const int bits : {4, 5}) {
    form.bits = bits;
    check_form("batch/" + to_string(bits) + " bits", form);
    // Beyond the ends of a stack the nearest matrix is taken.
    test("decode/selected/" + to_string(bits) + " bits",
         [form](const Isa& isa) { check(isa, Weight(form), {2, 0, -1, 3, 1}); });
  }
}

// Segments have 128 values or 256, and parts of a trellis 16; a slab of columns has 512.
void add_codecs() {
  for (const NamedCodec& one : all_codecs()) {
    Form form;
    form.set_codec(one);
    form.n = 3;
    for (const int64_t k : {1, 7, 8, 9, 15, 16, 17, 100, 127, 128, 129, 255, 256, 257, 385, 511, 512, 513, 1100}) {
      form.k = k;
      form.block = std::min<int64_t>(k, 32);
      check_form(one.name + "/rows of " + to_string(k), form);
    }
    form.stack = 3;
    test("decode/" + one.name + "/selected",
         [form](const Isa& isa) { check(isa, Weight(form), {2, 0, -1, 3, 1}, kBFloat16); });
  }
}

}  // namespace

void add_decode_tests() {
  add_literals();
  add_widths();
  add_fp8();
  add_scales();
  add_blocks();
  add_types();
  add_stacks();
  add_codecs();
}
