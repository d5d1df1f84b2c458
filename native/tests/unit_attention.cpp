// Attention to a cache: which places a token sees, and the sums of parts, against float64.
#include "attention/run.h"
#include "unit_data.h"

namespace {

using std::to_string;

// Random queries, keys and values. A test changes some, and then checks the results.
struct Attention {
  Attention(int64_t batch, int64_t heads, int64_t rows, int64_t tokens, int64_t places, int64_t size) {
    p.batch = batch;
    p.heads = heads;
    p.rows = rows;
    p.tokens = tokens;
    p.places = places;
    p.size = size;
    p.scale = 0.25f;
    Random random(static_cast<uint32_t>(3 + places));
    for (auto [count, to] :
         {std::pair{rows, &queries}, std::pair{places, &floats[kKeys]}, std::pair{places, &floats[kValues]}}) {
      to->resize(batch * heads * count * size);
      for (double& number : *to) number = static_cast<double>(whole(random, -60, 60)) / 32;  // exact in 16 bits
    }
    for (int64_t b = 0; b < batch; ++b) {
      length.push_back(static_cast<int32_t>(places));
      window.push_back(0);
      for (int64_t token = 0; token < tokens; ++token)
        positions.push_back(static_cast<int32_t>(places - tokens + token));
    }
  }

  enum { kKeys, kValues };

  // The codes of keys or values, instead of floats.
  void pack(int which, Form form) {
    form.n = p.places;
    form.k = p.size;
    form.stack = p.batch * p.heads;
    if (form.block == 0 || form.block > p.size) form.block = p.size;
    packed[which] = std::make_unique<Weight>(form);
    const Weight& w = *packed[which];
    for (int64_t i = 0; i < w.rows * p.size; ++i) {
      const int64_t row = i / p.size, k = i % p.size;
      floats[which][i] = w.value(row, k) * w.scale(row, k) + w.offset(row, k);
    }
  }

  double& key(int64_t head, int64_t place, int64_t i) { return floats[kKeys][(head * p.places + place) * p.size + i]; }
  double& value(int64_t head, int64_t place, int64_t i) {
    return floats[kValues][(head * p.places + place) * p.size + i];
  }

  static std::vector<uint8_t> stored(int type, const std::vector<double>& numbers) {
    std::vector<uint8_t> bytes(numbers.size() * float_bytes(type));
    for (size_t i = 0; i < numbers.size(); ++i) store_float(type, numbers[i], &bytes[i * float_bytes(type)]);
    return bytes;
  }

  std::vector<double> run(const Isa& isa, int64_t threads = kThreads) const {
    AttentionProblem q = p;
    const std::vector<uint8_t> query_bytes = stored(p.type, queries);
    std::vector<uint8_t> bytes[2];
    for (int which : {kKeys, kValues}) {
      CacheRows& rows = which == kKeys ? q.keys : q.values;
      if (packed[which] != nullptr) {
        packed[which]->describe(&rows.packed);
        rows.packed.n *= p.batch * p.heads;
        rows.packed.batch = rows.packed.stack = 1;
        continue;
      }
      rows.type = types[which];
      bytes[which] = stored(rows.type, floats[which]);
      rows.floats = bytes[which].data();
    }
    std::vector<uint8_t> y(query_bytes.size(), 0xff);
    q.queries = query_bytes.data();
    q.y = y.data();
    q.positions = positions.data();
    q.length = length.data();
    q.window = window.data();
    char why[200];
    expect_accepted(check_attention(q, why, sizeof why));
    Pool pool;
    if (!run_attention(isa, q, pool, threads)) fail("there is not enough memory");
    std::vector<double> found;
    for (size_t i = 0; i < queries.size(); ++i) found.push_back(load_float(p.type, &y[i * float_bytes(p.type)]));
    return found;
  }

  // Whether a row sees a place: `window` places up to its own, of those that are filled.
  bool sees(int64_t batch, int64_t row, int64_t place) const {
    const int64_t position = positions[batch * p.tokens + row % p.tokens];
    return place < length[batch] && place <= position && (window[batch] <= 0 || place > position - window[batch]);
  }

  void check(const Isa& isa) const {
    const std::vector<double> found = run(isa);
    for (int64_t head = 0; head < p.batch * p.heads; ++head)
      for (int64_t row = 0; row < p.rows; ++row) check_row(head, row, found.data() + (head * p.rows + row) * p.size);
    const std::vector<double> alone = run(isa, 1);
    if (found != alone) fail("one thread finds other results");
  }

  void check_row(int64_t head, int64_t row, const double* found) const {
    const double* query = queries.data() + (head * p.rows + row) * p.size;
    std::vector<double> scores, expected(p.size);
    std::vector<int64_t> seen;
    double reach = 0, top = -INFINITY, total = 0, amax = 0;
    for (int64_t t = 0; t < p.places; ++t) {
      if (!sees(head / p.heads, row, t)) continue;
      double score = 0, size = 0;
      for (int64_t i = 0; i < p.size; ++i) {
        const double product = query[i] * floats[kKeys][(head * p.places + t) * p.size + i];
        score += product;
        size += fabs(product);
        amax = std::max(amax, fabs(floats[kValues][(head * p.places + t) * p.size + i]));
      }
      score *= p.scale;
      size *= p.scale;
      if (p.cap > 0) {
        const double bent = tanh(score / p.cap);
        score = p.cap * bent;
        size = size * (1 - bent * bent) + p.cap;
      }
      reach = std::max(reach, size);
      scores.push_back(score);
      seen.push_back(t);
      top = std::max(top, score);
    }
    for (size_t i = 0; i < seen.size(); ++i) {
      const double share = exp(scores[i] - top);
      total += share;
      for (int64_t d = 0; d < p.size; ++d)
        expected[d] += share * floats[kValues][(head * p.places + seen[i]) * p.size + d];
    }
    // Products of 16 bits round queries and shares to 16 bits.
    const double of_score = p.type == kFloat32 ? 0x1p-20 : 0x1p-12;
    for (int64_t d = 0; d < p.size; ++d) {
      const double exact = seen.empty() ? 0 : expected[d] / total;
      const double bound = 2 * amax * of_score * (1 + reach) + rounding(p.type, exact);
      if (!near(found[d], exact, bound))
        fail("y[%d, %d, %d] is %.9g, not %.9g within %.2g", static_cast<int>(head), static_cast<int>(row),
             static_cast<int>(d), found[d], exact, bound);
    }
  }

  AttentionProblem p = {};
  int types[2] = {kFloat32, kFloat32};
  std::vector<double> queries, floats[2];
  std::unique_ptr<Weight> packed[2];
  std::vector<int32_t> positions, length, window;
};

void add_lengths() {
  for (const int64_t size : {1, 7, 8, 20, 64, 65, 128, 150})
    test("attention/heads of " + to_string(size), [=](const Isa& isa) {
      for (const int64_t places : {1, 9, 70}) Attention(2, 2, 3, 1, places, size).check(isa);
    });
  for (const int64_t places : {7, 8, 15, 63, 64, 65, 511, 512, 513, 1030, 1536})
    test("attention/" + to_string(places) + " places", [=](const Isa& isa) {
      Attention(1, 3, 2, 1, places, 32).check(isa);
      Attention(1, 1, 4, 2, places, 16).check(isa);
    });
  for (int64_t rows = 1; rows <= 9; ++rows)
    test("attention/" + to_string(rows) + " rows", [=](const Isa& isa) {
      for (const int64_t size : {20, 65, 128}) Attention(1, 2, rows, 1, 14, size).check(isa);
    });
  test("attention/many heads and threads", [](const Isa& isa) { Attention(3, 8, 2, 1, 700, 64).check(isa); });
  for (int64_t tokens : {63, 64, 65, 130, 200})
    test("attention/" + to_string(tokens) + " tokens of a prompt", [=](const Isa& isa) {
      Attention(2, 2, tokens, tokens, 230, 20).check(isa);
      Attention(1, 1, 3 * tokens, tokens, 1100, 16).check(isa);  // blocks that reach into the next head
    });
  test("attention/many heads of many places", [](const Isa& isa) { Attention(4, 17, 2, 1, 1100, 8).check(isa); });
  test("attention/nothing", [](const Isa& isa) {
    Attention(0, 2, 1, 1, 4, 8).check(isa);
    Attention(2, 2, 0, 1, 4, 8).check(isa);
    Attention(2, 2, 1, 1, 4, 0).check(isa);
    Attention(2, 2, 2, 2, 0, 8).check(isa);
  });
}

void add_masks() {
  test("attention/masks/lengths and positions of a batch", [](const Isa& isa) {
    Attention a(4, 2, 6, 3, 600, 16);
    a.length = {600, 1, 0, 530};
    a.positions = {5, 599, 300, 0, 1, 2, 0, 1, 2, 528, 529, 530};
    a.check(isa);
    a.length = {601, -1, INT32_MAX, 600};  // no more than there are
    a.check(isa);
  });
  test("attention/masks/windows", [](const Isa& isa) {
    for (const int32_t window : {1, 2, 63, 64, 65, 100, 511, 512, 513, 599, 600, 601, 1 << 30}) {
      Attention a(2, 1, 4, 2, 600, 8);
      a.window = {window, 0};
      a.positions = {597, 599, 520, 599};
      a.check(isa);
      a.positions = {100, 599, 3, 3};
      a.window = {window, window};
      a.check(isa);
    }
  });
  test("attention/masks/windows of a prompt", [](const Isa& isa) {
    for (const int32_t window : {1, 64, 100, 600}) {
      Attention a(2, 1, 260, 130, 700, 8);
      a.window = {window, 0};
      a.length = {650, 700};
      for (int token = 0; token < 130; token += 3) a.positions[token] = (token * 37) % 700;  // in any order
      a.check(isa);
    }
  });
  test("attention/masks/a token that sees nothing is zero", [](const Isa& isa) {
    Attention a(1, 2, 4, 2, 40, 24);
    a.length = {10};
    a.window = {4};
    a.positions = {-1, 30};
    for (const double number : a.run(isa))
      if (number != 0) fail("a number is %.9g", number);
    a.positions = {-1, 5};
    a.check(isa);
    a.positions = {INT32_MAX, 5};
    a.window = {0};
    a.check(isa);
    for (const int32_t window : {INT32_MAX, -1, INT32_MIN}) {
      a.window = {window};
      a.check(isa);
    }
  });
  test("attention/masks/hidden places may hold anything", [](const Isa& isa) {
    Attention a(1, 2, 2, 1, 700, 16);
    a.length = {650};
    a.window = {100};
    a.positions = {640};
    const std::vector<double> expected = a.run(isa);
    for (int64_t head = 0; head < 2; ++head)
      for (int64_t t = 0; t < 700; ++t)
        if (!a.sees(0, 0, t))
          for (int64_t i = 0; i < 16; ++i) {
            a.key(head, t, i) = NAN;
            a.value(head, t, i) = INFINITY;
          }
    if (a.run(isa) != expected) fail("they change the results");
  });
}

void add_numbers() {
  for (const float cap : {0.01f, 5.0f, 50.0f})
    test("attention/cap of " + to_string(cap), [=](const Isa& isa) {
      Attention a(1, 2, 3, 1, 77, 32);
      a.p.cap = cap;
      a.check(isa);
      for (double& number : a.queries) number *= 1e6;
      a.p.scale = 1;
      a.check(isa);
    });
  for (int type : {kFloat32, kBFloat16, kFloat16})
    for (int key : {kFloat32, kBFloat16, kFloat16})
      test(std::string("attention/") + kTypeNames[type] + " queries, " + kTypeNames[key] + " keys",
           [=](const Isa& isa) {
             for (const int64_t size : {5, 16, 40}) {
               Attention a(2, 2, 3, 1, 130, size);
               a.p.type = type;
               a.types[a.kKeys] = key;
               a.types[a.kValues] = type;
               a.check(isa);
             }
           });
  test("attention/large scores choose one place", [](const Isa& isa) {
    Attention a(1, 1, 1, 1, 600, 16);
    a.p.scale = 1e4f;
    const std::vector<double> found = a.run(isa);
    int64_t best = 0;
    double most = -INFINITY;
    for (int64_t t = 0; t < 600; ++t) {
      double score = 0;
      for (int64_t i = 0; i < 16; ++i) score += a.queries[i] * a.key(0, t, i);
      if (score > most) most = score, best = t;
    }
    for (int64_t i = 0; i < 16; ++i)
      if (found[i] != a.value(0, best, i)) fail("number %d is %.9g", static_cast<int>(i), found[i]);
  });
  test("attention/scores of one head do not change another", [](const Isa& isa) {
    Attention a(1, 2, 1, 1, 9, 16);
    for (size_t i = 0; i < a.queries.size(); ++i) a.queries[i] = i < 16 ? -60 : 60;
    for (double& number : a.floats[a.kKeys]) number = fabs(number) + 1;
    a.check(isa);
  });
  test("attention/shares of tiny scores are not lost", [](const Isa& isa) {
    Attention a(1, 1, 1, 1, 1200, 8);
    for (int64_t t = 0; t < 1200; ++t)
      for (int64_t i = 0; i < 8; ++i) {
        a.key(0, t, i) = t < 600 ? 0 : -10;  // parts differ in their largest score
        a.value(0, t, i) = t < 600 ? 1 : 1000;
      }
    for (double& number : a.queries) number = 1;
    a.p.scale = 0.1f;
    a.check(isa);
  });
}

void add_not_finite() {
  const auto all_nan = [](const std::vector<double>& found) {
    for (const double number : found)
      if (!std::isnan(number)) fail("a number is %.9g, not NaN", number);
  };
  for (const int64_t place : {0, 5, 599}) {
    test("attention/NaN in key " + to_string(place), [=](const Isa& isa) {
      Attention a(1, 1, 2, 1, 600, 16);
      a.key(0, place, 3) = NAN;
      all_nan(a.run(isa));
      a.p.cap = 5;
      all_nan(a.run(isa));
    });
    test("attention/a score of infinity is NaN, " + to_string(place), [=](const Isa& isa) {
      Attention a(1, 1, 1, 1, 600, 16);
      for (double& number : a.queries) number = 1;
      a.key(0, place, 3) = INFINITY;
      all_nan(a.run(isa));
    });
    test("attention/a score of minus infinity has no share, " + to_string(place), [=](const Isa& isa) {
      Attention a(1, 1, 1, 1, 600, 16);
      for (double& number : a.queries) number = 1;
      a.key(0, place, 3) = -INFINITY;
      a.check(isa);
    });
  }
  test("attention/NaN in a key is in the tokens that see it", [=](const Isa& isa) {
    Attention a(1, 1, 150, 150, 150, 16);
    a.key(0, 100, 3) = NAN;
    const std::vector<double> found = a.run(isa);
    for (int64_t i = 0; i < 150 * 16; ++i)
      if (std::isnan(found[i]) != (i / 16 >= 100)) fail("number %d is %.9g", static_cast<int>(i), found[i]);
  });
  test("attention/NaN in a value is in its column alone", [=](const Isa& isa) {
    Attention a(1, 1, 1, 1, 70, 16);
    a.value(0, 50, 3) = NAN;
    const std::vector<double> found = a.run(isa);
    for (int64_t i = 0; i < 16; ++i)
      if (std::isnan(found[i]) != (i == 3)) fail("number %d is %.9g", static_cast<int>(i), found[i]);
  });
  test("attention/scores of minus infinity alone are NaN", [=](const Isa& isa) {
    Attention a(1, 1, 1, 1, 9, 16);
    for (double& number : a.queries) number = 1;
    for (int64_t t = 0; t < 9; ++t) a.key(0, t, 3) = -INFINITY;
    all_nan(a.run(isa));
  });
}

void add_checks() {
  const auto refused = [](const char* name, const auto& spoil) {
    test(std::string("attention/refused/") + name, [=](const Isa&) {
      std::vector<float> numbers(2 * 3 * 5 * 8);
      AttentionProblem p = {};
      p.batch = 2, p.heads = 3, p.rows = 4, p.tokens = 2, p.places = 5, p.size = 8;
      p.keys.floats = p.values.floats = numbers.data();
      Form form;
      form.n = 5, form.k = form.block = 8, form.stack = 6;
      const Weight weight(form);
      const auto pack = [&](CacheRows* rows) {
        weight.describe(&rows->packed);
        rows->packed.n = 30;
        rows->packed.batch = rows->packed.stack = 1;
      };
      char why[200];
      expect_accepted(check_attention(p, why, sizeof why));
      pack(&p.keys);
      pack(&p.values);
      expect_accepted(check_attention(p, why, sizeof why));
      spoil(&p);
      if (check_attention(p, why, sizeof why) == nullptr) fail("the problem is accepted");
    });
  };
  refused("rows that belong to no token", [](AttentionProblem* p) { p->rows = 5; });
  refused("no tokens", [](AttentionProblem* p) { p->tokens = 0; });
  refused("a negative length", [](AttentionProblem* p) { p->heads = -1; });
  refused("floats of no kind", [](AttentionProblem* p) { p->type = 3; });
  refused("values of no kind", [](AttentionProblem* p) {
    p->values.packed = {};
    p->values.type = -1;
  });
  refused("keys of another length", [](AttentionProblem* p) { p->keys.packed.n = 29; });
  refused("values of another size", [](AttentionProblem* p) { p->values.packed.k = 9; });
  refused("keys of several batches", [](AttentionProblem* p) { p->keys.packed.batch = 2; });
  refused("keys without codes", [](AttentionProblem* p) { p->keys.packed.codes = nullptr; });
  refused("selected keys", [](AttentionProblem* p) {
    static const int32_t which = 0;
    p->keys.packed.selected = &which;
  });
}

void add_packed() {
  std::vector<std::pair<std::string, Form>> forms;
  const auto add = [&](const char* name, int bits, int table, int64_t block, const auto& change) {
    Form form;
    form.bits = bits;
    form.table = static_cast<Table>(table);
    form.block = block;
    change(form);
    forms.push_back({name, form});
  };
  const auto plain = [](Form&) {};
  add("int8", 8, kIntegers, 0, plain);
  add("int4", 4, kIntegers, 32, plain);
  add("int8 in blocks", 8, kIntegers, 32, plain);
  add("int2", 2, kIntegers, 64, plain);
  add("int1", 1, kAnyFloats, 64, plain);
  add("five bits", 5, kAnyFloats, 24, plain);
  add("fp8", 8, kE4M3, 64, plain);
  add("fp8, e5m2", 8, kE5M2, 64, plain);
  add("table of 256", 8, kAnyFloats, 40, plain);
  add("nf4", 4, kAnyFloats, 16, [](Form& f) { f.scale_kind = kScaleFloat16; });
  add("affine", 4, kFromZero, 32, [](Form& f) { f.zero_points = true; });
  add("scales of rows", 2, kAnyFloats, 16, [](Form& f) { f.row_scales = true; });
  add("three bits", 3, kIntegers, 32, plain);
  add("coded scales and offsets", 4, kFromZero, 16, [](Form& f) {
    f.offsets = true;
    f.scale_bits = 6;
    f.scale_block = 4;
  });
  for (const auto& [name, form] : forms)
    test("attention/packed/" + name, [form = form](const Isa& isa) {
      for (const int which : {0, 1, 2})
        for (const int64_t tokens : {1, 70})
          for (const int64_t size : {64, 128}) {
            Attention a(2, 2, 3 * tokens, tokens, 600, size);
            a.p.scale = 0.02f;
            a.length = {600, 37};
            a.window = {150, 0};
            if (which != 1) a.pack(a.kKeys, form);
            if (which != 0) a.pack(a.kValues, form);
            a.check(isa);
          }
    });
  test("attention/packed/random problems", [=](const Isa& isa) {
    Random random(1);
    for (int i = 0; i < 60; ++i) {
      const int64_t tokens = whole(random, 1, 5) * whole(random, 1, 30), heads = whole(random, 1, 3);
      Attention a(whole(random, 1, 2), heads, tokens * whole(random, 1, 3), tokens, whole(random, 1, 700),
                  whole(random, 1, 9) * whole(random, 1, 17));
      a.p.scale = 0.01f;
      for (int32_t& length : a.length) length = whole(random, 0, static_cast<int>(a.p.places));
      for (int32_t& window : a.window) window = whole(random, 0, 1) * whole(random, 1, 700);
      for (int32_t& position : a.positions) position = whole(random, -1, static_cast<int>(a.p.places));
      for (const int which : {a.kKeys, a.kValues})
        if (whole(random, 0, 3) > 0) a.pack(which, forms[whole(random, 0, static_cast<int>(forms.size()) - 1)].second);
      a.check(isa);
    }
  });
  test("attention/packed/bfloat16 queries", [](const Isa& isa) {
    Attention a(1, 2, 3, 1, 100, 64);
    Form form;
    form.bits = 8;
    form.table = kIntegers;
    a.p.scale = 0.001f;
    a.p.type = kBFloat16;
    a.pack(a.kKeys, form);
    a.pack(a.kValues, form);
    a.check(isa);
  });
}

}  // namespace

void add_attention_tests() {
  add_lengths();
  add_masks();
  add_numbers();
  add_not_finite();
  add_packed();
  add_checks();
}
