// The vocabulary of vector operations: `Simd`, a struct in the namespace of each instruction set. Algorithms are
// templates over it, named `V` there.
//
// Each set is compiled with flags of its own. So all that templates yield is in anonymous namespaces, and no template
// or inline function of `std::` is used: the linker could otherwise let every machine run
// the copy for AVX-512.
//
// Floats: `F`, a vector of `L`
//   load(p), store(p, a), broadcast(a), zero(), add, sub, mul, fma(a, b, c) = a * b + c, sum(a), prefetch(p)
//   gather(p, indices)    p[indices[lane]]
//   masked(a, m)          a where the integer m[lane] is not 0, else 0
//   lanes(h, n)           which of n = 2 or 4 scales of a plane each lane takes; spread(p, lanes) takes them
//   transpose(a)          a[0] to a[L - 1], L x L floats; where L is more than 4
//   sum_rows(a, out)      the sums of a[0] to a[kDotRows - 1], if `kSumsRows`
//   integers, e4m3, e5m2, ue4m4, e8m0, bytes256(p, table)    L floats from L bytes
//   bytes16(p, table)     as `bytes256`, of bytes below 16
//   bf16(p), f16(p)       L floats from 2 L bytes;  one_bf16, one_f16, one_to_bf16, one_to_f16   single ones
//
// Integers: `I`, a vector of L of 32 bits
//   load_int(p), store(p, a), broadcast_int(a), zero_int(), add, mul, sum(a), to_float(a)
//   dot(acc, w, x)        acc + the products of the `kGroup` codes of each lane, exactly: two of 16 bits, or
//                         four bytes; codes of w are unsigned, at most `kMostCode`, less `kBias`
//   add_products(sums, w, x)    adds the products of each pair of codes to sums of 16 bits, if `kSumsIn16Bits`; then
//                         add_sums(acc, sums) adds each pair of these to a sum of 32 bits
//   most_additions(largest)     how many of the former may come before the latter, for codes up to `largest`, which is
//                         at most `kMostCode`
//   spread_int(p, lanes)  as `spread`;  load_int(p, n)   the first n bytes, and zeros; where a vector has over 16 codes
//   byte_codes<bits>(a, plane), byte_table(p), lookup_bytes(table, codes)     of bytes, if `kInRegisters`
//
// Packed codes
//   codes(p)              `Codes`: L integers of 32 bits from 4 L bytes;  shift<n>(c), shift(c, n)   to the right
//   table(p)              `Table`: sixteen floats;  lookup(t, c) reads the low four bits of each lane
//   scale(t, s), offset(t, z)    a table times s, and less z
//   decode64<bytes>(p, planes, f)    if `kTablesOfBytes`: f[0] to f[64 / L - 1] from 64 bytes, by the upper 2 or all 4
//                         bytes of a table of 256 floats, of which `planes` holds one after the other
//   accepts(problem)      whether a weight is of the kinds that the set has products of floats for, or null for all;
//                         `kOtherMatmul` and `kOtherDecode` take the rest
//
// Choices for its registers and its speed
//   kTileRows, kTileRows1, kWideRows  rows of a tile of results of two vectors, of one, and of four
//   kDotRows              rows of the weight that a product with one row of `x` takes at a time
//   kFewTile, kFewGroup   with a few rows of `x`: the same, and how many of `x` at a time
//   kFewRows              up to how many rows these are
//   kFusesFew             whether there are registers to decode while few rows of `x` are multiplied;
//                         then `kFusedGroup` of more than `kFewGroup` at a time, and `kFusedRows` instead of `kFewRows`
//   kDirectRows, kMixedRows  up to how many rows of `x` codes are decoded in registers (`dots.h`); likewise transposed
//   kScalesTables         whether scaling a table of sixteen is faster than scaling the values of sixteen codes
//   kLooksUpBytes         whether a table of 256 is faster than converting integers and floats of eight bits
//   kInt8TileRows, kInt8DotRows, kInt8FewRows    of products of integers: as above
//   kInRegisters          whether one row of `x` meets codes of integers that are decoded in registers, in vectors
//                         of 64 bytes; then `kRegisterRows` rows of the weight at a time
//   kPacks                whether `x` is quantized and packed by vectors (`int8/pack_avx512.h`)
#pragma once

#include <stdint.h>
#include <string.h>

#include "core/ints.h"
#include "core/isa.h"

namespace {

// Operations that all instruction sets share, and operations of few.
struct SimdBase {
  static constexpr bool kTablesOfBytes = false, kSumsRows = false, kFusesFew = false, kLooksUpBytes = false;
  static constexpr bool kInRegisters = false, kPacks = false, kSumsIn16Bits = false;
  static constexpr bool (*accepts)(const Problem*) = nullptr;
  static constexpr const MatmulKernel *kOtherMatmul = nullptr, *kOtherDecode = nullptr;
  static constexpr int kBias = 0, kMostCode = 255;
  static constexpr int kFusedGroup = 1, kFusedRows = 1, kDirectRows = 2, kMixedRows = 1;

  EQQ_INLINE float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
  }
  EQQ_INLINE uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
  }
  EQQ_INLINE float one_bf16(uint16_t bits) { return from_bits(static_cast<uint32_t>(bits) << 16); }
  EQQ_INLINE uint16_t one_to_bf16(float value) {
    const uint32_t bits = to_bits(value);
    if (value != value) return static_cast<uint16_t>(bits >> 16 | 64);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

// The vocabularies of products of integers. `SmallInRegisters` and `LargeInRegisters` decode the codes of one row of x
// in registers, in vectors of 64 bytes, if they are `kInRegisters`; `SmallUnpacked` takes codes that were unpacked to
// memory. Small codes are up to the `kMostCode` of their vocabulary; `V` multiplies all unpacked codes.
template <class V>
struct IntegerProducts {
  using SmallInRegisters = V;
  using LargeInRegisters = V;
  using SmallUnpacked = V;
};

}  // namespace
