// Attention to a cache as XLA calls it.
#include "attention/run.h"
#include "ffi/buffers.h"
#include "ffi/weight.h"

namespace {

// Keys or values: arrays, floats or those of a weight, and what these mean.
struct Stored {
  Meaning meaning;
  Codec codec;
  bool is_packed() const { return meaning.weight.size() > 0; }
  size_t num_arrays() const { return is_packed() ? 2 + further_arrays(meaning.weight) : 1; }
};

// Fills in keys or values, whose arrays begin with argument `first`. Returns null, or the error.
const char* set_rows(ffi::RemainingArgs rest, size_t first, const AttentionProblem& p, Stored* stored, CacheRows* out) {
  auto codes = rest.get<ffi::AnyBuffer>(first), scale = rest.get<ffi::AnyBuffer>(first + 1);
  if (!codes.has_value() || (stored->is_packed() && !scale.has_value())) return "arguments and flags differ in number";
  if (!stored->is_packed()) {
    Matrix rows;
    if (!float_type(codes->element_type(), &out->type)) return "floats of a cache must have 32 or 16 bits";
    if (!as_matrix(*codes, &rows) || rows.batch != p.batch * p.heads || rows.rows != p.places || rows.columns != p.size)
      return "keys and values must have the shape of the cache";
    out->floats = codes->untyped_data();
    return nullptr;
  }
  Problem& packed = out->packed;
  const Arguments more = {rest, first + 2, stored->num_arrays() - 2};
  if (const char* wrong = set_weight(*codes, *scale, more, stored->meaning, &stored->codec, &packed)) return wrong;
  if (packed.selected != nullptr || packed.batch != p.batch * p.heads || packed.n != p.places)
    return "keys and values must have the shape of the cache";
  packed.n *= packed.batch;
  packed.batch = packed.stack = 1;
  return nullptr;
}

bool is_int32(ffi::AnyBuffer numbers, int64_t count) {
  return numbers.element_type() == ffi::DataType::S32 && static_cast<int64_t>(numbers.element_count()) == count;
}

// Arguments: queries, the positions of tokens, lengths, windows; then the arrays of the keys, and those of the values.
// `key_weight` is as `weight` of a product, or empty for floats.
ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer queries, ffi::AnyBuffer positions, ffi::AnyBuffer length,
                     ffi::AnyBuffer window, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> y, Table key_table,
                     Table key_scale_table, Numbers key_weight, Numbers key_codec, ffi::Span<const int8_t> key_vectors,
                     Table value_table, Table value_scale_table, Numbers value_weight, Numbers value_codec,
                     ffi::Span<const int8_t> value_vectors, float scale, float cap) {
  const char* why = nullptr;
  const Isa* isa = choose_isa(&why);
  if (isa == nullptr) return bad(why);
  AttentionProblem p = {};
  const auto dims = queries.dimensions();
  if (dims.size() < 3 || positions.dimensions().size() < 1) return bad("queries must have at least three dimensions");
  if (!float_type(queries.element_type(), &p.type) || y->element_type() != queries.element_type())
    return bad("queries and results must be float32, bfloat16 or float16");
  if (y->element_count() != queries.element_count()) return bad("the result has a wrong shape");
  p.batch = 1;
  for (size_t i = 0; i + 3 < dims.size(); ++i) p.batch *= dims[i];
  p.heads = dims[dims.size() - 3];
  p.rows = dims[dims.size() - 2];
  p.size = dims[dims.size() - 1];
  p.tokens = positions.dimensions().back();
  p.scale = scale;
  p.cap = cap;
  if (!is_int32(positions, p.batch * p.tokens) || !is_int32(length, p.batch) || !is_int32(window, p.batch))
    return bad("positions, lengths and windows must be int32");
  Stored keys = {{key_table, key_scale_table, key_weight, key_codec, key_vectors}, {}};
  Stored values = {{value_table, value_scale_table, value_weight, value_codec, value_vectors}, {}};
  if (keys.num_arrays() + values.num_arrays() != rest.size()) return bad("arguments and flags differ in number");
  auto first = rest.get<ffi::AnyBuffer>(0);
  Matrix rows;
  if (!first.has_value() || !as_matrix(*first, &rows)) return bad("arrays must have at least two dimensions");
  p.places = rows.rows;
  if (const char* wrong = set_rows(rest, 0, p, &keys, &p.keys)) return bad(wrong);
  if (const char* wrong = set_rows(rest, keys.num_arrays(), p, &values, &p.values)) return bad(wrong);
  p.queries = queries.untyped_data();
  p.y = y->untyped_data();
  p.positions = static_cast<const int32_t*>(positions.untyped_data());
  p.length = static_cast<const int32_t*>(length.untyped_data());
  p.window = static_cast<const int32_t*>(window.untyped_data());
  char text[200];
  if (const char* wrong = check_attention(p, text, sizeof text)) return bad(wrong);
  return done(run_attention(*isa, p, pool, pool.num_threads()));
}

}  // namespace

EQQ_EXPORT XLA_FFI_Error* eqquant_cpu_attention(XLA_FFI_CallFrame* call_frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::ThreadPool>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::AnyBuffer>()
                             .Arg<ffi::AnyBuffer>()
                             .RemainingArgs()
                             .Ret<ffi::AnyBuffer>()
                             .Attr<Table>("key_table")
                             .Attr<Table>("key_scale_table")
                             .Attr<Numbers>("key_weight")
                             .Attr<Numbers>("key_codec")
                             .Attr<ffi::Span<const int8_t>>("key_vectors")
                             .Attr<Table>("value_table")
                             .Attr<Table>("value_scale_table")
                             .Attr<Numbers>("value_weight")
                             .Attr<Numbers>("value_codec")
                             .Attr<ffi::Span<const int8_t>>("value_vectors")
                             .Attr<float>("scale")
                             .Attr<float>("cap")
                             .To(attention)
                             .release();
  return handler->Call(call_frame);
}
