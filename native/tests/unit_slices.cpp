// Products of floats as integers, on AVX-512 with VNNI and on AMX. A kernel whose checks of x or of scales are wrong
// leaves them to another one, whose results are as right. So these tests also see that integers were multiplied.
#include "unit_product.h"

namespace {

using std::to_string;

bool has_slices(const Isa& isa) {
  const std::string name = isa.name;
  return name == "avx512vnni" || name == "avx512vbmi" || name == "amx";
}

// Two slices of x are enough, and show: results have the errors of 16 bits, which x does not fit in.
void make_coarse(Product& p) {
  Random random(5);
  for (double& number : p.x) number = static_cast<double>(whole(random, -99999, 99999)) / 32768;
  p.coarse = p.rounds_x = true;
}

void takes_slices(
    const std::string& name, const Form& form, const std::function<void(Product&)>& change = [](Product&) {}) {
  test("matmul/slices/" + name, [=](const Isa& isa) {
    if (!has_slices(isa)) return;
    Product product(Weight(form), {"", 49, false}, form.stack);
    make_coarse(product);
    change(product);
    product.check(isa);
  });
}

Form integers(int bits, int64_t block) {
  Form form;
  form.table = kIntegers;
  form.bits = bits;
  form.block = block;
  return form;
}

void add_slices() {
  for (const int bits : {1, 2, 4, 8})
    for (const int64_t block : {32, 48, 64, 128, 1200}) {
      Form form = integers(bits, block);
      const std::string name = to_string(bits) + " bits/blocks of " + to_string(block);
      for (const int64_t k : {165, 512, 1100, 2048}) {
        form.k = k;
        form.block = std::min(block, k);
        takes_slices(name + ", K " + to_string(k), form);
      }
      form.zero_points = true;
      takes_slices(name + ", zero points", form);
    }
  Form form = integers(4, 32);
  form.row_scales = true;
  takes_slices("scales of rows", form);
  form.stack = 2;
  takes_slices("batch", form);
  takes_slices("selected", form, [](Product& p) { p.selected = {1, 1}; });
  form.n = 100;
  takes_slices("units of rows", form);
  form.table = kHalves;
  takes_slices("halves", form);
  takes_slices("x by columns", form, [](Product& p) { p.layout.x_by_columns = true; });
  takes_slices("y by columns", form, [](Product& p) { p.layout.y_by_columns = true; });
  takes_slices("rows with gaps", form, [](Product& p) { p.layout.gap = 3; });
  takes_slices("columns with gaps", form, [](Product& p) {
    p.layout.x_by_columns = p.layout.y_by_columns = true;
    p.layout.gap = 3;
  });
  takes_slices("zeros in x", form, [](Product& p) {
    for (int64_t i = 0; i < p.inner; i += 2)
      for (int64_t row = 0; row < p.m * p.batch; ++row) p.x_at(row, i) = 0;
  });
  takes_slices("a scale is zero", form, [](Product& p) {
    for (int64_t row = 0; row < p.w.rows; ++row) p.w.set_scale(row, 1, 0);
  });
}

// So many rows of x that a unit has not all of them, which takes many threads.
void add_many_rows() {
  Form form = integers(8, 32);
  form.n = 2048;
  form.k = 32;
  form.stack = 2;
  takes_slices("many rows, many threads", form, [](Product& p) {
    p = Product(p.w, {"", 260, false}, 2);
    p.threads = 64;
    make_coarse(p);
  });
}

// What a panel of one or two rows leaves to another kernel.
void add_last_panels() {
  for (const int64_t m : {17, 18, 33, 34})
    for (const double special : {static_cast<double>(NAN), 0x1p100})
      test("matmul/slices/a special number in the last of " + to_string(m) + " rows", [=](const Isa& isa) {
        Product product(Weight(integers(4, 64)), {"", m, false});
        product.x_at(m - 1, 7) = special;
        product.check(isa);
      });
  for (const int type : {kBFloat16, kFloat16})
    test(std::string("matmul/slices/special numbers of x and of scales, x in ") +
             (type == kFloat16 ? "float16" : "bfloat16"),
         [=](const Isa& isa) {
           Product product(Weight(integers(4, 64)), {"", 33, false});
           product.x_type = type;
           product.x_at(17, 7) = NAN;
           product.w.set_scale(3, 1, bits_of(NAN));
           product.check(isa);
         });
}

// A weight may multiply only numbers that keep few bits beside the others: 32 of 1,024 in a row, and no more.
void add_small_numbers() {
  test("matmul/slices/a few small numbers beside large ones", [](const Isa& isa) {
    Form form = integers(4, 64);
    form.k = 1024;
    Product product(Weight(form), {"", 49, false});
    for (int64_t row = 0; row < product.m; ++row)
      for (int64_t i = 0; i < 32; ++i) product.x_at(row, i) /= 512;
    for (size_t i = 0; i < product.w.codes.size(); ++i)
      if (static_cast<int64_t>(i) % form.k >= 32) product.w.codes[i] = 8;  // means zero
    product.w.pack_codes();
    product.check(isa);
  });
}

// Consecutive integers so large that sums of their products with slices are beyond 32 bits.
void add_large_integers() {
  for (const float shift : {-1e6f, 1e6f})
    for (const int bits : {4, 8})
      test("matmul/slices/integers from " + to_string(static_cast<int>(shift)) + ", " + to_string(bits) + " bits",
           [=](const Isa& isa) {
             Product product(Weight(integers(bits, 64)), {"", 49, false});
             for (float& value : product.w.table) value += shift;
             product.check(isa);
           });
}

}  // namespace

void add_slice_tests() {
  add_slices();
  add_many_rows();
  add_last_panels();
  add_small_numbers();
  add_large_integers();
}
