// The product as XLA calls it, and the functions that Python calls before it registers it with XLA.
#include <string.h>

#include <utility>

#include "core/matmul.h"
#include "ffi/buffers.h"

namespace {

// Indices into the attribute `weight`, which must match `cpu._attributes`.
enum WeightAttr {
  kBits,
  kLength,
  kBlockSize,
  kScaleKind,
  kValues,
  kScaleBits,  // 0 if scales are no codes
  kScaleBlockSize,
  // Whether there are such arguments behind the scales, in this order.
  kRowScale,
  kZeroPoint,
  kScaleCodes,
  kOffset,
  kOffsetCodes,
  kSelected,
  kNumWeightAttrs
};
using Numbers = ffi::Span<const int64_t>;
using Table = ffi::Span<const float>;

// What the bits of a weight mean: its attributes. `codec` is empty, or has the fields of a `Codec` in their order.
struct Meaning {
  Table table, scale_table;
  Numbers weight, codec;
  ffi::Span<const int8_t> vectors;
};

// Fills in how codes that stand for several values are packed. Returns null, or the error.
const char* set_codec(const Meaning& meaning, Codec* out) {
  const Numbers& codec = meaning.codec;
  Codec& c = *out;
  const bool is_trellis = codec[0] == kTrellis;
  for (size_t i = 0; i < codec.size(); ++i)
    if (codec[i] < 0 || codec[i] > (is_trellis && i == 2 ? int64_t{UINT32_MAX} : 256))
      return "a number that describes the codec is out of range";
  c.kind = static_cast<int32_t>(codec[0]);
  if (is_trellis) {
    if (codec.size() != 3) return "another version of eqquant describes the codec";
    c.bits = static_cast<int32_t>(codec[1]);
    c.multipliers = static_cast<uint32_t>(codec[2]);
    return nullptr;
  }
  c.num_parts = static_cast<int32_t>(codec.size() / 4);
  if (codec.size() % 4 != 2 || c.num_parts > kMostParts) return "another version of eqquant describes the codec";
  c.size = static_cast<int32_t>(codec[1]);
  int index_bits = 0;
  for (int i = 0; i < c.num_parts; ++i) {
    int32_t* const fields[] = {&c.parts[i].kind, &c.parts[i].bits, &c.parts[i].low, &c.parts[i].values};
    for (int j = 0; j < 4; ++j) *fields[j] = static_cast<int32_t>(codec[2 + 4 * i + j]);
    if (c.parts[i].kind == kIndex) index_bits += c.parts[i].bits;
  }
  c.vectors = meaning.vectors.begin();
  if (index_bits > kMostIndexBits || meaning.vectors.size() != static_cast<size_t>(c.size) << index_bits)
    return "a grid must have a vector for each index";
  return nullptr;
}

// Fills in the description of the weight, and its codec if it has one. Returns null, or the error. `rest` has `more`
// arguments at its end.
const char* set_weight(ffi::AnyBuffer codes, ffi::AnyBuffer scale, ffi::RemainingArgs rest, size_t more,
                       const Meaning& meaning, Codec* codec, Problem* out) {
  const auto& [table, scale_table, weight, numbers, vectors] = meaning;
  Problem& p = *out;
  if (weight.size() != kNumWeightAttrs) return "another version of eqquant describes the weight";
  for (int64_t number : weight)
    if (number < 0 || number >= int64_t{1} << 40) return "a number that describes the weight is out of range";
  p.bits = static_cast<int32_t>(weight[kBits]);
  p.scale_bits = static_cast<int32_t>(weight[kScaleBits]);
  p.scale_kind = static_cast<int32_t>(weight[kScaleKind]);
  p.values = static_cast<int32_t>(weight[kValues]);
  p.k = weight[kLength];
  p.block_size = weight[kBlockSize];
  p.scale_block_size = weight[kScaleBlockSize];
  const bool coded = p.scale_bits > 0;
  if (p.bits < 1 || p.bits > 8 || p.scale_bits > 8) return "codes must have 1 to 8 bits";
  if (table.size() != size_t{1} << p.bits || scale_table.size() != (coded ? size_t{1} << p.scale_bits : 0))
    return "a table must have a value for each code";
  if (p.scale_kind > kScaleUE4M4) return "the kind of scales is not known";
  size_t given = 0;
  for (int i = kRowScale; i < kNumWeightAttrs; ++i) given += weight[i] != 0;
  if (rest.size() != given + more) return "arguments and flags differ in number";
  const ffi::DataType scale_type = p.scale_kind == kScaleFloat32  ? ffi::DataType::U32
                                 : p.scale_kind <= kScaleBFloat16 ? ffi::DataType::U16
                                                                  : ffi::DataType::U8;
  if (codes.element_type() != ffi::DataType::U8) return "codes must be uint8";
  if (scale.element_type() != scale_type) return "scales must be unsigned integers of the width of their kind";
  Matrix cs, ss;
  if (!as_matrix(codes, &cs) || !as_matrix(scale, &ss)) return "arrays must have at least two dimensions";
  if (ss.batch != cs.batch) return "batches differ";
  if (ss.rows != cs.rows) return "codes and scales differ in their rows";
  p.batch = p.stack = cs.batch;
  p.n = cs.rows;
  p.words = cs.columns;
  if (p.block_size < 1 || p.scale_block_size < 0) return "blocks must have at least one code";
  p.blocks = coded ? (p.k + p.block_size - 1) / p.block_size : ss.columns;
  p.scale_blocks = ss.columns;
  if (coded && p.blocks < 1) p.blocks = 1;

  size_t at = 0;
  bool fits = true;
  // The next argument, if it is given, with its numbers per row.
  const auto next = [&](WeightAttr which, ffi::DataType type, int64_t columns) -> const void* {
    if (weight[which] == 0) return nullptr;
    auto found = rest.get<ffi::AnyBuffer>(at++);
    Matrix a;
    fits = fits && found.has_value() && found->element_type() == type && as_matrix(*found, &a) && a.batch == p.stack &&
           a.rows == p.n && a.columns == columns;
    return fits ? found->untyped_data() : nullptr;
  };
  p.row_scale = static_cast<const float*>(next(kRowScale, ffi::DataType::F32, 1));
  if (!fits) return "the scales of rows must be float32, one for each";
  p.zero_words = packed_bytes(p.blocks, p.bits);
  p.zero_point = static_cast<const uint8_t*>(next(kZeroPoint, ffi::DataType::U8, p.zero_words));
  if (!fits) return "zero points must be uint8, one for each scale, packed as codes are";
  p.scale_words = coded ? packed_bytes(p.blocks, p.scale_bits) : 0;
  p.scale_codes = static_cast<const uint8_t*>(next(kScaleCodes, ffi::DataType::U8, p.scale_words));
  p.offset = next(kOffset, scale_type, ss.columns);
  p.offset_codes = static_cast<const uint8_t*>(next(kOffsetCodes, ffi::DataType::U8, p.scale_words));
  if (!fits || coded != (weight[kScaleCodes] != 0))
    return "codes of scales must be uint8, and offsets be stored as scales are";
  if (weight[kSelected] != 0) {
    auto found = rest.get<ffi::AnyBuffer>(at);
    if (!found.has_value() || found->element_type() != ffi::DataType::S32) return "the selected indices must be int32";
    p.batch = static_cast<int64_t>(found->element_count());
    p.selected = static_cast<const int32_t*>(found->untyped_data());
  }
  if (meaning.codec.size() > 0) {
    if (const char* wrong = set_codec(meaning, codec)) return wrong;
    p.codec = codec;
  }
  p.codes = static_cast<const uint8_t*>(codes.untyped_data());
  p.scale = scale.untyped_data();
  p.table = table.begin();
  p.scale_table = coded ? scale_table.begin() : nullptr;
  return nullptr;
}

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
  if (const char* wrong = set_weight(codes, scale, rest, 0, meaning, &codec, &p)) return bad(wrong);
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
  if (const char* wrong = set_weight(codes, scale, rest, more, meaning, &codec, &p)) return bad(wrong);
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
  if (const char* wrong = set_weight(codes, scale, rest, 0, meaning, &codec, &p)) return bad(wrong);
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
