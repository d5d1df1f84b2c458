// Quantizing as XLA calls it: codes of values, trellis codes, and the reductions that scales are chosen from.
#include "encode/encode.h"
#include "core/matmul.h"
#include "ffi/buffers.h"

namespace {

// Rows that one thread takes at a time: some 64 thousand values.
int64_t rows_at_a_time(int64_t k) { return k < 65536 ? 65536 / (k < 1 ? 1 : k) : 1; }

template <typename Work>
void by_rows(ffi::ThreadPool& pool, int64_t n, int64_t k, const Work& work) {
  const int64_t step = rows_at_a_time(k), units = (n + step - 1) / step;
  run_units(pool, units, pool.num_threads(), [&](int64_t unit, int64_t) {
    const int64_t first = unit * step;
    work(first, first + step < n ? first + step : n);
  });
}

// Arguments: x, divisor, and then factor, offset and shift if there are any; all with one value for each block but x.
ffi::Error encode(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer divisor, ffi::RemainingArgs rest,
                  ffi::Result<ffi::AnyBuffer> y, int32_t bits, int64_t block_size, bool factor, bool offset, bool shift,
                  int32_t rule, float bias, int32_t nan, ffi::Span<const int32_t> steps,
                  ffi::Span<const int32_t> codes) {
  const char* why = nullptr;
  const Isa* isa = choose_isa(&why);
  if (isa == nullptr) return bad(why);
  EncodeProblem p = {};
  Matrix xs, ds, ys;
  if (!as_matrix(x, &xs) || !as_matrix(divisor, &ds) || !as_matrix(*y, &ys))
    return bad("arrays must have at least two dimensions");
  if (!float_type(x.element_type(), &p.x_type)) return bad("x must be float32, bfloat16 or float16");
  if (divisor.element_type() != ffi::DataType::F32 || y->element_type() != ffi::DataType::U8)
    return bad("scales must be float32, and codes uint8");
  p.n = xs.batch * xs.rows;
  p.k = xs.columns;
  p.blocks = ds.columns;
  if (ds.batch * ds.rows != p.n || ys.batch * ys.rows != p.n) return bad("arrays differ in their rows");
  if (rest.size() != size_t{factor} + size_t{offset} + size_t{shift})
    return bad("arguments and flags differ in number");
  const float** const wanted[] = {&p.factor, &p.offset, &p.shift};
  const bool given[] = {factor, offset, shift};
  for (size_t i = 0, at = 0; i < 3; ++i) {
    if (!given[i]) continue;
    auto found = rest.get<ffi::AnyBuffer>(at++);
    if (!found.has_value() || found->element_type() != ffi::DataType::F32 ||
        found->element_count() != divisor.element_count())
      return bad("what belongs to blocks must be float32, one value for each");
    *wanted[i] = static_cast<const float*>(found->untyped_data());
  }
  if (codes.size() != steps.size() + 1) return bad("there must be one code more than steps");
  p.x = x.untyped_data();
  p.divisor = static_cast<const float*>(divisor.untyped_data());
  p.y = static_cast<uint8_t*>(y->untyped_data());
  p.words = ys.columns;
  p.block_size = block_size;
  p.bits = bits;
  p.rule = rule;
  p.nan = nan;
  p.bias = bias;
  p.steps = steps.begin();
  p.codes = codes.begin();
  p.num_steps = static_cast<int64_t>(steps.size());
  char text[200];
  if (const char* wrong = check_encode(p, text, sizeof text)) return bad(wrong);
  const EncodeKernel& kernel = encode_kernel(*isa);
  by_rows(pool, p.n, p.k, [&](int64_t first, int64_t last) { kernel.encode(&p, first, last); });
  return ffi::Error::Success();
}

// Arguments: values, weights of their errors, and feedback if there is any.
ffi::Error encode_trellis(ffi::ThreadPool pool, ffi::AnyBuffer values, ffi::AnyBuffer weights, ffi::RemainingArgs rest,
                          ffi::Result<ffi::AnyBuffer> y, int32_t bits, int64_t multipliers) {
  const char* why = nullptr;
  const Isa* isa = choose_isa(&why);
  if (isa == nullptr) return bad(why);
  Matrix xs, ws, ys;
  if (!as_matrix(values, &xs) || !as_matrix(weights, &ws) || !as_matrix(*y, &ys))
    return bad("arrays must have at least two dimensions");
  const auto f32 = ffi::DataType::F32;
  if (values.element_type() != f32 || weights.element_type() != f32 || y->element_type() != ffi::DataType::U8)
    return bad("values and weights must be float32, and codes uint8");
  TrellisProblem p = {};
  p.n = xs.batch * xs.rows;
  p.rows = xs.rows;
  p.k = xs.columns;
  p.words = ys.columns;
  if (weights.element_count() != values.element_count() || ws.columns != p.k || ys.batch * ys.rows != p.n)
    return bad("arrays differ in their rows");
  if (rest.size() > 1) return bad("there are too many arguments");
  if (rest.size() == 1) {
    auto found = rest.get<ffi::AnyBuffer>(0);
    Matrix fs;
    if (!found.has_value() || found->element_type() != f32 || !as_matrix(*found, &fs) || fs.batch != xs.batch ||
        fs.rows != p.k || fs.columns != p.k)
      return bad("feedback must be float32, a square for each matrix of values");
    p.feedback = static_cast<const float*>(found->untyped_data());
  }
  p.values = static_cast<const float*>(values.untyped_data());
  p.weights = static_cast<const float*>(weights.untyped_data());
  p.y = static_cast<uint8_t*>(y->untyped_data());
  p.bits = bits;
  p.multipliers = static_cast<uint32_t>(multipliers);
  char text[200];
  if (const char* wrong = check_trellis(p, text, sizeof text)) return bad(wrong);
  const int64_t size = (trellis_bytes(p) + 63) / 64 * 64, workers = p.n < pool.num_threads() ? p.n : pool.num_threads();
  char* memory = static_cast<char*>(allocate_aligned(workers * size));
  if (memory == nullptr) return done(false);
  const EncodeKernel& kernel = encode_kernel(*isa);
  run_units(pool, p.n, workers, [&](int64_t row, int64_t worker) {
    kernel.trellis(&p, row, row + 1, reinterpret_cast<TrellisMemory*>(memory + worker * size));
  });
  free_aligned(memory);
  return ffi::Error::Success();
}

// One value of each row.
ffi::Error reduce(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y, int32_t kind) {
  const char* why = nullptr;
  const Isa* isa = choose_isa(&why);
  if (isa == nullptr) return bad(why);
  Matrix xs;
  if (!as_matrix(x, &xs)) return bad("arrays must have at least two dimensions");
  const int64_t n = xs.batch * xs.rows;
  if (x.element_type() != ffi::DataType::F32 || y->element_type() != ffi::DataType::F32)
    return bad("values must be float32");
  if (static_cast<int64_t>(y->element_count()) != n) return bad("the result must have one value for each row");
  if (kind < kLargest || kind > kHigh) return bad("the kind of reduction is not known");
  const ReduceProblem p = {static_cast<const float*>(x.untyped_data()), static_cast<float*>(y->untyped_data()), n,
                           xs.columns, kind};
  const EncodeKernel& kernel = encode_kernel(*isa);
  by_rows(pool, n, p.k, [&](int64_t first, int64_t last) { kernel.reduce(&p, first, last); });
  return ffi::Error::Success();
}

}  // namespace

EQQ_EXPORT XLA_FFI_Error* eqquant_cpu_encode(XLA_FFI_CallFrame* call_frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::AnyBuffer>()
                             .RemainingArgs()
                             .Ret<ffi::AnyBuffer>()
                             .Attr<int32_t>("bits")
                             .Attr<int64_t>("block_size")
                             .Attr<bool>("factor")
                             .Attr<bool>("offset")
                             .Attr<bool>("shift")
                             .Attr<int32_t>("rule")
                             .Attr<float>("bias")
                             .Attr<int32_t>("nan")
                             .Attr<ffi::Span<const int32_t>>("steps")
                             .Attr<ffi::Span<const int32_t>>("codes")
                             .To(encode)
                             .release();
  return handler->Call(call_frame);
}

EQQ_EXPORT XLA_FFI_Error* eqquant_cpu_encode_trellis(XLA_FFI_CallFrame* call_frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::AnyBuffer>()
                             .RemainingArgs()
                             .Ret<ffi::AnyBuffer>()
                             .Attr<int32_t>("bits")
                             .Attr<int64_t>("multipliers")
                             .To(encode_trellis)
                             .release();
  return handler->Call(call_frame);
}

EQQ_EXPORT XLA_FFI_Error* eqquant_cpu_reduce(XLA_FFI_CallFrame* call_frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<ffi::AnyBuffer>()
                             .Ret<ffi::AnyBuffer>()
                             .Attr<int32_t>("kind")
                             .To(reduce)
                             .release();
  return handler->Call(call_frame);
}
