// The product as XLA calls it, and the functions that Python calls before it registers it with XLA.
#include <string.h>

#include <utility>

#include "core/matmul.h"
#include "ffi/buffers.h"
#include "ffi/weight.h"

namespace {

// Fills in the arrays of a product with a weight that is set; either may be transposed. Returns null, or the error.
const char* set_arrays(ffi::AnyBuffer x, ffi::AnyBuffer y, bool x_transposed, bool y_transposed, Problem* out) {
  Problem& p = *out;
  Matrix xs, ys;
  if (!as_matrix(x, &xs) || !as_matrix(y, &ys)) return "arrays must have at least two dimensions";
  p.m = x_transposed ? xs.columns : xs.rows;
  const int64_t inner = p.transpose ? p.n : p.k, outer = p.transpose ? p.k : p.n;
  if (xs.batch != p.batch || ys.batch != p.batch) return "batches differ";
  if ((x_transposed ? xs.rows : xs.columns) != inner) return "x and the weight do not fit";
  if ((y_transposed ? ys.columns : ys.rows) != p.m || (y_transposed ? ys.rows : ys.columns) != outer)
    return "the result has a wrong shape";
  p.x = x.untyped_data();
  p.y = y.untyped_data();
  p.x_batch = p.m * inner;
  p.x_row = x_transposed ? 1 : inner;
  p.x_column = x_transposed ? p.m : 1;
  p.y_batch = p.m * outer;
  p.y_row = y_transposed ? 1 : outer;
  p.y_column = y_transposed ? p.m : 1;
  return nullptr;
}

// Arguments: x, codes, scale, and the ones that `weight` announces.
ffi::Error matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale,
                  ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y, Table table, Table scale_table,
                  Numbers weight, Numbers codec_numbers, ffi::Span<const int8_t> vectors, bool transpose, bool coarse,
                  bool x_transposed, bool y_transposed) {
  const char* why = nullptr;
  const Isa* isa = choose_isa(&why);
  if (isa == nullptr) return bad(why);
  const Meaning meaning = {table, scale_table, weight, codec_numbers, vectors};
  Codec codec = {};
  Problem p = {};
  p.transpose = transpose;
  p.coarse = coarse;
  if (const char* wrong = set_weight(codes, scale, {rest, 0, rest.size()}, meaning, &codec, &p)) return bad(wrong);
  if (!float_type(x.element_type(), &p.x_type)) return bad("x must be float32, bfloat16 or float16");
  if (y->element_type() != x.element_type()) return bad("the result must have the type of x");
  if (const char* wrong = set_arrays(x, *y, x_transposed, y_transposed, &p)) return bad(wrong);
  char text[200];
  if (const char* wrong = check_problem(p, text, sizeof text)) return bad(wrong);
  return done(run_problem(*isa, p, pool, pool.num_threads()));
}

// Fills in argument `index`: one number for each row of x. Whether it is there and fits.
template <typename T>
bool row_numbers(ffi::RemainingArgs rest, size_t index, ffi::DataType type, const Problem& p, const T** out) {
  auto found = rest.get<ffi::AnyBuffer>(index);
  Matrix a;
  if (!found.has_value() || found->element_type() != type || !as_matrix(*found, &a)) return false;
  *out = static_cast<const T*>(found->untyped_data());
  return a.batch == p.batch && a.rows == p.m && a.columns == 1;
}

// The same for integers. x is floats of the type of the result, or int8, or uint8 with a bias of 128. The last argument
// has the scales of its rows; of floats only if they are `scaled`, and otherwise these get their own. With `affine`,
// rows have zero points, floats are quantized to such, or x is uint8; after scales, an argument has them.
ffi::Error matmul_int8(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer codes, ffi::AnyBuffer scale,
                       ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y, Table table, Table scale_table,
                       Numbers weight, Numbers codec_numbers, ffi::Span<const int8_t> vectors, bool x_transposed,
                       bool y_transposed, bool affine, bool scaled) {
  const char* why = nullptr;
  const Isa* isa = choose_isa(&why);
  if (isa == nullptr) return bad(why);
  const Meaning meaning = {table, scale_table, weight, codec_numbers, vectors};
  Codec codec = {};
  Int8Problem q = {};
  Problem& p = q.p;
  q.form = x.element_type() == ffi::DataType::S8 ? kSigned
         : x.element_type() == ffi::DataType::U8 ? kUnsigned
                                                 : kFloats;
  q.affine = affine;
  // Before counting arguments, which depends on the type of x.
  if (!float_type(y->element_type(), &p.x_type)) return bad("the result must be float32, bfloat16 or float16");
  if (q.form == kFloats && x.element_type() != y->element_type())
    return bad("x must be int8, uint8 or of the type of the result");
  const size_t more = q.form == kFloats && !scaled ? 0 : affine ? 2 : 1;
  if (rest.size() < more) return bad("arguments and flags differ in number");
  const Arguments of_weight = {rest, 0, rest.size() - more};
  if (const char* wrong = set_weight(codes, scale, of_weight, meaning, &codec, &p)) return bad(wrong);
  if (const char* wrong = set_arrays(x, *y, x_transposed, y_transposed, &p)) return bad(wrong);
  if (more > 0 && !row_numbers(rest, rest.size() - more, ffi::DataType::F32, p, &q.x_scale))
    return bad("the scales of x must be float32, one for each row");
  if (more > 1 && !row_numbers(rest, rest.size() - 1, ffi::DataType::U8, p, &q.x_zero))
    return bad("the zero points of x must be uint8, one for each row");
  char text[200];
  if (const char* wrong = check_int8(q, text, sizeof text)) return bad(wrong);
  return done(run_int8(*isa, q, pool, pool.num_threads()));
}

// Arguments: codes, scale, and the ones that `weight` announces.
ffi::Error decode(ffi::ThreadPool pool, ffi::AnyBuffer codes, ffi::AnyBuffer scale, ffi::RemainingArgs rest,
                  ffi::Result<ffi::AnyBuffer> y, Table table, Table scale_table, Numbers weight, Numbers codec_numbers,
                  ffi::Span<const int8_t> vectors, bool clip) {
  const char* why = nullptr;
  const Isa* isa = choose_isa(&why);
  if (isa == nullptr) return bad(why);
  const Meaning meaning = {table, scale_table, weight, codec_numbers, vectors};
  Codec codec = {};
  Problem p = {};
  Matrix ys;
  if (const char* wrong = set_weight(codes, scale, {rest, 0, rest.size()}, meaning, &codec, &p)) return bad(wrong);
  if (!as_matrix(*y, &ys) || ys.batch != p.batch || ys.rows != p.n || ys.columns != p.k)
    return bad("the result has a wrong shape");
  if (!float_type(y->element_type(), &p.x_type)) return bad("the result must be float32, bfloat16 or float16");
  if (p.offset != nullptr) return bad("weights with offsets are not decoded");
  p.clip = clip;
  p.y = y->untyped_data();
  char text[200];
  if (const char* wrong = check_problem(p, text, sizeof text)) return bad(wrong);
  return done(run_decode(*isa, p, pool, pool.num_threads()));
}

// The arguments and attributes of a weight, which all functions have. More attributes may follow.
template <typename Binding>
auto bind_weight(Binding&& binding) {
  return std::move(binding)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .template Ret<ffi::AnyBuffer>()
      .template Attr<Table>("table")
      .template Attr<Table>("scale_table")
      .template Attr<Numbers>("weight")
      .template Attr<Numbers>("codec")
      .template Attr<ffi::Span<const int8_t>>("vectors");
}

}  // namespace

EQQ_EXPORT XLA_FFI_Error* eqquant_cpu_matmul(XLA_FFI_CallFrame* call_frame) {
  static auto* handler = bind_weight(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>())
                             .Attr<bool>("transpose")
                             .Attr<bool>("coarse")
                             .Attr<bool>("x_transposed")
                             .Attr<bool>("y_transposed")
                             .To(matmul)
                             .release();
  return handler->Call(call_frame);
}

EQQ_EXPORT XLA_FFI_Error* eqquant_cpu_matmul_int8(XLA_FFI_CallFrame* call_frame) {
  static auto* handler = bind_weight(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>())
                             .Attr<bool>("x_transposed")
                             .Attr<bool>("y_transposed")
                             .Attr<bool>("affine")
                             .Attr<bool>("scaled")
                             .To(matmul_int8)
                             .release();
  return handler->Call(call_frame);
}

EQQ_EXPORT XLA_FFI_Error* eqquant_cpu_decode(XLA_FFI_CallFrame* call_frame) {
  static auto* handler = bind_weight(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()).Attr<bool>("clip").To(decode).release();
  return handler->Call(call_frame);
}

// The version of this library, and the one of XLA's interface that it was built with: major * 1000 + minor.
EQQ_EXPORT const char* eqquant_cpu_version(void) { return EQQUANT_CPU_VERSION; }
EQQ_EXPORT int32_t eqquant_cpu_api_version(void) { return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR; }

// The instruction set that products take, or null; then `eqquant_cpu_isa_refusal` says why in a sentence.
EQQ_EXPORT const char* eqquant_cpu_isa(void) {
  const Isa* isa = choose_isa(nullptr);
  return isa == nullptr ? nullptr : isa->name;
}
EQQ_EXPORT const char* eqquant_cpu_isa_refusal(void) {
  const char* why = "";
  choose_isa(&why);
  return why;
}

// The instruction sets of this machine, worst first; null past the last.
EQQ_EXPORT const char* eqquant_cpu_isa_at(int32_t index) {
  const Isa* isa = isa_at(index);
  return isa == nullptr ? nullptr : isa->name;
}
