// One row of x times integers in registers: GGUF's K-quants, integers of 3, 5 and 6 bits, MLX's with offsets; with AVX2
// integers of 2 and 4 bits too. Another path takes what this kernel refuses, so tests also see what it accepts.
#include "unit_product.h"

namespace {

using std::to_string;

Form k_quant(int bits, int64_t block, int scale_bits, bool offsets) {
  Form form;
  form.bits = bits;
  form.table = offsets ? kFromZero : kIntegers;
  form.block = block;
  form.scale_kind = kScaleFloat16;
  form.scale_bits = scale_bits;
  form.scale_block = 256 / block;
  form.scale_integers = true;
  form.offsets = offsets;
  return form;
}

struct NamedForm {
  std::string name;
  Form form;
};

std::vector<NamedForm> forms() {
  std::vector<NamedForm> all = {{"q2_k", k_quant(2, 16, 4, true)},
                                {"q3_k", k_quant(3, 16, 6, false)},
                                {"q4_k", k_quant(4, 32, 6, true)},
                                {"q5_k", k_quant(5, 32, 6, true)},
                                {"q6_k", k_quant(6, 16, 7, false)}};
  for (const int bits : {2, 3, 4, 5, 6})
    for (const int64_t block : {32, 64, 192, 512, 1088, 5000})
      for (const bool offsets : {false, true}) {
        Form form;
        form.bits = bits;
        form.table = offsets ? kFromZero : kIntegers;
        form.block = block;
        form.offsets = offsets;
        form.row_scales = !offsets;
        all.push_back({to_string(bits) + " bits, blocks of " + to_string(block) + (offsets ? ", offsets" : ""), form});
      }
  return all;
}

// The kernel without slabs that takes a problem, and the number of slices it packs x in; 0 without one.
int64_t slices_of(const Isa& isa, const Weight& weight, const std::vector<float>& x) {
  Problem p = {};
  weight.describe(&p);
  p.batch = p.stack = p.m = 1;
  p.x_row = weight.form.k;
  p.x_column = p.y_column = 1;
  p.y_row = weight.form.n;
  p.x = x.data();
  const MatmulKernel* kernel = find_kernel(isa.slabs->packed, p);
  if (kernel == nullptr || kernel->accepts_packed == nullptr) return 0;
  Plan plan = {};
  kernel->plan(&p, 1, &plan);
  char* memory = static_cast<char*>(allocate_aligned(plan.shared_bytes));
  for (int64_t part = 0; part < plan.parts; ++part) kernel->prepare(&p, &plan, memory, part);
  int64_t slices = 0;
  if (kernel->accepts_packed(&p, &plan, memory)) memcpy(&slices, memory, sizeof slices);  // its first number
  free_aligned(memory);
  return slices;
}

bool has_kernel(const Isa& isa, const Form& form) {
  const std::string name = isa.name;
  if (name == "avx2") return true;
  const bool is_plain = !is_split(form.bits) && form.scale_bits == 0 && !form.offsets;
  return (name == "avx512vbmi" || name == "amx") && !is_plain && (form.block != 32 || form.scale_bits > 0);
}

void add_forms() {
  for (const NamedForm& one : forms())
    for (const int64_t k : {200, 256, 300, 320, 1100, 2048, 2605}) {
      Form form = one.form;
      form.k = k;
      form.block = std::min(form.block, k);
      form.n = 35;
      test("matmul/integer row/" + one.name + ", K " + to_string(k),
           [=](const Isa& isa) { Product(Weight(form), kMethods[0]).check(isa); });
      form.stack = 3;
      if (k == 1100)
        test("matmul/integer row/" + one.name + ", selected", [=](const Isa& isa) {
          Product product(Weight(form), kMethods[0], 2);
          product.selected = {2, 0};
          product.check(isa);
        });
    }
  Form form = k_quant(6, 16, 7, false);
  form.k = 1100;
  for (const int type : {kBFloat16, kFloat16})
    test(std::string("matmul/integer row/x in ") + kTypeNames[type], [=](const Isa& isa) {
      Product product(Weight(form), kMethods[0]);
      product.x_type = type;
      for (double& number : product.x) number /= 64;  // results fit in float16
      product.check(isa);
    });
}

// Which numbers of x are sliced, and that all products are right.
void add_numbers() {
  struct Case {
    std::string name;
    int64_t slices;
    std::function<double(double x, int64_t k)> change;
  };
  const std::vector<Case> cases = {
      {"as they are", 3, [](double x, int64_t) { return x; }},
      {"zeros", 3, [](double, int64_t) { return 0.0; }},
      {"zeros in a span", 3, [](double x, int64_t k) { return k / 256 == 1 ? 0 : x; }},
      {"small", 3, [](double x, int64_t) { return x * 0x1p-50; }},
      {"an outlier", 4, [](double x, int64_t k) { return k == 300 ? 1e4 : x; }},
      {"32 small ones", 4, [](double x, int64_t k) { return k / 32 == 9 ? x / 500 : x; }},
      {"one in nine tiny", 4, [](double x, int64_t k) { return k % 9 == 0 ? x / 4000 : x; }},
      {"a large outlier", 0, [](double x, int64_t k) { return k == 300 ? 1e12 : x; }},
      {"too small", 0, [](double x, int64_t) { return x * 0x1p-80; }},
      {"too large", 0, [](double x, int64_t) { return x * 0x1p80; }},
      {"NaN", 0, [](double x, int64_t k) { return k == 1000 ? NAN : x; }},
      {"an infinity", 0, [](double x, int64_t k) { return k == 1000 ? -INFINITY : x; }},
  };
  for (const NamedForm& one : forms()) {
    Form form = one.form;
    form.k = 1100;
    form.block = std::min(form.block, form.k);
    for (const Case& some : cases)
      test("matmul/integer row/" + one.name + ", x: " + some.name, [=](const Isa& isa) {
        Product product(Weight(form), kMethods[0]);
        std::vector<float> x(form.k);
        for (int64_t k = 0; k < form.k; ++k) x[k] = static_cast<float>(product.x[k] = some.change(product.x[k], k));
        const int64_t slices = slices_of(isa, product.w, x);
        if (has_kernel(isa, form) && slices != some.slices)
          fail("x is %d slices, not %d", static_cast<int>(slices), static_cast<int>(some.slices));
        product.exact_infinities = some.name == "an infinity" && form.offsets;
        product.check(isa);
      });
  }
}

// Rows of x of a batch: each of them may have numbers that stay floats.
void add_batches() {
  Form form = k_quant(5, 32, 6, true);
  form.k = 1100;
  form.stack = 3;
  for (const int64_t batch : {0, 1, 2})
    test("matmul/integer row/a large outlier in row " + to_string(batch) + " of a batch", [=](const Isa& isa) {
      Product product(Weight(form), kMethods[0], 3);
      product.x[batch * form.k + 300] = 1e12;
      product.check(isa);
    });
}

// Rows of the weight that multiply the small numbers of a span only, beside large ones: blocks of 16, or of 32.
void add_small_numbers() {
  for (const int64_t block : {16, 32})
    for (const double factor : {300.0, 1e5, 1e8})
      test("matmul/integer row/blocks of " + to_string(block) + " beside others, " + to_string(factor) +
               " times as large",
           [=](const Isa& isa) {
             Form form = k_quant(5, block, 6, false);
             form.k = 512;
             Product product(Weight(form), kMethods[0]);
             const auto is_small = [=](int64_t k) { return k % 128 / block == 3; };
             for (int64_t k = 0; k < form.k; ++k)
               if (!is_small(k)) product.x[k] = static_cast<float>(product.x[k] * factor);
             for (size_t i = 0; i < product.w.codes.size(); ++i)
               if (!is_small(static_cast<int64_t>(i) % form.k)) product.w.codes[i] = 16;  // means zero
             product.w.pack_codes();
             product.check(isa);
           });
}

// Sums of products of the largest codes and bytes of x, which may not saturate.
void add_largest() {
  for (const bool offsets : {false, true})
    for (const int64_t block : {16, 32, 64, 5000})
      test("matmul/integer row/largest sums/" + std::string(offsets ? "offsets, " : "") + "blocks of " +
               to_string(block),
           [=](const Isa& isa) {
             Form form = block < 32 ? k_quant(6, block, 6, offsets) : Form();
             form.bits = 6;
             form.table = kIntegers;
             form.k = 1100;
             form.block = std::min(block, form.k);
             form.offsets = offsets;
             Product product(Weight(form), kMethods[0]);
             for (int i = 0; i < 64 && !offsets; ++i) product.w.table[i] = static_cast<float>(i - 63);
             for (size_t i = 0; i < product.w.codes.size(); ++i)
               product.w.codes[i] = static_cast<int64_t>(i) / form.k % 2 == 0 ? 63 : 0;
             product.w.pack_codes();
             for (int64_t k = 0; k < form.k; ++k) product.x[k] = ldexp(static_cast<double>(k - (1 << 23)), -20);
             product.check(isa);
           });
}

// Weights that only look alike are left to others.
void add_refusals() {
  const auto by_form = [](
                           const std::string& name, const std::function<void(Form&)>& change,
                           const std::function<void(Weight&)>& change_weight = [](Weight&) {}) {
    test("matmul/integer row/refuses " + name, [=](const Isa& isa) {
      Form form = k_quant(6, 16, 6, false);
      form.k = 600;
      change(form);
      Product product(Weight(form), kMethods[0]);
      change_weight(product.w);
      if (slices_of(isa, product.w, std::vector<float>(form.k, 1)) != 0) fail("accepted");
      product.check(isa);
    });
  };
  by_form("zero points", [](Form& form) { form.zero_points = true; });
  by_form("tables of floats", [](Form& form) { form.table = kAnyFloats; });
  by_form("scales of floats", [](Form& form) { form.scale_integers = false; });
  by_form("blocks of 8", [](Form& form) { form.block = 8; });
  by_form("24 scales in a block", [](Form& form) { form.scale_block = 24; });
  by_form("seven bits", [](Form& form) { form.bits = 7; });
  by_form("two blocks of 301", [](Form& form) {
    form.scale_bits = 0;
    form.block = 301;
  });
  by_form(
      "consecutive halves", [](Form& form) { form.offsets = false; },
      [](Weight& w) {
        w.form.table = kAnyFloats;
        for (float& value : w.table) value += 0.5f;
      });
  for (const bool first : {false, true})
    by_form(
        std::string("integers with a gap at the ") + (first ? "begin" : "end"), [](Form&) {},
        [=](Weight& w) {
          w.form.table = kAnyFloats;
          first ? --w.table.front() : ++w.table.back();
        });
}

}  // namespace

void add_integer_row_tests() {
  add_forms();
  add_numbers();
  add_batches();
  add_small_numbers();
  add_largest();
  add_refusals();
}
