// What checks refuse and accept, at the last number on either side. A kernel believes what a check let through.
#include "int8/int8.h"
#include "unit_data.h"

namespace {

// Problems that are right until a test changes them.
struct Good {
  Good() : weight(form()) {
    weight.describe(&p);
    p.batch = p.stack = 1;
    p.m = 2;
    Layout().describe(p.k, p.n, &p);
    p.x = x;
    p.y = y;
    q.p = p;
    q.p.scale_codes = nullptr;
    q.form = kUnsigned;
    q.affine = 1;
    q.x_scale = x;
    q.x_zero = x_zero;
    e.x = x;
    e.y = codes;
    e.divisor = x;
    e.steps = steps;
    e.codes = step_codes;
    e.n = 2;
    e.k = 40;
    e.bits = 4;
    e.words = 20;
    e.block_size = 16;
    e.blocks = 3;
    e.num_steps = 2;
  }
  static Form form() {
    Form form;
    form.bits = 8;
    form.table = kIntegers;
    return form;
  }

  Weight weight;
  float x[512] = {}, y[64] = {};
  uint8_t x_zero[4] = {}, codes[64] = {};
  int32_t steps[300] = {}, step_codes[300] = {};
  Problem p = {};
  Int8Problem q = {};
  EncodeProblem e = {};
};

// `change` makes of a right problem one that is refused, or with `accepted` one that is right as well.
template <typename Part, typename Check>
void check(const std::string& name, Part Good::* part, const Check& run, const std::function<void(Part&)>& change,
           bool accepted) {
  test(name, [=](const Isa&) {
    Good good;
    char why[200];
    if (const char* wrong = run(good.*part, why, sizeof why)) fail("a right problem is refused: %s", wrong);
    change(good.*part);
    const char* wrong = run(good.*part, why, sizeof why);
    if (accepted && wrong != nullptr) fail("it is refused: %s", wrong);
    if (!accepted && wrong == nullptr) fail("it is accepted");
  });
}

using P = Problem;
void problem(const std::string& name, const std::function<void(P&)>& change, bool accepted = false) {
  check("check/product/" + name, &Good::p, check_problem, change, accepted);
}
void integers(const std::string& name, const std::function<void(Int8Problem&)>& change, bool accepted = false) {
  check("check/integers/" + name, &Good::q, check_int8, change, accepted);
}
void encode(const std::string& name, const std::function<void(EncodeProblem&)>& change, bool accepted = false) {
  check("check/encode/" + name, &Good::e, check_encode, change, accepted);
}

void set_bits(P& p, int bits) {
  p.bits = bits;
  p.values = kValueTable;
  p.words = packed_bytes(p.k, bits);
}

// Changes of a codec: a trellis of two bits, and a grid with two parts of an index and signs.
void codec(const std::string& name, int kind, const std::function<void(Codec&)>& change, bool accepted = false) {
  problem(
      "codec/" + name,
      [=](P& p) {
        static Codec changed;
        changed = all_codecs()[kind == kTrellis ? 1 : 6].codec;
        p.codec = &changed;
        p.bits = 8;
        p.values = kValueInteger;
        p.words = row_bytes(&p);
        change(changed);
        if (kind == kGrid && changed.kind == kGrid && changed.num_parts <= kMostParts) p.words = row_bytes(&p);
      },
      accepted);
}

void add_codecs() {
  for (const int kind : {kTrellis, kGrid}) {
    codec(kind == kTrellis ? "trellis" : "grid", kind, [](Codec&) {}, true);
    codec("another kind", kind, [](Codec& c) { c.kind = 2; });
  }
  codec("bits of another trellis", kTrellis, [](Codec& c) { c.bits = 3; });
  for (const int bits : {0, 5}) {
    problem("codec/trellis of " + std::to_string(bits) + " bits", [bits](P& p) {
      static Codec changed;
      changed = all_codecs()[1].codec;
      changed.bits = bits;
      p.codec = &changed;
      p.bits = 8;
      p.values = kValueInteger;
      p.words = row_bytes(&p);
    });
  }
  problem("codec/floats", [](P& p) {
    p.codec = &all_codecs()[1].codec;
    p.words = row_bytes(&p);
    p.values = kValueE4M3;
  });
  codec("no vectors", kGrid, [](Codec& c) { c.vectors = nullptr; });
  codec("vectors of 16", kGrid, [](Codec& c) { c.size = 16; });
  codec("no parts", kGrid, [](Codec& c) { c.num_parts = 0; });
  codec("too many parts", kGrid, [](Codec& c) { c.num_parts = kMostParts + 1; });
  codec("a part of no kind", kGrid, [](Codec& c) { c.parts[2].kind = kDown + 1; });
  codec("a gap in the index", kGrid, [](Codec& c) { c.parts[1].low = 9; });
  codec("indices that are too long", kGrid, [](Codec& c) { c.parts[1].bits = 5; });
  codec("indices of other vectors", kGrid, [](Codec& c) { c.parts[0].values = 4; });
  codec("signs of four values", kGrid, [](Codec& c) { c.parts[2].values = 4; });
  codec("signs of seven bits", kGrid, [](Codec& c) { c.parts[2].bits = 7; });
  codec("even signs of eight bits", kGrid, [](Codec& c) { c.parts[2].kind = kEvenSigns; });
  codec("directions of eight bits", kGrid, [](Codec& c) { c.parts[2].kind = kDown; });
  codec("neither signs nor directions", kGrid, [](Codec& c) { --c.num_parts; });
}

void add_products() {
  problem("0 bits", [](P& p) { set_bits(p, 0); });
  problem("9 bits", [](P& p) { set_bits(p, 9); });
  problem("1 bit", [](P& p) { set_bits(p, 1); }, true);
  const std::pair<const char*, int64_t P::*> lengths[] = {{"batch", &P::batch}, {"M", &P::m}, {"N", &P::n}};
  for (const auto& [name, length] : lengths) {
    problem(std::string("negative ") + name, [length = length](P& p) { p.*length = -1; });
    problem(std::string("no ") + name, [length = length](P& p) { p.*length = 0; }, true);
  }
  problem("M 2^31", [](P& p) { p.m = int64_t{1} << 31; });
  problem("M 2^31 - 1", [](P& p) { p.m = (int64_t{1} << 31) - 1; }, true);
  problem("N 2^31", [](P& p) { p.n = int64_t{1} << 31; });
  problem("x by neither rows nor columns", [](P& p) { p.x_column = 2; });
  problem("y by neither rows nor columns", [](P& p) { p.y_column = 2; });
  problem(
      "x and y by columns",
      [](P& p) {
        p.x_row = p.y_row = 1;
        p.x_column = p.y_column = 2;
      },
      true);
  problem("a block of nothing", [](P& p) { p.block_size = 0; });
  problem("a byte too few", [](P& p) { --p.words; });
  problem("a byte too many", [](P& p) { ++p.words; });
  problem("a block too few", [](P& p) { --p.blocks; });
  problem("a block too many", [](P& p) { ++p.blocks; });
  problem("scales of kind -1", [](P& p) { p.scale_kind = -1; });
  problem("scales of kind 7", [](P& p) { p.scale_kind = 7; });
  problem("scales of kind 6", [](P& p) { p.scale_kind = 6; }, true);
  problem("values of kind -1", [](P& p) { p.values = -1; });
  problem("values of kind 4", [](P& p) { p.values = 4; });
  problem("values of kind 3", [](P& p) { p.values = 3; }, true);
  problem("integers of 4 bits", [](P& p) { set_bits(p, 4), p.values = kValueInteger; });
  problem("integers of 5 bits", [](P& p) { set_bits(p, 5), p.values = kValueInteger; }, true);
  problem("floats of 5 bits", [](P& p) { set_bits(p, 5), p.values = kValueE4M3; });
  problem("floats of kind -1", [](P& p) { p.x_type = -1; });
  problem("floats of kind 3", [](P& p) { p.x_type = 3; });
  problem("floats of kind 2", [](P& p) { p.x_type = 2; }, true);
  problem("no table", [](P& p) { p.table = nullptr; });
  problem("no codes", [](P& p) { p.codes = nullptr; });
  problem("no scales", [](P& p) { p.scale = nullptr; });
  problem("no x", [](P& p) { p.x = nullptr; });
  problem("no y", [](P& p) { p.y = nullptr; });
  problem("an empty stack", [](P& p) {
    static const int32_t selected[1] = {};
    p.selected = selected;
    p.stack = 0;
  });
  const auto code_scales = [](P& p) {
    static const uint8_t codes[1024] = {};
    static const float table[256] = {};
    p.scale_codes = codes;
    p.scale_table = table;
    p.scale_bits = 4;
    p.scale_block_size = 2;
    p.scale_words = packed_bytes(p.blocks, 4);
    p.scale_blocks = (p.blocks + 1) / 2;
  };
  problem("scales that are codes", code_scales, true);
  const std::pair<const char*, void (*)(P&)> wrong[] = {
      {"of 0 bits", [](P& p) { p.scale_bits = 0, p.scale_words = 0; }},
      {"of 9 bits", [](P& p) { p.scale_bits = 9, p.scale_words = packed_bytes(p.blocks, 9); }},
      {"in blocks of none", [](P& p) { p.scale_block_size = 0; }},
      {"with a byte too few", [](P& p) { --p.scale_words; }},
      {"with a block too few", [](P& p) { --p.scale_blocks; }},
      {"beside scales of rows", [](P& p) { p.row_scale = static_cast<const float*>(p.x); }},
      {"without a table", [](P& p) { p.scale_table = nullptr; }},
      {"beside offsets that are none", [](P& p) { p.offset = p.x; }}};
  for (const auto& [name, change] : wrong)
    problem(std::string("scales that are codes, ") + name, [=, change = change](P& p) {
      code_scales(p);
      change(p);
    });
  problem("offsets", [](P& p) { p.offset = p.x; }, true);
  problem("offsets that are codes, and scales that are none", [](P& p) { p.offset = p.x, p.offset_codes = p.codes; });
  problem("offsets of float16", [](P& p) { p.offset = p.x, p.x_type = kFloat16; });
  problem("offsets and zero points", [](P& p) { p.offset = p.x, p.zero_point = p.codes; });
}

void add_integers() {
  using Q = Int8Problem;
  static float table[256];
  const auto change_table = [](Q& q, const std::function<float(int)>& value) {
    set_bits(q.p, 4);
    for (int i = 0; i < 16; ++i) table[i] = value(i);
    q.p.table = table;
  };
  integers("transposed", [](Q& q) { q.p.transpose = 1; });
  integers("x of form -1", [](Q& q) { q.form = -1; });
  integers("x of form 3", [](Q& q) { q.form = 3; });
  integers("no scales of x", [](Q& q) { q.x_scale = nullptr, q.affine = 0; });
  integers("no scales of no x", [](Q& q) { q.x_scale = nullptr, q.affine = 0, q.p.m = 0; }, true);
  integers("no scales of no batch", [](Q& q) { q.x_scale = nullptr, q.affine = 0, q.p.batch = 0; }, true);
  integers("floats without scales", [](Q& q) { q.x_scale = nullptr, q.form = kFloats; }, true);
  integers("zero points of signed codes", [](Q& q) { q.form = kSigned; });
  integers("no zero points of x", [](Q& q) { q.x_zero = nullptr; });
  integers("no zero points of no x", [](Q& q) { q.x_zero = nullptr, q.p.m = 0; }, true);
  integers("no zero points of no batch", [](Q& q) { q.x_zero = nullptr, q.p.batch = 0; }, true);
  integers("offsets", [](Q& q) { q.p.offset = q.p.x, q.p.zero_point = nullptr; }, true);
  integers("offsets of codes that are not consecutive", [=](Q& q) {
    change_table(q, [](int i) { return static_cast<float>(2 * i); });
    q.p.offset = q.p.x, q.p.zero_point = nullptr;
  });
  integers("8 bits, any table", [](Q& q) { q.p.values = kValueTable; });
  integers("8 bits, integers that are not consecutive", [](Q& q) {
    for (int i = 0; i < 256; ++i) table[i] = static_cast<float>(i - 128);
    table[255] = 126;
    q.p.table = table;
  });
  integers("5 bits, any table", [](Q& q) { set_bits(q.p, 5); });
  integers("a table of halves", [=](Q& q) { change_table(q, [](int i) { return i == 15 ? 0.5f : 1.0f; }); });
  integers("a table of NaN", [=](Q& q) { change_table(q, [](int i) { return i == 15 ? NAN : 1.0f; }); });
  integers("a table with 255", [=](Q& q) { change_table(q, [](int i) { return i == 15 ? 255.0f : 1.0f; }); }, true);
  integers("a table with 256", [=](Q& q) { change_table(q, [](int i) { return i == 15 ? 256.0f : 1.0f; }); });
  integers("a table with -256", [=](Q& q) { change_table(q, [](int i) { return i == 0 ? -256.0f : -1.0f; }); });
  integers(
      "a table that spans 255", [=](Q& q) { change_table(q, [](int i) { return i == 3 ? -127.0f : 128.0f; }); }, true);
  integers("a table that spans 256", [=](Q& q) { change_table(q, [](int i) { return i == 3 ? -128.0f : 128.0f; }); });
  integers("a table that spans 256 from its begin",
           [=](Q& q) { change_table(q, [](int i) { return i == 0 ? -128.0f : 128.0f; }); });
}

void add_encodings() {
  using E = EncodeProblem;
  encode("0 bits", [](E& e) { e.bits = 0, e.words = 0; });
  encode("9 bits", [](E& e) { e.bits = 9, e.words = packed_bytes(e.k, 9); });
  encode("8 bits", [](E& e) { e.bits = 8, e.words = e.k; }, true);
  encode("1 bit", [](E& e) { e.bits = 1, e.words = packed_bytes(e.k, 1); }, true);
  encode("negative rows", [](E& e) { e.n = -1; });
  encode("no rows", [](E& e) { e.n = 0; }, true);
  encode("negative lengths", [](E& e) { e.k = -1, e.words = packed_bytes(-1, 4), e.blocks = 0; });
  encode("no length", [](E& e) { e.k = e.words = 0; }, true);
  encode("a block of nothing", [](E& e) { e.block_size = 0; });
  encode("blocks of one", [](E& e) { e.block_size = 1, e.blocks = e.k; }, true);
  encode("a block too few", [](E& e) { --e.blocks; });
  encode("a block too many", [](E& e) { ++e.blocks; });
  encode("a byte too few", [](E& e) { --e.words; });
  encode("a byte too many", [](E& e) { ++e.words; });
  encode("floats of kind -1", [](E& e) { e.x_type = -1; });
  encode("floats of kind 3", [](E& e) { e.x_type = 3; });
  encode("floats of kind 2", [](E& e) { e.x_type = 2; }, true);
  encode("rule -1", [](E& e) { e.rule = -1; });
  encode("rule 3", [](E& e) { e.rule = 3; });
  encode("rule 2", [](E& e) { e.rule = 2; }, true);
  encode("-1 steps", [](E& e) { e.num_steps = -1; });
  encode("-1 steps of another rule", [](E& e) { e.num_steps = -1, e.rule = kEven; }, true);
  encode("256 steps", [](E& e) { e.num_steps = 256; }, true);
  encode("257 steps", [](E& e) { e.num_steps = 257; });
  encode("NaN is code -1", [](E& e) { e.nan = -1; });
  encode("NaN is code 16", [](E& e) { e.nan = 16; });
  encode("NaN is code 15", [](E& e) { e.nan = 15; }, true);
  for (const int at : {0, 2}) {
    const std::string name = at == 0 ? "the first code" : "the last code";
    const auto set = [at](int code) {
      return [=](E& e) {
        static int32_t codes[3];
        codes[0] = codes[1] = codes[2] = 0;
        codes[at] = code;
        e.codes = codes;
      };
    };
    encode(name + " is -1", set(-1));
    encode(name + " is 16", set(16));
    encode(name + " is 15", set(15), true);
  }
}

}  // namespace

void add_check_tests() {
  add_products();
  add_codecs();
  add_integers();
  add_encodings();
}
