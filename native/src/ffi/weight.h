// A weight as XLA passes it: arrays, and attributes that say what they mean.
#pragma once

#include "core/problem.h"
#include "ffi/buffers.h"

namespace {

// Indices into the attribute `weight`, which must match `_attributes` of `eqquant/_native/calls.py`.
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
inline const char* set_codec(const Meaning& meaning, Codec* out) {
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

// Arguments that follow each other.
struct Arguments {
  ffi::RemainingArgs all;
  size_t first, count;
  auto get(size_t index) const { return all.get<ffi::AnyBuffer>(first + index); }
};

// How many arrays a weight has behind its codes and scales.
inline size_t further_arrays(const Numbers& weight) {
  size_t given = 0;
  for (size_t i = kRowScale; i < weight.size(); ++i) given += weight[i] != 0;
  return given;
}

// Fills in the description of the weight, and its codec if it has one. Returns null, or the error. `rest` are its
// arrays behind codes and scales.
inline const char* set_weight(ffi::AnyBuffer codes, ffi::AnyBuffer scale, Arguments rest, const Meaning& meaning,
                              Codec* codec, Problem* out) {
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
  if (rest.count != further_arrays(weight)) return "arguments and flags differ in number";
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
    auto found = rest.get(at++);
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
    auto found = rest.get(at);
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

}  // namespace
