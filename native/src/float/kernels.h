// The product, once for all vector instruction sets: templates over `V`, a struct of a few vector operations.
//
// Each `isa_*.cpp` includes this file and is compiled with flags of its own. So everything here is in an anonymous
// namespace, and no template or inline function of `std::` is used: the linker could otherwise take the copy compiled
// for AVX-512 for what every machine runs.
//
// `V` has
//   L                       lanes of a vector of floats `F`; `I` is one of 32-bit integers
//   kTileRows, kTileRows1   rows of a tile of results of two vectors, and of one; `kWideRows` of four
//   kDotRows                rows of the weight that a product with one row of `x` takes at a time
//   kFewTile, kFewGroup     with a few rows of `x`: the same, and how many of `x` at a time
//   kFewRows                up to how many rows these are
//   kFusesFew               whether there are registers to decode while few rows of `x` are multiplied; then
//   `kFusedGroup`
//                           of more than `kFewGroup` at a time, and `kFusedRows` instead of `kFewRows`
//   kDirectRows, kMixedRows  up to how many rows of `x` codes are decoded in registers (`direct.h`); the second
//   transposed load, store, broadcast, zero, add, sub, mul, fma(a, b, c) = a * b + c, sum bytes(p)                L
//   32-bit integers from 4 L bytes, and shift<n>(i) to the right Table, table(p)         sixteen floats; lookup(t, i)
//   reads the low four bits of each lane; scale(t, s), offset(t, z) lanes(h, n)             which of n = 2 or 4 scales
//   of a plane each lane takes; spread(p, lanes) takes them gather(p, indices)      p[indices[lane]];  masked(f, m): f
//   where the integer m[lane] is not 0, else 0 kScalesTables           whether scaling a table of sixteen is faster
//   than scaling what sixteen codes stand for kLooksUpBytes           whether a table of 256 is faster than converting
//   integers and floats of eight bits integers, e4m3, e5m2, ue4m4, e8m0, bytes256(p, table)        L floats from L
//   bytes bf16, f16               L floats from 2 L bytes;  to_bf16, to_f16 the reverse kTablesOfBytes          whether
//   there is decode64<bytes>(p, planes, f): f[0] to f[64 / L - 1] from 64 bytes, by the
//                           upper 2 or all 4 bytes of a table of 256 floats, of which `planes` holds one after the
//                           other
//   kSumsRows               whether there is sum_rows(a, out): the sums of a[0] to a[kDotRows - 1]
//   prefetch(p)
//   transpose(a)            a[0] to a[L - 1], L x L floats; where L is more than 4
//
// A row of the weight is taken a segment (64 bytes) at a time. The codes of a segment are decoded in the order in which
// shifts yield them, not in the logical one: with fewer than 8 bits vector `(h, plane, c)` holds, in lane `j`, the code
// of byte `4 L h + 4 j + c` in that plane. `x` is permuted to that order once per call instead. A last, shorter segment
// is padded with zero bytes; the padding decodes to zero and meets zeros of `x`. With several rows of `x` its codes are
// brought to their logical order, without the padding.
#ifndef EQQUANT_KERNELS_H_
#define EQQUANT_KERNELS_H_

#include <stdint.h>
#include <string.h>

#include "core/ints.h"
#include "core/isa.h"

namespace {

constexpr int64_t kSegment = 64;       // bytes
constexpr int64_t kChunk = 512;        // codes of a row, decoded at a time by tiles
constexpr int64_t kChunkStride = 528;  // floats from one decoded row to the next: a power of two would share sets of L1
constexpr int64_t kRowChunk = 64;      // rows of the weight, decoded at a time by transposed products
constexpr int64_t kRowChunkStride = 80;
constexpr int64_t kScaleChunk = 4096;   // codes of a row, whose scales are decoded at a time: a multiple of `kChunk`
constexpr int64_t kAheadOfDots = 8192;  // bytes of the weight: memory takes as long as groups of short rows
constexpr int64_t kFewBlock = 16;       // rows of the weight for which a piece of few rows of `x` stays in L1
constexpr int64_t kFewFloats = 8192;    // of that piece
constexpr int64_t kMostDots = 64;       // rows of the weight in a unit of one row of `x`
constexpr int64_t kShortRow = 2;        // segments of a row of which what happens once for each row takes longest
constexpr int64_t kMostRows = 48;       // of the weight in a unit of many rows of `x`: what is decoded stays in L2
constexpr int64_t kRowBlock = 256;      // rows of `x` for which a decoded tile is used

// Which codes of a segment share a scale.
enum Mode {
  kOneScale,  // all of a row
  kUniform,   // those of a vector: blocks of multiples of 64, or of 16 where codes have 8 bits
  kBy32,      // of a plane, runs of 32 and of 16; with 8 bits likewise
  kBy16,
  kAnyBlock  // found by an index for each code
};

// How many scales a plane has.
constexpr int per_plane(Mode mode) { return mode == kBy16 ? 4 : mode == kBy32 ? 2 : 1; }

enum Method { kDot = 0, kFew = 1, kPanels = 2, kTransposed = 3, kMix = 4 };

EQQ_INLINE int64_t aligned(int64_t bytes) { return round_up(bytes, 64); }

// Conversions of single values, a base of every `V`.
struct Bfloat16 {
  static constexpr bool kTablesOfBytes = false, kSumsRows = false, kFusesFew = false;
  static constexpr int kFusedGroup = 1, kFusedRows = 1, kDirectRows = 2, kMixedRows = 1;
  EQQ_INLINE float one_bf16(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
  EQQ_INLINE uint16_t one_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return static_cast<uint16_t>(bits >> 16 | 64);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

// What follows from a problem alone.
struct Shape {
  int64_t planes, codes;    // of a segment: codes that share a byte, and all of them
  int64_t segments, whole;  // of a row, and those that are not cut short
  int64_t tail_bytes;       // of the last segment if it is cut short
  int64_t tail;             // floats of the last segment if it is cut short, once it is decoded
  int64_t padded;           // floats of a row: those of whole segments and of the last
  Mode mode;                // of whole segments
  int64_t grain;            // codes for which there is one scale, once they are expanded: 64, 32 or 16
};

// `direct`: up to how many rows of `x` codes are taken in the order of decoding to their end.
EQQ_INLINE Shape shape_of(const Problem& p, int64_t direct) {
  Shape s;
  s.planes = 8 / p.bits;
  s.codes = kSegment * s.planes;
  s.whole = p.k / s.codes;
  s.tail_bytes = packed_bytes(p.k, p.bits) - s.whole * kSegment;
  s.segments = s.whole + (s.tail_bytes > 0);
  s.grain = 64;
  if (p.blocks <= 1) {
    s.mode = kOneScale;
  } else if (p.block_size % 64 == 0) {
    s.mode = kUniform;
  } else if (p.block_size == 32 || (p.bits == 8 && p.block_size % 32 == 0)) {
    s.mode = kBy32;
    s.grain = 32;
  } else if (p.block_size == 16 || (p.bits == 8 && p.block_size % 16 == 0)) {
    s.mode = kBy16;
    s.grain = 16;
  } else {
    s.mode = kAnyBlock;
  }
  // With more rows, multiplying padding would cost more than bringing the codes of the tail to their order.
  const bool in_order = !p.transpose && p.m > (s.mode == kAnyBlock ? 1 : direct);
  s.tail = in_order ? min64(div_up(p.k - s.whole * s.codes, 16) * 16, s.codes) : s.codes;
  s.padded = s.whole * s.codes + (s.segments - s.whole) * s.tail;
  return s;
}

// The same table in every row, and where each code of a segment is. Packed `x` lies behind it in shared memory.
struct Shared {
  float table[256];
  uint8_t planes[4][256];  // the bytes of its floats, the low ones first, where `V` looks up those
  // Of whole segments in `kAnyBlock`, and then of the last one: the block of each code in the order of decoding, less
  // the first of the segment; and whether it is a code, not padding.
  int32_t* index;
  int32_t* mask;
  int32_t* place;  // of each code of the last segment, in the order of decoding
  float* x;
};

template <class V>
struct Direct;

template <class V>
struct Kernels {
  using F = typename V::F;
  using I = typename V::I;
  using Table = typename V::Table;
  static constexpr int L = V::L;
  static constexpr int kHalves = 16 / L;  // vectors of bytes in a segment

  // Whether scales and zero points of a plane are applied to what was looked up, not to the table.
  static constexpr bool after_lookup(Mode mode) {
    return per_plane(mode) > 1 || (mode == kUniform && !V::kScalesTables);
  }

  static Shape shape_of(const Problem& p) { return ::shape_of(p, V::kDirectRows); }

  //
  // Order
  //

  // The byte of a segment, and its plane, that position `i` of the order of decoding holds.
  EQQ_INLINE void position(int bits, int64_t i, int64_t* byte, int64_t* plane) {
    if (bits == 8) {
      *byte = i;
      *plane = 0;
      return;
    }
    const int64_t planes = 8 / bits, lane = i % L, vector = i / L;
    const int64_t c = vector % 4, h = vector / (4 * planes);
    *plane = vector / 4 % planes;
    *byte = 4 * L * h + 4 * lane + c;
  }

  // The logical position of a code of segment `segment`, or -1 if it is padding.
  EQQ_INLINE int64_t logical(const Problem& p, const Shape& s, int64_t segment, int64_t i) {
    int64_t byte, plane;
    position(p.bits, i, &byte, &plane);
    const int64_t base = segment * s.codes;
    if (segment < s.whole) return base + plane * kSegment + byte;
    if (byte >= s.tail_bytes) return -1;
    const int64_t k = base + plane * s.tail_bytes + byte;
    return k < p.k ? k : -1;
  }

  //
  // Memory
  //

  static int64_t indices(const Shape& s) { return s.mode == kAnyBlock ? s.segments : 1; }

  static int64_t shared_header(const Shape& s) { return aligned(2048 + 4 * (2 * indices(s) + 1) * s.codes); }

  static Shared open_shared(const Shape& s, const void* memory) {
    Shared r;
    char* bytes = static_cast<char*>(const_cast<void*>(memory));
    r.index = reinterpret_cast<int32_t*>(bytes + 2048);
    r.mask = r.index + indices(s) * s.codes;
    r.place = r.mask + indices(s) * s.codes;
    r.x = reinterpret_cast<float*>(bytes + shared_header(s));
    return r;
  }

  EQQ_INLINE const float* table256(const void* shared) { return static_cast<const float*>(shared); }

  //
  // Scales
  //

  // The scales of blocks `first` to `last` of a row.
  static void decode_scales(const Problem& p, int64_t row, int64_t first, int64_t last, float* out) {
    const int64_t count = last - first, at = row * p.blocks + first;
    const F factor = V::broadcast(p.row_scale ? p.row_scale[row] : 1.0f);
    const int64_t size = scale_bytes(p.scale_kind);
    const uint8_t* bits = static_cast<const uint8_t*>(p.scale) + at * size;
    int64_t i = 0;
    for (; i + L <= count; i += L) V::store(out + i, V::mul(some_scales(p.scale_kind, bits + i * size), factor));
    if (i < count) {
      uint8_t rest[4 * L] = {0};
      float values[L];
      memcpy(rest, bits + i * size, (count - i) * size);
      V::store(values, V::mul(some_scales(p.scale_kind, rest), factor));
      memcpy(out + i, values, (count - i) * 4);
    }
  }

  EQQ_INLINE F some_scales(int kind, const uint8_t* bits) {
    switch (kind) {
      case kScaleFloat16: return V::f16(bits);
      case kScaleBFloat16: return V::bf16(bits);
      case kScaleE8M0: return V::e8m0(bits);
      case kScaleE4M3: return V::e4m3(bits);
      case kScaleE5M2: return V::e5m2(bits);
      case kScaleUE4M4: return V::ue4m4(bits);
      default: return V::load_bytes(bits);
    }
  }

  // Repeats each of `count` values, of blocks of `ratio` grains, from grain `skip` of the first on, to `grains` values.
  static void expand(const float* blocks, int64_t ratio, int64_t skip, int64_t grains, float* out) {
    for (int64_t g = 0; g < grains; ++blocks) {
      const int64_t end = min64(g + ratio - skip, grains);
      for (; g < end; ++g) out[g] = *blocks;
      skip = 0;
    }
  }

  // The scales and zero points of segments `first` to `last` of a row, as their mode wants them, in `scratch`.
  struct RowScales {
    const float* scale;
    const float* zero;
  };

  // How many floats `row_scales` needs for so many segments.
  static int64_t scale_room(const Problem& p, const Shape& s, int64_t segments) {
    const int64_t codes = segments * s.codes;
    const int64_t blocks = div_up(codes, p.block_size) + 2, grains = s.mode == kAnyBlock ? 0 : codes / s.grain;
    return div_up((s.mode == kOneScale ? 1 : max64(blocks, 1) + grains) + 16, 16) * 16;
  }

  EQQ_INLINE RowScales row_scales(const Problem& p, const Shape& s, int64_t row, int64_t first, int64_t last,
                                  float* scratch) {
    RowScales r;
    const int64_t room = scale_room(p, s, last - first);
    r.scale = one_kind<false>(p, s, row, first, last, scratch);
    r.zero = p.zero_point ? one_kind<true>(p, s, row, first, last, scratch + room) : scratch;
    return r;
  }

  // The scales of the whole segments among the next few that are decoded at a time.
  EQQ_INLINE RowScales whole_scales(const Problem& p, const Shape& s, int64_t row, int64_t first, float* scratch) {
    const int64_t last = min64(first + scale_segments(s), s.whole);
    if (first >= last) return {scratch, scratch};
    return row_scales(p, s, row, first, last, scratch);
  }

  template <bool kZeros>
  EQQ_INLINE const float* one_kind(const Problem& p, const Shape& s, int64_t row, int64_t first, int64_t last,
                                   float* scratch) {
    if (s.mode == kOneScale) {
      fetch<kZeros>(p, row, 0, 1, scratch);
      return scratch;
    }
    const int64_t from = first * s.codes, to = min64(last * s.codes, p.k);
    const int64_t block = from / p.block_size, end = div_up(to, p.block_size);
    if (s.mode == kAnyBlock || (last - 1 >= s.whole && last - first == 1)) {
      fetch<kZeros>(p, row, block, end, scratch);  // found by index, those of the tail always
      return scratch;
    }
    const int64_t ratio = p.block_size / s.grain;
    if (ratio == 1) {
      fetch<kZeros>(p, row, block, end, scratch);
      return scratch;
    }
    const int64_t grains = (last - first) * s.codes / s.grain;
    float* blocks = scratch + grains;
    fetch<kZeros>(p, row, block, end, blocks);
    expand(blocks, ratio, from / s.grain - block * ratio, grains, scratch);
    return scratch;
  }

  template <bool kZeros>
  EQQ_INLINE void fetch(const Problem& p, int64_t row, int64_t first, int64_t last, float* out) {
    if (kZeros) {
      unpack_zero_points(p, row, first, last, out);
    } else {
      decode_scales(p, row, first, last, out);
    }
  }

  //
  // Decoding
  //

  // Codes of eight bits, in their logical order.
  template <int kValues>
  EQQ_INLINE F decode_bytes(const uint8_t* p, const float* table, F offset) {
    if (V::kLooksUpBytes) return V::bytes256(p, table);
    if (kValues == kValueInteger) return V::add(V::integers(p), offset);
    if (kValues == kValueE4M3) return V::e4m3(p);
    if (kValues == kValueE5M2) return V::e5m2(p);
    return V::bytes256(p, table);
  }

  // All codes of a segment.
  template <int kValues>
  EQQ_INLINE void decode_all_bytes(const uint8_t* p, const float* table, F offset, F* out) {
    if constexpr (V::kTablesOfBytes && kValues != kValueInteger) {
      V::template decode64<kValues == kValueTable ? 4 : 2>(p, reinterpret_cast<const uint8_t*>(table + 256), out);
    } else {
#pragma GCC unroll 16
      for (int v = 0; v < 64 / L; ++v) out[v] = decode_bytes<kValues>(p + v * L, table, offset);
    }
  }

  // The vectors of a segment in the order of decoding, unrolled: `f(constant, vector)`. Without `kScaled` they are as
  // in the table, less the zero point, and whoever asks scales them.
  template <int kBits, int kValues, Mode kMode, bool kZero, bool kMask>
  EQQ_INLINE void decode_segment(const uint8_t* bytes, const float* table256, const Table& table, const float* scale,
                                 const float* zero, const int32_t* index, const int32_t* mask, float* out) {
    if constexpr (kBits == 8) {
      const F offset = V::broadcast(table256[0]);
      constexpr int kVectors = 64 / L;
      F all[kVectors];
      if (V::kTablesOfBytes) decode_all_bytes<kValues>(bytes, table256, offset, all);
      for (int v = 0; v < kVectors; ++v) {
        F w = V::kTablesOfBytes ? all[v] : decode_bytes<kValues>(bytes + v * L, table256, offset);
        if (kMode == kAnyBlock) {
          if (kZero) w = V::sub(w, V::gather(zero, index + v * L));
          w = V::mul(w, V::gather(scale, index + v * L));
        } else if (kMode != kOneScale) {  // which is left to whoever asks
          const int at = v * L * per_plane(kMode) / 64;
          if (kZero) w = V::sub(w, V::broadcast(zero[at]));
          w = V::mul(w, V::broadcast(scale[at]));
        }
        if (kMask) w = V::masked(w, mask + v * L);
        V::store(out + v * L, w);
      }
    } else {
      constexpr int kPlanes = 8 / kBits;
      for (int h = 0; h < kHalves; ++h) {
        const I codes = V::bytes(bytes + 4 * L * h);
        const typename V::Lanes lanes = V::lanes(h, per_plane(kMode));
        decode_planes<kBits, kMode, kZero, kMask, 0>(codes, lanes, table, scale, zero, index + h * kPlanes * 4 * L,
                                                     mask + h * kPlanes * 4 * L, out + h * kPlanes * 4 * L);
      }
    }
  }

  template <int kBits, Mode kMode, bool kZero, bool kMask, int kVector>
  EQQ_INLINE void decode_planes(I codes, typename V::Lanes lanes, const Table& table, const float* scale,
                                const float* zero, const int32_t* index, const int32_t* mask, float* out) {
    constexpr int kPlanes = 8 / kBits;
    if constexpr (kVector < kPlanes) {
      Table t = table;
      F s = V::zero(), z = V::zero();
      if constexpr (kMode == kUniform && V::kScalesTables) {
        if (kZero) t = V::offset(t, V::broadcast(zero[kVector]));
        t = V::scale(t, V::broadcast(scale[kVector]));
      } else if constexpr (after_lookup(kMode)) {
        s = V::spread(scale + per_plane(kMode) * kVector, lanes);
        if (kZero) z = V::spread(zero + per_plane(kMode) * kVector, lanes);
      }
      decode_four<kBits, kMode, kZero, kMask, kVector, 0>(codes, t, s, z, scale, zero, index, mask, out);
      decode_planes<kBits, kMode, kZero, kMask, kVector + 1>(codes, lanes, table, scale, zero, index, mask, out);
    }
  }

  template <int kBits, Mode kMode, bool kZero, bool kMask, int kPlaneIndex, int kByte>
  EQQ_INLINE void decode_four(I codes, const Table& t, F s, F z, const float* scale, const float* zero,
                              const int32_t* index, const int32_t* mask, float* out) {
    if constexpr (kByte < 4) {
      constexpr int v = kPlaneIndex * 4 + kByte;
      F w = V::lookup(t, V::template shift<8 * kByte + kPlaneIndex * kBits>(codes));
      if (after_lookup(kMode)) {
        if (kZero) w = V::sub(w, z);
        w = V::mul(w, s);
      }
      if (kMode == kAnyBlock) {
        if (kZero) w = V::sub(w, V::gather(zero, index + v * L));
        w = V::mul(w, V::gather(scale, index + v * L));
      }
      if (kMask) w = V::masked(w, mask + v * L);
      V::store(out + v * L, w);
      decode_four<kBits, kMode, kZero, kMask, kPlaneIndex, kByte + 1>(codes, t, s, z, scale, zero, index, mask, out);
    }
  }

  // Decodes segments `first` to `last` of a row to floats. `r` has the scales of its segments from `origin` on; those
  // of a last segment that is cut short are decoded to `scratch`.
  template <int kBits, int kValues, bool kZero>
  static void decode_row(const Problem& p, const Shape& s, const void* shared, int64_t row, int64_t first, int64_t last,
                         RowScales r, int64_t origin, float* scratch, float* out) {
    const Shared common = open_shared(s, shared);
    const float* values = table256(shared);
    const int64_t whole = min64(last, s.whole);
    const uint8_t* bytes = p.codes + row * p.words;
    const Table plain = V::table(values);
    const int64_t step = s.codes / s.grain;
#define EQQ_DECODE(MODE, TABLE, SKIP, INDEX)                                                                \
  for (int64_t i = first; i < whole; ++i)                                                                   \
  decode_segment<kBits, kValues, MODE, kZero, false>(bytes + i * kSegment, values, TABLE, r.scale + (SKIP), \
                                                     r.zero + (SKIP), INDEX, common.mask, out + (i - first) * s.codes)
    switch (s.mode) {
      case kOneScale:
        if constexpr (kBits == 8) {
          EQQ_DECODE(kUniform, plain, 0, common.index);
        } else {
          Table t = kZero ? V::offset(plain, V::broadcast(r.zero[0])) : plain;
          t = V::scale(t, V::broadcast(r.scale[0]));
          EQQ_DECODE(kOneScale, t, 0, common.index);
        }
        break;
      case kUniform: EQQ_DECODE(kUniform, plain, (i - origin) * step, common.index); break;
      case kBy32: EQQ_DECODE(kBy32, plain, (i - origin) * step, common.index); break;
      case kBy16: EQQ_DECODE(kBy16, plain, (i - origin) * step, common.index); break;
      case kAnyBlock:
        EQQ_DECODE(kAnyBlock, plain, i * s.codes / p.block_size - origin * s.codes / p.block_size,
                   common.index + i * s.codes);
        break;
    }
#undef EQQ_DECODE
    if (last <= s.whole) return;
    out += (s.whole - first) * s.codes;
    if (s.tail == s.codes) return decode_tail<kBits, kValues, kZero>(p, s, shared, row, scratch, out);
    float tail[512];
    decode_tail<kBits, kValues, kZero>(p, s, shared, row, scratch, tail);
    const int64_t real = p.k - s.whole * s.codes;
    for (int64_t i = 0; i < real; ++i) out[i] = tail[common.place[i]];
    for (int64_t i = real; i < s.tail; ++i) out[i] = 0.0f;
  }

  // Decodes the last segment, which is cut short.
  template <int kBits, int kValues, bool kZero>
  static void decode_tail(const Problem& p, const Shape& s, const void* shared, int64_t row, float* scratch,
                          float* out) {
    const Shared common = open_shared(s, shared);
    const int64_t at = (indices(s) - 1) * s.codes;
    uint8_t bytes[kSegment] = {0};
    memcpy(bytes, p.codes + row * p.words + s.whole * kSegment, s.tail_bytes);
    const float* values = table256(shared);
    const RowScales r = row_scales(p, s, row, s.whole, s.segments, scratch);
    decode_segment<kBits, kValues, kAnyBlock, kZero, true>(bytes, values, V::table(values), r.scale, r.zero,
                                                           common.index + at, common.mask + at, out);
  }

  using DecodeRow = void (*)(const Problem&, const Shape&, const void*, int64_t, int64_t, int64_t, RowScales, int64_t,
                             float*, float*);

  // What a template yields for the codes of a problem: `choose(Codes<bits, values>())`.
  template <int bits, int values>
  struct Codes {
    static constexpr int kBits = bits, kValues = values;
  };

  template <class Choose>
  static auto by_codes(const Problem& p, const Choose& choose) {
    switch (p.bits) {
      case 1: return choose(Codes<1, 0>());
      case 2: return choose(Codes<2, 0>());
      case 4: return choose(Codes<4, 0>());
    }
    switch (p.values) {
      case kValueInteger: return choose(Codes<8, kValueInteger>());
      case kValueE4M3: return choose(Codes<8, kValueE4M3>());
      case kValueE5M2: return choose(Codes<8, kValueE5M2>());
    }
    return choose(Codes<8, kValueTable>());
  }

  static DecodeRow row_decoder(const Problem& p) {
    return by_codes(p, [&](auto codes) -> DecodeRow {
      using C = decltype(codes);
      return p.zero_point != nullptr ? decode_row<C::kBits, C::kValues, true> : decode_row<C::kBits, C::kValues, false>;
    });
  }

  //
  // One row of x: decoding and multiplying at once, nothing is written
  //

  // The products of `kRows` rows of whole segments `first` to `last`, added to `sums`. `scale[r]` are those rows'.
  template <int kBits, int kValues, Mode kMode, bool kZero, int kRows>
  static void dot(const uint8_t* const* bytes, int64_t ahead, const RowScales* scales, int64_t step, int64_t segments,
                  const float* values, const float* x, F* sums) {
    const Table plain = V::table(values);
    const F offset = V::broadcast(values[0]);
    Table tables[kRows];
    for (int r = 0; r < kRows; ++r)
      tables[r] = kZero && kMode == kOneScale && kBits < 8 ? V::offset(plain, V::broadcast(scales[r].zero[0])) : plain;
    F acc[kRows], more[kRows];
    for (int r = 0; r < kRows; ++r) acc[r] = more[r] = V::zero();
    for (int64_t i = 0; i < segments; ++i) {
      for (int r = 0; r < kRows; ++r) V::prefetch(bytes[r] + i * kSegment + ahead);
      if constexpr (kBits == 8) {
        constexpr int kVectors = 64 / L, kGrain = 64 / per_plane(kMode) / L;
        F part[kRows];
        for (int r = 0; r < kRows; ++r) part[r] = V::zero();
        constexpr bool kAtOnce = V::kTablesOfBytes && kValues != kValueInteger;
        constexpr int kOuter = kAtOnce ? kRows : 1, kInner = kAtOnce ? 1 : kRows;
#pragma GCC unroll 8
        for (int outer = 0; outer < kOuter; ++outer) {
          F all[kVectors];
          if (kAtOnce) decode_all_bytes<kValues>(bytes[outer] + i * 64, values, offset, all);
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) {
            const F xs = V::load(x + i * 64 + v * L);
#pragma GCC unroll 8
            for (int inner = 0; inner < kInner; ++inner) {
              const int r = outer + inner;
              F w = kAtOnce ? all[v] : decode_bytes<kValues>(bytes[r] + i * 64 + v * L, values, offset);
              const int64_t g = kMode == kOneScale ? 0 : i * step + v / kGrain;
              if (kZero) w = V::sub(w, V::broadcast(scales[r].zero[g]));
              if (kMode == kOneScale) {
                if (v % 2) {
                  more[r] = V::fma(w, xs, more[r]);
                } else {
                  acc[r] = V::fma(w, xs, acc[r]);
                }
              } else {
                part[r] = v % kGrain ? V::fma(w, xs, part[r]) : V::mul(w, xs);
                if (v % kGrain == kGrain - 1) acc[r] = V::fma(part[r], V::broadcast(scales[r].scale[g]), acc[r]);
              }
            }
          }
        }
      } else {
        constexpr int kPlanes = 8 / kBits;
        for (int h = 0; h < kHalves; ++h) {
          const typename V::Lanes lanes = V::lanes(h, per_plane(kMode));
          I codes[kRows];
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) codes[r] = V::bytes(bytes[r] + i * kSegment + 4 * L * h);
          dot_planes<kBits, kMode, kZero, kRows, 0>(codes, lanes, tables, scales, i * step,
                                                    x + i * 64 * kPlanes + h * kPlanes * 4 * L, acc, more);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) sums[r] = V::add(sums[r], V::add(acc[r], more[r]));
  }

  template <int kBits, Mode kMode, bool kZero, int kRows, int kPlaneIndex>
  EQQ_INLINE void dot_planes(const I* codes, typename V::Lanes lanes, const Table* tables, const RowScales* scales,
                             int64_t at, const float* x, F* acc, F* more) {
    if constexpr (kPlaneIndex < 8 / kBits) {
      const F x0 = V::load(x + (4 * kPlaneIndex + 0) * L), x1 = V::load(x + (4 * kPlaneIndex + 1) * L);
      const F x2 = V::load(x + (4 * kPlaneIndex + 2) * L), x3 = V::load(x + (4 * kPlaneIndex + 3) * L);
      constexpr int kShift = kPlaneIndex * kBits;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        Table t = tables[r];
        F z = V::zero();
        if (kZero && kMode == kUniform && V::kScalesTables)
          t = V::offset(t, V::broadcast(scales[r].zero[at + kPlaneIndex]));
        if (kZero && after_lookup(kMode)) z = V::spread(scales[r].zero + at + per_plane(kMode) * kPlaneIndex, lanes);
        F w0 = V::lookup(t, V::template shift<kShift>(codes[r]));
        F w1 = V::lookup(t, V::template shift<kShift + 8>(codes[r]));
        F w2 = V::lookup(t, V::template shift<kShift + 16>(codes[r]));
        F w3 = V::lookup(t, V::template shift<kShift + 24>(codes[r]));
        if (kZero && after_lookup(kMode)) {
          w0 = V::sub(w0, z);
          w1 = V::sub(w1, z);
          w2 = V::sub(w2, z);
          w3 = V::sub(w3, z);
        }
        if (kMode == kOneScale) {
          acc[r] = V::fma(w2, x2, V::fma(w0, x0, acc[r]));
          more[r] = V::fma(w3, x3, V::fma(w1, x1, more[r]));
        } else {
          const F part = V::fma(w3, x3, V::fma(w2, x2, V::fma(w1, x1, V::mul(w0, x0))));
          const F s = per_plane(kMode) > 1 ? V::spread(scales[r].scale + at + per_plane(kMode) * kPlaneIndex, lanes)
                                           : V::broadcast(scales[r].scale[at + kPlaneIndex]);
          F* sum = kPlaneIndex % 2 ? more : acc;
          sum[r] = V::fma(part, s, sum[r]);
        }
      }
      dot_planes<kBits, kMode, kZero, kRows, kPlaneIndex + 1>(codes, lanes, tables, scales, at, x, acc, more);
    }
  }

  template <int kBits, int kValues, bool kZero, int kRows>
  EQQ_INLINE void dot_of_mode(const Shape& s, const uint8_t* const* bytes, int64_t ahead, const RowScales* scales,
                              int64_t step, int64_t segments, const float* values, const float* x, F* sums) {
    if (s.mode == kOneScale) {
      dot<kBits, kValues, kOneScale, kZero, kRows>(bytes, ahead, scales, 0, segments, values, x, sums);
    } else if (s.mode == kBy32) {
      dot<kBits, kValues, kBy32, kZero, kRows>(bytes, ahead, scales, step, segments, values, x, sums);
    } else if (s.mode == kBy16) {
      dot<kBits, kValues, kBy16, kZero, kRows>(bytes, ahead, scales, step, segments, values, x, sums);
    } else {
      dot<kBits, kValues, kUniform, kZero, kRows>(bytes, ahead, scales, step, segments, values, x, sums);
    }
  }

  // A sum of codes, scaled. An infinite scale makes NaN of codes of zero, which a sum does not show.
  EQQ_INLINE float scaled(float sum, float scale) { return sum * scale + 0.0f * scale; }

  EQQ_INLINE void sum_group(const F* sums, float* totals) {
    if constexpr (V::kSumsRows) {
      V::sum_rows(sums, totals);
    } else {
      for (int r = 0; r < V::kDotRows; ++r) totals[r] = V::sum(sums[r]);
    }
  }

  // What groups of rows have in common: divisions that are too slow to repeat for each.
  struct Group {
    int64_t chunk, room, step;
    int64_t ahead;  // bytes to what is fetched meanwhile: the same part of a later group
    bool direct;    // the loop can read scales where they are
    bool together;  // it can once they are floats, and those of the next row lie behind
  };

  // Rows `row` to `row + count` of the weight, at most `kDotRows` (rows of all batches in one count), and `kM` of x.
  template <int kBits, int kValues, bool kZero, int kM>
  EQQ_INLINE void dot_group(const Problem& p, const Shape& s, const void* shared, const float* x, int64_t x_row,
                            int64_t row, int64_t count, const Group& g, float* own, float* results) {
    constexpr int kRows = V::kDotRows;
    const float* values = table256(shared);
    F sums[kM * kRows];
    for (int r = 0; r < kM * kRows; ++r) sums[r] = V::zero();
    float factor[kRows] = {0};
    RowScales scales[kRows];
    const float* floats = g.direct ? static_cast<const float*>(p.scale) + row * p.blocks : own;
    if (g.together && !g.direct) decode_scales(p, row, 0, count * p.blocks, own);
    const auto set_scales = [&](int64_t first, int64_t last) {
      for (int r = 0; r < kRows; ++r) {
        const int64_t within = min64(r, count - 1), at = row + within;  // past the end the last row again
        if (g.together) {
          scales[r].scale = scales[r].zero = floats + within * p.blocks + first * g.step;
        } else {
          scales[r] = row_scales(p, s, at, first, last, own + r * g.room);
        }
        factor[r] = s.mode == kOneScale ? scales[r].scale[0] : 1.0f;
      }
    };
    for (int64_t first = 0; first < s.whole; first += g.chunk) {
      const int64_t last = min64(first + g.chunk, s.whole);
      set_scales(first, last);
      const uint8_t* bytes[kRows];
      for (int r = 0; r < kRows; ++r) bytes[r] = p.codes + (row + min64(r, count - 1)) * p.words + first * kSegment;
      const float* xs = x + first * s.codes;
      if (kM > 1) {
        Direct<V>::template dots_of_mode<kBits, kValues, kZero, kM>(s.mode, bytes, g.ahead, scales, g.step,
                                                                    last - first, values, xs, x_row, sums);
      } else if (count == 1) {
        dot_of_mode<kBits, kValues, kZero, 1>(s, bytes, g.ahead, scales, g.step, last - first, values, xs, sums);
      } else {
        dot_of_mode<kBits, kValues, kZero, kRows>(s, bytes, g.ahead, scales, g.step, last - first, values, xs, sums);
      }
    }
    if (s.segments > s.whole && s.mode == kOneScale) {
      if (s.whole == 0) set_scales(0, 1);
      F rest[kM * kRows];  // not added to `sums` there: whose address is known, a compiler keeps in memory
      Direct<V>::template dots_of_tail<kBits, kValues, kZero, kM>(p, s, shared, row, count, scales,
                                                                  x + s.whole * s.codes, x_row, rest);
      for (int r = 0; r < kM * kRows; ++r) sums[r] = V::add(sums[r], rest[r]);
    }
    for (int m = 0; m < kM; ++m) {
      float totals[kRows];
      sum_group(sums + m * kRows, totals);
      for (int64_t r = 0; r < count; ++r) results[m * kMostDots + r] = scaled(totals[r], factor[r]);
    }
    if (s.segments == s.whole || s.mode == kOneScale) return;
    float* tail = own + kRows * g.room;
    for (int64_t r = 0; r < count; ++r) {
      decode_tail<kBits, kValues, kZero>(p, s, shared, row + r, own, tail);
      for (int m = 0; m < kM; ++m) {
        const float* xs = x + m * x_row + s.whole * s.codes;
        F sum = V::zero();
        for (int64_t i = 0; i < s.codes; i += L) sum = V::fma(V::load(tail + i), V::load(xs + i), sum);
        results[m * kMostDots + r] += V::sum(sum);
      }
    }
  }

  template <int kBits, int kValues, bool kZero, int kM>
  static void dot_rows(const Problem& p, const Shape& s, const void* shared, const float* x, int64_t x_row, int64_t row,
                       int64_t count, float* own, float* results) {
    Group g;
    g.chunk = scale_segments(s);
    g.room = 2 * scale_room(p, s, g.chunk);
    g.step = s.mode == kOneScale ? 0 : s.codes / s.grain;
    g.ahead = round_up(kAheadOfDots, V::kDotRows * max64(p.words, 1));
    const bool as_stored = (s.mode == kOneScale || p.block_size == s.grain) && !kZero && p.row_scale == nullptr;
    g.direct = as_stored && p.scale_kind == kScaleFloat32 && per_plane(s.mode) == 1;
    g.together = g.direct || (as_stored && (s.mode == kOneScale || s.whole <= g.chunk));
    int64_t r = 0;
    if (g.together && 0 < s.segments && s.segments <= kShortRow && (s.whole == s.segments || s.mode == kOneScale))
      r = Direct<V>::template short_rows<kBits, kValues, kZero, kM>(p, s, shared, x, x_row, row, count, g, own,
                                                                    results);
    for (; r < count; r += V::kDotRows)
      dot_group<kBits, kValues, kZero, kM>(p, s, shared, x, x_row, row + r, min64(V::kDotRows, count - r), g, own,
                                           results + r);
  }

  using DotRows = void (*)(const Problem&, const Shape&, const void*, const float*, int64_t, int64_t, int64_t, float*,
                           float*);

  static DotRows dot_kernel(const Problem& p, int64_t m) {
    return by_codes(p, [&](auto codes) {
      return dot_kernel_of<decltype(codes)::kBits, decltype(codes)::kValues, Direct<V>::kMost>(p, m);
    });
  }

  template <int kBits, int kValues, int kM>
  static DotRows dot_kernel_of(const Problem& p, int64_t m) {
    if constexpr (kM > 1)
      if (m < kM) return dot_kernel_of<kBits, kValues, kM - 1>(p, m);
    return p.zero_point != nullptr ? dot_rows<kBits, kValues, true, kM> : dot_rows<kBits, kValues, false, kM>;
  }

  //
  // Few rows of x: lanes run along k
  //

  // sums[m][r] += w[r][:] . x[m][:], for `kRows` decoded rows and `kM` rows of `x`.
  template <int kRows, int kM>
  static void few_micro(const float* w, const float* x, int64_t x_row, int64_t length, float* sums) {
    F acc[kRows][kM];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) acc[r][m] = V::load(sums + (r * kM + m) * L);
    for (int64_t i = 0; i < length; i += L) {
      F ws[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) ws[r] = V::load(w + r * kChunkStride + i);
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) {
        const F xs = V::load(x + m * x_row + i);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) acc[r][m] = V::fma(ws[r], xs, acc[r][m]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) V::store(sums + (r * kM + m) * L, acc[r][m]);
  }

  // Some whole segments of `kFewTile` rows of the weight, and those that come next.
  struct FewStep {
    const uint8_t *bytes, *next, *ahead;  // codes of now, of those to decode last, and of those to fetch
    const float *scale, *next_scale;
    float *decoded, *next_decoded;  // segment `i` lies at place `(start + i) & mask`
    int64_t start, mask, segments;
    int64_t words, room, step;  // bytes from row to row; scales from row to row, and from segment to segment
  };

  // The same, while the segment after each is decoded, one row at a time: units that permute are others than those that
  // multiply. The first segment is there already; the last is followed by the first of the next rows.
  template <int kBits, int kValues, Mode kMode, int kM>
  static void few_fused(const FewStep& f, const float* values, const float* x, int64_t x_row, float* sums) {
    constexpr int kRows = V::kFewTile, kCodes = kSegment * (8 / kBits), kSteps = kCodes / L / kRows;
    const Table plain = V::table(values);
    F acc[kRows][kM];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) acc[r][m] = V::load(sums + (r * kM + m) * L);
    const uint8_t *bytes = f.bytes, *ahead = f.ahead;
    const float* scale = f.scale;
    for (int64_t i = 0; i < f.segments; ++i) {
      const float* w = f.decoded + ((f.start + i) & f.mask) * kCodes;
      const bool last = i + 1 == f.segments;
      float* to = last ? f.next_decoded : f.decoded + ((f.start + i + 1) & f.mask) * kCodes;
      bytes = last ? f.next : bytes + kSegment;
      scale = last ? f.next_scale : scale + f.step;
#pragma GCC unroll 8
      for (int part = 0; part < kRows; ++part) {
        V::prefetch(ahead + part * f.words);
        const float* own = scale + part * f.room;
        const Table table = kMode == kOneScale && kBits < 8 ? V::scale(plain, V::broadcast(own[0])) : plain;
        decode_segment<kBits, kValues, kMode, false, false>(bytes + part * f.words, values, table, own, nullptr,
                                                            nullptr, nullptr, to + part * kChunkStride);
#pragma GCC unroll 8
        for (int j = 0; j < kSteps; ++j, w += L, x += L) {
          F ws[kRows];
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) ws[r] = V::load(w + r * kChunkStride);
#pragma GCC unroll 8
          for (int m = 0; m < kM; ++m) {
            const F xs = V::load(x + m * x_row);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) acc[r][m] = V::fma(ws[r], xs, acc[r][m]);
          }
        }
      }
      ahead += kSegment;
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) V::store(sums + (r * kM + m) * L, acc[r][m]);
  }

  using FewFused = void (*)(const FewStep&, const float*, const float*, int64_t, float*);

  // How many rows of `x` are multiplied at a time. All groups are about equally large.
  EQQ_INLINE int64_t few_group(const Problem& p, const Shape& s) {
    const bool fused = p.m > V::kFewGroup && fused_kernel(p, s, p.m) != nullptr;
    return div_up(p.m, div_up(p.m, fused ? V::kFusedGroup : V::kFewGroup));
  }

  // For up to `m` rows of `x`; null where there is none.
  static FewFused fused_kernel(const Problem& p, const Shape& s, int64_t m) {
    if constexpr (V::kFusesFew) {
      if (p.zero_point != nullptr) return nullptr;
      if (p.bits == 4) return fused_of_mode<4, 0>(s, m);
      if (p.bits == 8 && V::kTablesOfBytes && !(s.mode == kOneScale && s.whole < s.segments)) {
        if (p.values == kValueTable) return fused_of_mode<8, kValueTable>(s, m);
        if (p.values != kValueInteger) return fused_of_mode<8, kValueE4M3>(s, m);  // tables differ, the code does not
      }
    }
    return nullptr;
  }

  template <int kBits, int kValues>
  static FewFused fused_of_mode(const Shape& s, int64_t m) {
    switch (s.mode) {
      case kOneScale: return fused_of<kBits, kValues, kOneScale, V::kFewGroup>(m);
      case kUniform: return fused_of<kBits, kValues, kUniform, V::kFewGroup>(m);
      case kBy32: return fused_of<kBits, kValues, kBy32, V::kFewGroup>(m);
      case kBy16: return fused_of<kBits, kValues, kBy16, V::kFewGroup>(m);
      default: return nullptr;
    }
  }

  template <int kBits, int kValues, Mode kMode, int kM>
  EQQ_INLINE FewFused fused_of(int64_t m) {
    if constexpr (kM > 2)
      if (m < kM) return fused_of<kBits, kValues, kMode, kM - 1>(m);
    return few_fused<kBits, kValues, kMode, kM>;
  }

  using FewMicro = void (*)(const float*, const float*, int64_t, int64_t, float*);

  EQQ_INLINE FewMicro few_kernel(int64_t m) { return few_of<V::kFewGroup>(m); }

  template <int kM>
  EQQ_INLINE FewMicro few_of(int64_t m) {
    if constexpr (kM > 1)
      if (m < kM) return few_of<kM - 1>(m);
    return few_micro<V::kFewTile, kM>;
  }

  //
  // Many rows: lanes run along the results
  //

  // c[i][:] += sum over p of a[i][p] b[p][:], for `kRows` rows of `kVectors` vectors. The sum is made first: short sums
  // are more exact than one long one.
  template <int kVectors, int kRows, int64_t kStride>
  static void tile(const float* a, const float* b, int64_t b_row, int64_t length, float* c, int64_t c_row) {
    F acc[kRows][kVectors];
#pragma GCC unroll 32
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[i][v] = V::zero();
    for (int64_t p = 0; p < length; ++p) {
      F bs[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) bs[v] = V::load(b + p * b_row + v * L);
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i) {
        const F as = V::broadcast(a[i * kStride + p]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) acc[i][v] = V::fma(as, bs[v], acc[i][v]);
      }
    }
#pragma GCC unroll 32
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v)
        V::store(c + i * c_row + v * L, V::add(V::load(c + i * c_row + v * L), acc[i][v]));
  }

  // The same for any number of rows up to `kRows`.
  template <int kVectors, int kRows, int64_t kStride>
  EQQ_INLINE void tile_rows(int64_t rows, const float* a, const float* b, int64_t b_row, int64_t length, float* c,
                            int64_t c_row) {
    if constexpr (kRows == 1) {
      tile<kVectors, 1, kStride>(a, b, b_row, length, c, c_row);
    } else {
      if (rows >= kRows) {
        tile<kVectors, kRows, kStride>(a, b, b_row, length, c, c_row);
      } else {
        tile_rows<kVectors, kRows - 1, kStride>(rows, a, b, b_row, length, c, c_row);
      }
    }
  }

  template <int kVectors, int kRows, int64_t kStride>
  static void tiles(int64_t rows, const float* a, const float* b, int64_t b_row, int64_t length, float* c,
                    int64_t c_row) {
    for (int64_t i = 0; i < rows; i += kRows)
      tile_rows<kVectors, kRows, kStride>(rows - i, a + i * kStride, b, b_row, length, c + i * c_row, c_row);
  }

  //
  // The plan
  //

  struct Detail {
    int64_t method;
    int64_t rows;        // of the weight in a unit; of `kTransposed` segments
    int64_t chunks;      // units along the weight
    int64_t row_blocks;  // units along the rows of `x`
    int64_t x_batch;     // packed floats of one batch
    int64_t m_padded;    // rows of packed `x`, or with panels their lanes
    int64_t scales;      // where in the scratch memory of a thread scales are decoded, and results summed
    int64_t sums;
    int64_t x_parts;   // parts of the preparation of one batch
    int64_t x_row;     // floats from one row of packed `x` to the next, but with panels
    int64_t few_step;  // with `kFew`: segments at a time
  };

  EQQ_INLINE int64_t scale_segments(const Shape& s) { return kScaleChunk / s.codes; }

  EQQ_INLINE int64_t chunk_segments(const Shape& s) { return kChunk / s.codes; }

  // Floats of decoded segments.
  EQQ_INLINE int64_t span(const Shape& s, int64_t first, int64_t last) {
    return min64(last * s.codes, s.padded) - first * s.codes;
  }

  // Pieces of rows that lie so far apart fill all sets of a cache alike.
  EQQ_INLINE int64_t few_row(const Shape& s) {
    return s.padded < 1024 ? s.padded : (s.padded + 767) / 1024 * 1024 + 256;
  }

  static void plan(const Problem* problem, int64_t threads, Plan* out) {
    const Problem& p = *problem;
    const Shape s = shape_of(p);
    const bool fused = !p.transpose && fused_kernel(p, s, p.m) != nullptr;
    Detail d;
    // What decodes while it multiplies more rows is faster from the fourth on, but slow at a segment that is cut short.
    const int64_t dots = fused && s.whole >= 4 * (s.segments - s.whole) ? min64(3, V::kDirectRows) : Direct<V>::most(p);
    d.method = p.transpose                                  ? Direct<V>::mixes(p, s) ? kMix : kTransposed
             : p.m <= (s.mode == kAnyBlock ? 1 : dots)      ? kDot
             : p.m <= (fused ? V::kFusedRows : V::kFewRows) ? kFew
                                                            : kPanels;
    d.row_blocks = 1;
    d.x_row = s.padded;
    const int64_t wanted = 4 * threads;  // units, so that threads end at about the same time
    const int64_t outer = p.transpose ? s.segments : p.n;
    int64_t grain = 1, most = 1;
    int64_t own = 0;
    const int64_t scale_bytes = aligned(4 * 2 * scale_room(p, s, scale_segments(s)));  // of one row
    d.x_parts = 1;
    if (d.method == kDot) {
      grain = V::kDotRows;
      most = kMostDots;
      d.m_padded = p.m;
      d.x_row = few_row(s);
      d.x_batch = p.m * d.x_row;
      d.scales = d.sums = 0;
      own = aligned(4 * (V::kDotRows * 2 * scale_room(p, s, scale_segments(s)) + s.codes));
      if (s.segments <= kShortRow) own = max64(own, aligned(4 * kMostDots * (p.blocks + 16)));
    } else if (d.method == kFew) {
      grain = V::kFewTile;
      most = 16 * grain;
      d.m_padded = p.m;
      d.x_row = few_row(s);
      d.x_batch = p.m * d.x_row;
      d.scales = aligned(4 * 2 * V::kFewTile * kChunkStride);
      int64_t codes = fused ? kScaleChunk : kChunk;
      while (codes > kChunk / 2 && codes * p.m > kFewFloats) codes /= 2;
      if (p.m > V::kFewGroup) codes = min64(codes, kChunk);
      d.few_step = max64(codes / s.codes, 1);
      d.sums = d.scales + (kFewBlock + 1) * scale_bytes;
      own = d.sums + aligned(4 * kFewBlock * p.m * L);
    } else if (d.method == kPanels) {
      grain = V::kTileRows;
      most = kMostRows;
      d.m_padded = div_up(p.m, L) * L;
      d.x_batch = d.m_padded * s.padded;
      d.row_blocks = div_up(d.m_padded, kRowBlock);
    } else {
      most = max64(1, (p.m <= V::kWideRows ? 1024 : 512) / s.codes);
      d.m_padded = p.m;
      d.x_batch = div_up(p.n, kRowChunk) * p.m * kRowChunkStride;
      d.row_blocks = div_up(p.m, kRowBlock);
    }
    const int64_t others = p.batch * d.row_blocks;
    int64_t rows = div_up(outer * others, max64(wanted, 1));
    // A unit is at least so large that handing it to a thread costs little.
    const int64_t cost = p.m * (p.transpose ? p.n * s.codes : p.k);
    rows = max64(rows, (int64_t(1) << 17) / max64(cost, 1));
    rows = max64(min64(div_up(min64(rows, outer), grain) * grain, most), grain);
    d.rows = rows;
    d.chunks = div_up(outer, rows);
    if (d.method == kPanels) {
      d.scales = aligned(4 * rows * kChunkStride);
      d.sums = d.scales + (rows + 1) * scale_bytes;
      own = d.sums + aligned(4 * rows * min64(d.m_padded, kRowBlock));
    } else if (d.method == kMix) {
      own = typename Direct<V>::Room(p, s, rows).all;
    } else if (d.method == kTransposed) {
      const int64_t width = rows * s.codes;
      d.scales = aligned(4 * kRowChunk * width);
      d.sums = d.scales + 2 * aligned(4 * 2 * scale_room(p, s, rows));
      own = d.sums + aligned(4 * min64(p.m, kRowBlock) * width);
    }
    const int64_t floats = d.x_batch * p.batch;
    d.x_parts = p.transpose ? min64(p.m, max64(1, d.x_batch >> 16)) : min64(s.segments, max64(1, d.x_batch >> 16));
    d.x_parts = max64(d.x_parts, 1);
    out->shared_bytes = shared_header(s) + aligned(4 * floats);
    out->own_bytes = max64(own, 64);
    out->parts = p.batch * d.x_parts;
    out->units = p.batch * d.row_blocks * d.chunks;
    // So few rows at a time that packed `x` stays in the cache, yet units for all threads.
    if (d.method == kPanels) out->rows = kRowBlock * div_up(wanted, p.batch * div_up(p.n, most));
    memcpy(out->detail, &d, sizeof d);
  }

  //
  // Preparation: x as floats in the order of decoding
  //

  static void prepare_tables(const Problem& p, const Shape& s, void* shared) {
    const Shared common = open_shared(s, shared);
    float* table = static_cast<float*>(shared);
    const int codes = 1 << p.bits;
    for (int i = 0; i < max64(codes, 16); ++i) table[i] = p.table[i & (codes - 1)];  // lookups read sixteen
    if (V::kTablesOfBytes && p.bits == 8)
      for (int i = 0; i < 256; ++i) {
        uint8_t bytes[4];  // the low one first, as on every machine with this
        memcpy(bytes, table + i, 4);
        for (int j = 0; j < 4; ++j) reinterpret_cast<uint8_t*>(table + 256)[256 * j + i] = bytes[j];
      }
    const bool indexed = s.mode == kAnyBlock || s.segments > s.whole;
    int64_t segment = !indexed ? s.segments : s.mode == kAnyBlock ? 0 : s.whole;
    for (int64_t at = 0; segment < s.segments; ++segment)
      for (int64_t i = 0; i < s.codes; ++i, ++at) {
        const int64_t k = logical(p, s, segment, i);
        const int64_t first = segment * s.codes / p.block_size;
        common.index[at] = k < 0 || s.mode == kOneScale ? 0 : static_cast<int32_t>(k / p.block_size - first);
        common.mask[at] = k < 0 ? 0 : -1;
        if (segment == s.whole && k >= 0) common.place[k - s.whole * s.codes] = static_cast<int32_t>(i);
      }
  }

  EQQ_INLINE void transpose(F* a) {
    if constexpr (L == 4) {
      const F b[4] = {a[0], a[1], a[2], a[3]};
      for (int i = 0; i < 4; ++i) a[i] = F{b[0][i], b[1][i], b[2][i], b[3][i]};
    } else {
      V::transpose(a);
    }
  }

  template <int kType>
  EQQ_INLINE F load_x(const void* x, int64_t at) {
    if (kType == kFloat32) return V::load(static_cast<const float*>(x) + at);
    const uint8_t* bits = static_cast<const uint8_t*>(x) + 2 * at;
    return kType == kBFloat16 ? V::bf16(bits) : V::f16(bits);
  }

  // `L` rows of a segment of `x` from `from` on, as one vector for each code, at its place `order` of decoding.
  template <int kType>
  EQQ_INLINE void pack_rows(const Problem& p, int64_t from, int64_t codes, const int32_t* order, float* out,
                            int64_t out_row) {
    if (p.x_row == 1) {
      for (int64_t i = 0; i < codes; ++i) V::store(out + order[i] * out_row, load_x<kType>(p.x, from + i * p.x_column));
      return;
    }
    for (int64_t i = 0; i < codes; i += L) {
      F a[L];
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r) a[r] = load_x<kType>(p.x, from + r * p.x_row + i);
      transpose(a);
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r) V::store(out + order[i + r] * out_row, a[r]);
    }
  }

  // A whole segment of one row of `x`, whose floats lie side by side.
  template <int kType>
  EQQ_INLINE void pack_segment(const Problem& p, const Shape& s, int64_t from, float* out) {
    for (int64_t plane = 0; plane < s.planes; ++plane, from += kPlane) {
      float x[kPlane];
      for (int i = 0; i < kPlane; i += L) V::store(x + i, load_x<kType>(p.x, from + i));
      for (int h = 0; h < kHalves; ++h) {
        float* to = out + (h * s.planes + plane) * 4 * L;
        if (p.bits == 8) {
          for (int i = 0; i < 4 * L; ++i) to[i] = x[4 * L * h + i];
        } else {
          for (int c = 0; c < 4; ++c)
            for (int j = 0; j < L; ++j) to[c * L + j] = x[4 * L * h + 4 * j + c];
        }
      }
    }
  }

  static void prepare(const Problem* problem, const Plan* plan, void* shared, int64_t part) {
    const Problem& p = *problem;
    const Shape s = shape_of(p);
    Detail d;
    memcpy(&d, plan->detail, sizeof d);
    const Shared common = open_shared(s, shared);
    if (part == 0) prepare_tables(p, s, shared);
    const int64_t batch = part / d.x_parts, piece = part % d.x_parts;
    const int64_t outer = p.transpose ? p.m : s.segments;
    const int64_t first = outer * piece / d.x_parts, last = outer * (piece + 1) / d.x_parts;
    float* out = common.x + batch * d.x_batch;
    switch (p.x_type) {
      case kFloat32: pack<kFloat32>(p, s, d, batch, first, last, out); break;
      case kBFloat16: pack<kBFloat16>(p, s, d, batch, first, last, out); break;
      default: pack<kFloat16>(p, s, d, batch, first, last, out); break;
    }
  }

  template <int kType>
  EQQ_INLINE float read(const void* x, int64_t at) {
    if (kType == kFloat32) return static_cast<const float*>(x)[at];
    const uint16_t bits = static_cast<const uint16_t*>(x)[at];
    return kType == kBFloat16 ? V::one_bf16(bits) : V::one_f16(bits);
  }

  template <int kType>
  static void pack(const Problem& p, const Shape& s, const Detail& d, int64_t batch, int64_t first, int64_t last,
                   float* out) {
    const int64_t base = batch * p.x_batch;
    if (p.transpose) {
      for (int64_t m = first; m < last; ++m)
        for (int64_t n = 0; n < p.n; n += kRowChunk) {
          float* to = out + (n / kRowChunk * p.m + m) * kRowChunkStride;
          const int64_t from = base + m * p.x_row + n * p.x_column, some = min64(kRowChunk, p.n - n);
          const int64_t vectors = p.x_column == 1 ? some / L * L : 0;
          for (int64_t i = 0; i < vectors; i += L) V::store(to + i, load_x<kType>(p.x, from + i));
          for (int64_t i = vectors; i < some; ++i) to[i] = read<kType>(p.x, from + i * p.x_column);
        }
      return;
    }
    int64_t segment = first;
    if (d.method != kPanels && p.x_column == 1) {
      const int64_t whole = min64(last, s.whole);
      for (int64_t m = 0; m < p.m; ++m)
        for (int64_t i = first; i < whole; ++i)
          pack_segment<kType>(p, s, base + m * p.x_row + i * s.codes, out + m * d.x_row + i * s.codes);
      segment = max64(first, whole);
    }
    int32_t order[512], inverse[512];
    for (const int64_t begin = segment; segment < last; ++segment) {
      // The same in all segments but the last.
      const int64_t codes = segment < s.whole ? s.codes : s.tail;
      if (segment == begin || segment >= s.whole) {
        for (int64_t i = 0; i < codes; ++i) {
          int64_t k = segment * s.codes + i;
          if (codes == s.codes) {
            k = logical(p, s, segment, i);
          } else if (k >= p.k) {
            k = -1;
          }
          order[i] = k < 0 ? -1 : static_cast<int32_t>(k - segment * s.codes);
          if (k >= 0) inverse[order[i]] = static_cast<int32_t>(i);
        }
      }
      const int64_t start = base + segment * s.codes * p.x_column;
      if (d.method != kPanels) {
        for (int64_t m = 0; m < p.m; ++m) {
          float* row = out + m * d.x_row + segment * s.codes;
          const int64_t from = start + m * p.x_row;
          for (int64_t i = 0; i < codes; ++i)
            row[i] = order[i] < 0 ? 0.0f : read<kType>(p.x, from + order[i] * p.x_column);
        }
        continue;
      }
      // A panel is two vectors of rows; the last may be one.
      const bool whole = segment < s.whole && (p.x_row == 1 || p.x_column == 1);
      for (int64_t m = 0; m < d.m_padded; m += 2 * L) {
        const int64_t width = min64(2 * L, d.m_padded - m);
        float* panel = out + m * s.padded + segment * s.codes * width;
        for (int64_t v = 0; v < width; v += L) {
          const int64_t from = start + (m + v) * p.x_row, rows = min64(L, p.m - m - v);
          if (whole && rows == L) {
            pack_rows<kType>(p, from, s.codes, inverse, panel + v, width);
            continue;
          }
          for (int64_t i = 0; i < codes; ++i) {
            float* to = panel + i * width + v;
            const int64_t some = order[i] < 0 ? 0 : rows;
            for (int64_t r = 0; r < some; ++r) to[r] = read<kType>(p.x, from + r * p.x_row + order[i] * p.x_column);
            for (int64_t r = max64(some, 0); r < L; ++r) to[r] = 0.0f;
          }
        }
      }
    }
  }

  //
  // Units
  //

  static void run(const Problem* problem, const Plan* plan, const void* shared, void* own, int64_t unit) {
    const Problem& p = *problem;
    const Shape s = shape_of(p);
    Detail d;
    memcpy(&d, plan->detail, sizeof d);
    const int64_t chunk = unit % d.chunks, block = unit / d.chunks % d.row_blocks,
                  batch = unit / d.chunks / d.row_blocks;
    const float* x = open_shared(s, shared).x + batch * d.x_batch;
    const int64_t first = chunk * d.rows, outer = p.transpose ? s.segments : p.n;
    const int64_t count = min64(d.rows, outer - first);
    switch (d.method) {
      case kDot: return run_dot(p, s, d, shared, x, batch, first, count, static_cast<float*>(own));
      case kMix: return Direct<V>::run(p, s, shared, x, batch, first, count, static_cast<char*>(own));
      case kFew: return run_few(p, s, d, shared, x, batch, first, count, static_cast<char*>(own));
      case kPanels: return run_panels(p, s, d, shared, x, batch, block, first, count, static_cast<char*>(own));
      default: return run_transposed(p, s, d, shared, x, batch, block, first, count, static_cast<char*>(own));
    }
  }

  EQQ_INLINE void write(const Problem& p, int64_t at, float value) {
    if (p.x_type == kFloat32) {
      static_cast<float*>(p.y)[at] = value;
    } else {
      static_cast<uint16_t*>(p.y)[at] = p.x_type == kBFloat16 ? V::one_to_bf16(value) : V::one_to_f16(value);
    }
  }

  static void run_dot(const Problem& p, const Shape& s, const Detail& d, const void* shared, const float* x,
                      int64_t batch, int64_t first, int64_t count, float* own) {
    float results[V::kDirectRows * kMostDots];
    const int64_t weight = first_row(&p, batch);
    if (s.mode != kAnyBlock) {
      const int64_t group = div_up(p.m, div_up(p.m, Direct<V>::kMost));
      for (int64_t m = 0; m < p.m; m += group)
        dot_kernel(p, min64(group, p.m - m))(p, s, shared, x + m * d.x_row, d.x_row, weight + first, count, own,
                                             results + m * kMostDots);
    } else {
      const DecodeRow decode = row_decoder(p);
      const int64_t room = 2 * scale_room(p, s, scale_segments(s));
      float* segment = own + V::kDotRows * room;
      for (int64_t i = 0; i < count; ++i) {
        F sum = V::zero();
        for (int64_t at = 0; at < s.segments; ++at) {
          const int64_t row = weight + first + i;
          const RowScales scales = row_scales(p, s, row, at, at + 1, own);
          decode(p, s, shared, row, at, at + 1, scales, at, own + room, segment);
          for (int64_t j = 0; j < s.codes; j += L)
            sum = V::fma(V::load(segment + j), V::load(x + at * s.codes + j), sum);
        }
        results[i] = V::sum(sum);
      }
    }
    for (int64_t m = 0; m < p.m; ++m)
      for (int64_t i = 0; i < count; ++i)
        write(p, batch * p.y_batch + m * p.y_row + (first + i) * p.y_column, results[m * kMostDots + i]);
  }

  static void run_few(const Problem& p, const Shape& s, const Detail& d, const void* shared, const float* x,
                      int64_t batch, int64_t first, int64_t count, char* own) {
    constexpr int kRows = V::kFewTile;
    float* decoded = reinterpret_cast<float*>(own);
    float* other = decoded + kRows * kChunkStride;
    float* scales = reinterpret_cast<float*>(own + d.scales);
    float* sums = reinterpret_cast<float*>(own + d.sums);
    const DecodeRow decode = row_decoder(p);
    const int64_t group = few_group(p, s);
    const FewFused fused = fused_kernel(p, s, group);
    const int64_t step = d.few_step, scales_step = scale_segments(s), piece = chunk_segments(s);
    const int64_t room = 2 * scale_room(p, s, scales_step), weight = first_row(&p, batch), size = kRows * p.m * L;
    // Scales that are floats can be read where they are, and those of rows side by side be decoded together.
    const bool short_rows = s.mode != kAnyBlock && p.block_size == s.grain && s.whole <= scales_step;
    const bool as_stored = (s.mode == kOneScale || short_rows) && s.whole == s.segments && p.zero_point == nullptr &&
                           p.row_scale == nullptr;
    // With one scale, sums are scaled, not what they are made of.
    const bool scales_sums = fused != nullptr && s.mode == kOneScale && p.bits == 8 && p.k > 0;
    const float one = 1.0f;
    const bool direct = as_stored && p.scale_kind == kScaleFloat32 && per_plane(s.mode) == 1;
    const int64_t grains = s.mode == kOneScale ? 0 : s.codes / s.grain;
    const bool single = group >= p.m;  // then only two segments are kept
    FewStep f;
    f.words = p.words;
    f.room = scales_sums ? 0 : as_stored ? p.blocks : room;
    f.step = grains;
    f.start = 0;
    f.mask = single ? 1 : -1;
    // Some rows together, so that a piece of `x` stays in the nearest cache for them.
    for (int64_t block = 0; block < count; block += kFewBlock) {
      const int64_t some = min64(kFewBlock, count - block), row0 = weight + first + block;
      memset(sums, 0, 4 * div_up(some, kRows) * size);
      // Scales of the next block are fetched meanwhile.
      const int64_t scale_row = p.blocks * scale_bytes(p.scale_kind),
                    after = min64(kFewBlock, weight + p.n - row0 - some);
      const char* fetched = static_cast<const char*>(p.scale) + (row0 + some) * scale_row;
      const char* const fetch_end = fetched + after * scale_row;
      const int64_t steps = div_up(s.segments, step) * div_up(some, kRows);
      const int64_t share = round_up(div_up(after * scale_row, max64(steps, 1)), 64);
      RowScales scale[kFewBlock];
      bool ready = false;  // whether the next first segments are decoded
      int64_t origin = 0;
      for (int64_t segment = 0; segment < s.segments; segment += step) {
        const int64_t end = min64(segment + step, s.segments);
        if (segment % scales_step == 0) {
          origin = segment;
          ready = false;
          float* to = scales + room;
          if (scales_sums) {
            for (int64_t i = 0; i < some; ++i) scale[i].scale = scale[i].zero = &one;
          } else if (as_stored) {
            const float* from = static_cast<const float*>(p.scale) + row0 * p.blocks;
            if (!direct) {
              decode_scales(p, row0, 0, some * p.blocks, to);
              from = to;
            }
            for (int64_t i = 0; i < some; ++i) scale[i].scale = scale[i].zero = from + i * p.blocks;
          } else {
            for (int64_t i = 0; i < some; ++i) scale[i] = whole_scales(p, s, row0 + i, segment, to + i * room);
          }
        }
        const int64_t offset = (segment - origin) * grains;
        const bool continues = end < s.segments && end % scales_step != 0 && min64(end + step, s.segments) <= s.whole;
        for (int64_t r = 0; r < some; r += kRows) {
          const int64_t rows = min64(kRows, some - r), row = row0 + r;
          for (const char* upto = fetched + share; fetched < fetch_end && fetched < upto; fetched += 64)
            V::prefetch(fetched);
          float* tile_sums = sums + r / kRows * size;
          const float* xs = x + segment * s.codes;
          if (fused != nullptr && rows == kRows && end <= s.whole) {
            f.bytes = p.codes + row * p.words + segment * kSegment;
            f.scale = scale[r].scale + offset;
            f.decoded = decoded;
            f.segments = end - segment;
            if (!ready)
              for (int64_t i = 0; i < kRows; ++i)
                decode(p, s, shared, row + i, segment, segment + 1, scale[r + i], origin, scales,
                       decoded + (f.start & f.mask) * s.codes + i * kChunkStride);
            const bool below = r + 2 * kRows <= some;
            ready = below || (r + kRows >= some && continues);
            f.next = f.bytes;
            f.next_scale = f.scale;
            if (ready) {
              const int64_t at = below ? r + kRows : 0;
              f.next = p.codes + (row0 + at) * p.words + (below ? segment : end) * kSegment;
              f.next_scale = scale[at].scale + (below ? offset : (end - origin) * grains);
            }
            f.ahead = ready ? f.next : p.codes + min64(row + kRows, weight + p.n - kRows) * p.words;
            f.next_decoded = single ? decoded + ((f.start + f.segments) & 1) * s.codes : other;
            fused(f, table256(shared), xs, d.x_row, tile_sums);
            for (int64_t m = group; m < p.m; m += group)
              few_kernel(min64(group, p.m - m))(decoded, xs + m * d.x_row, d.x_row, span(s, segment, end),
                                                tile_sums + m * kRows * L);
            if (single) {
              f.start = (f.start + f.segments) & 1;
            } else {
              float* swap = decoded;
              decoded = other;
              other = swap;
            }
            continue;
          }
          ready = false;
          for (int64_t from = segment; from < end; from += piece, xs += piece * s.codes) {
            const int64_t to = min64(from + piece, end);
            for (int64_t i = 0; i < kRows; ++i) {
              const int64_t at = min64(i, rows - 1), next = min64(row + at + kRows, weight + p.n - 1);
              for (int64_t j = from; j < min64(to, s.whole); ++j) V::prefetch(p.codes + next * p.words + j * kSegment);
              decode(p, s, shared, row + at, from, to, scale[r + at], origin, scales, decoded + i * kChunkStride);
            }
            for (int64_t m = 0; m < p.m; m += group)
              few_kernel(min64(group, p.m - m))(decoded, xs + m * d.x_row, d.x_row, span(s, from, to),
                                                tile_sums + m * kRows * L);
          }
        }
      }
      float factors[kFewBlock];
      if (scales_sums)
        for (int64_t i = 0; i < some; ++i) decode_scales(p, row0 + i, 0, 1, factors + i);
      for (int64_t r = 0; r < some; r += kRows) {
        const int64_t rows = min64(kRows, some - r);
        for (int64_t start = 0; start < p.m; start += group) {
          const int64_t width = min64(group, p.m - start);
          for (int64_t m = 0; m < width; ++m) {
            const float* from = sums + r / kRows * size + (start * kRows + m) * L;
            float totals[kRows];
            if constexpr (V::kSumsRows) {
              static_assert(kRows == V::kDotRows, "sum_rows takes as many");
              F a[kRows];
              for (int i = 0; i < kRows; ++i) a[i] = V::load(from + i * width * L);
              V::sum_rows(a, totals);
            } else {
              for (int i = 0; i < kRows; ++i) totals[i] = V::sum(V::load(from + i * width * L));
            }
            const int64_t at = batch * p.y_batch + (start + m) * p.y_row + (first + block + r) * p.y_column;
            for (int64_t i = 0; i < rows; ++i)
              write(p, at + i * p.y_column, scales_sums ? scaled(totals[i], factors[r + i]) : totals[i]);
          }
        }
      }
    }
  }

  static void run_panels(const Problem& p, const Shape& s, const Detail& d, const void* shared, const float* x,
                         int64_t batch, int64_t block, int64_t first, int64_t count, char* own) {
    float* decoded = reinterpret_cast<float*>(own);
    float* scales = reinterpret_cast<float*>(own + d.scales);
    float* sums = reinterpret_cast<float*>(own + d.sums);
    const DecodeRow decode = row_decoder(p);
    const int64_t start = block * kRowBlock, rows = min64(kRowBlock, d.m_padded - start);
    const int64_t step = chunk_segments(s), scales_step = scale_segments(s);
    const int64_t room = 2 * scale_room(p, s, scales_step), weight = first_row(&p, batch);
    memset(sums, 0, 4 * count * rows);
    RowScales scale[kMostRows];
    int64_t origin = 0;
    for (int64_t segment = 0; segment < s.segments; segment += step) {
      const int64_t end = min64(segment + step, s.segments), length = span(s, segment, end);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = weight + first + i;
        if (segment % scales_step == 0) {
          origin = segment;
          scale[i] = whole_scales(p, s, row, segment, scales + (i + 1) * room);
        }
        decode(p, s, shared, row, segment, end, scale[i], origin, scales, decoded + i * kChunkStride);
        // What comes next: the next piece of this row, or the first of one of the next unit.
        const uint8_t* next = p.codes + (end < s.whole ? row * p.words + end * kSegment
                                                       : min64(row + d.rows, weight + p.n - 1) * p.words);
        for (int64_t j = 0; j < min64(step, s.whole); ++j) V::prefetch(next + j * kSegment);
      }
      for (int64_t m = 0; m < rows; m += 2 * L) {
        const int64_t lanes = min64(2 * L, rows - m);
        const float* panel = x + (start + m) * s.padded + segment * s.codes * lanes;
        if (lanes == L) {
          tiles<1, V::kTileRows1, kChunkStride>(count, decoded, panel, L, length, sums + m, rows);
        } else {
          tiles<2, V::kTileRows, kChunkStride>(count, decoded, panel, 2 * L, length, sums + m, rows);
        }
      }
    }
    const int64_t base = batch * p.y_batch + start * p.y_row + first * p.y_column, real = min64(rows, p.m - start);
    const int64_t whole = p.x_type == kFloat32 ? real / L * L : 0;
    if (p.y_row == 1) {
      for (int64_t i = 0; i < count; ++i) {
        const int64_t at = base + i * p.y_column;
        for (int64_t m = 0; m < whole; m += L)
          V::store(static_cast<float*>(p.y) + at + m, V::load(sums + i * rows + m));
        for (int64_t m = whole; m < real; ++m) write(p, at + m, sums[i * rows + m]);
      }
    } else {
      const int64_t squares = p.y_column == 1 ? count / L * L : 0;
      for (int64_t m = 0; m < whole; m += L)
        for (int64_t i = 0; i < squares; i += L) {
          F a[L];
#pragma GCC unroll 16
          for (int r = 0; r < L; ++r) a[r] = V::load(sums + (i + r) * rows + m);
          transpose(a);
#pragma GCC unroll 16
          for (int r = 0; r < L; ++r) V::store(static_cast<float*>(p.y) + base + (m + r) * p.y_row + i, a[r]);
        }
      for (int64_t m = 0; m < real; ++m)
        for (int64_t i = m < whole ? squares : 0; i < count; ++i)
          write(p, base + m * p.y_row + i * p.y_column, sums[i * rows + m]);
    }
  }

  // Fetches segments `first` to `last` of a row, and where their scales begin. Inlined, it would take registers of
  // tiles; and a compiler may drop calls of what does nothing but fetch.
  static __attribute__((noinline)) void fetch_row(const Problem& p, const Shape& s, int64_t row, int64_t first,
                                                  int64_t last) {
    for (int64_t j = first; j < last; ++j) V::prefetch(p.codes + row * p.words + j * kSegment);
    const int64_t scale = row * p.blocks + first * s.codes / p.block_size;
    V::prefetch(static_cast<const char*>(p.scale) + scale * scale_bytes(p.scale_kind));
    __asm__ volatile("");
  }

  static void run_transposed(const Problem& p, const Shape& s, const Detail& d, const void* shared, const float* x,
                             int64_t batch, int64_t block, int64_t first, int64_t count, char* own) {
    float* decoded = reinterpret_cast<float*>(own);
    float* scales = reinterpret_cast<float*>(own + d.scales);
    float* sums = reinterpret_cast<float*>(own + d.sums);
    const DecodeRow decode = row_decoder(p);
    const int64_t start = block * kRowBlock, rows = min64(kRowBlock, p.m - start), width = count * s.codes;
    const int64_t room = 2 * scale_room(p, s, d.rows), weight = first_row(&p, batch);
    memset(sums, 0, 4 * rows * width);
    for (int64_t n = 0; n < p.n; n += kRowChunk) {
      const int64_t some = min64(kRowChunk, p.n - n);
      for (int64_t i = 0; i < some; ++i) {
        const int64_t row = weight + n + i, end = min64(first + count, s.whole);
        RowScales r = {scales, scales};
        if (first < end) r = row_scales(p, s, row, first, end, scales);
        fetch_row(p, s, min64(row + kRowChunk, weight + p.n - 1), first, end);
        decode(p, s, shared, row, first, first + count, r, first, scales + room, decoded + i * width);
      }
      const float* xs = x + (n / kRowChunk * p.m + start) * kRowChunkStride;
      if (rows <= V::kWideRows) {
        for (int64_t c = 0; c < width; c += 4 * L)
          tiles<4, V::kWideRows, kRowChunkStride>(rows, xs, decoded + c, width, some, sums + c, width);
      } else {
        for (int64_t c = 0; c < width; c += 2 * L)
          tiles<2, V::kTileRows, kRowChunkStride>(rows, xs, decoded + c, width, some, sums + c, width);
      }
    }
    write_turned(p, s, batch, start, rows, first, count, sums, width);
  }

  // Writes results of rows `start` to `start + rows` of x, and of segments of the weight in the order of decoding.
  static void write_turned(const Problem& p, const Shape& s, int64_t batch, int64_t start, int64_t rows, int64_t first,
                           int64_t count, const float* sums, int64_t width) {
    int64_t at[512];
    for (int64_t segment = first; segment < first + count; ++segment) {
      // The same in all whole segments.
      if (segment == first || segment >= s.whole)
        for (int64_t i = 0; i < s.codes; ++i) at[i] = logical(p, s, segment, i) - segment * s.codes;
      const float* from = sums + (segment - first) * s.codes;
      for (int64_t m = 0; m < rows; ++m) {
        const int64_t base = batch * p.y_batch + (start + m) * p.y_row + segment * s.codes * p.y_column;
        for (int64_t i = 0; i < s.codes; ++i)
          if (at[i] >= 0) write(p, base + at[i] * p.y_column, from[m * width + i]);
      }
    }
  }

  //
  // Decoding to a dense weight
  //

  static void plan_decode(const Problem* problem, int64_t threads, Plan* out) {
    const Problem& p = *problem;
    const Shape s = shape_of(p);
    const int64_t rows = p.batch * p.n, most = max64(1, (int64_t(1) << 17) / p.k);
    out->detail[0] = min64(most, div_up(rows, 4 * threads));  // rows of a unit
    out->shared_bytes = shared_header(s);
    out->own_bytes = aligned(4 * (2 * 2 * scale_room(p, s, scale_segments(s)) + 2 * kChunk + s.codes));
    out->parts = 1;
    out->units = div_up(rows, out->detail[0]);
  }

  static void prepare_decode(const Problem* problem, const Plan*, void* shared, int64_t) {
    prepare_tables(*problem, shape_of(*problem), shared);
  }

  static void run_decode(const Problem* problem, const Plan* plan, const void* shared, void* own, int64_t unit) {
    const Problem& p = *problem;
    const Shape s = shape_of(p);
    const int64_t first = unit * plan->detail[0], last = min64(first + plan->detail[0], p.batch * p.n);
    const int64_t step = chunk_segments(s), scales_step = scale_segments(s), room = 2 * scale_room(p, s, scales_step);
    float* scales = static_cast<float*>(own);
    float* decoded = scales + 2 * room;
    float* ordered = decoded + kChunk;
    int32_t* order = reinterpret_cast<int32_t*>(ordered + kChunk);  // of the last segment, if it is cut short
    if (s.whole < s.segments)
      for (int64_t i = 0; i < s.codes; ++i) order[i] = static_cast<int32_t>(logical(p, s, s.whole, i));
    const DecodeRow decode = row_decoder(p);
    for (int64_t at = first; at < last; ++at) {
      const int64_t row = first_row(&p, at / p.n) + at % p.n;
      RowScales scale = {scales, scales};
      int64_t origin = 0;
      for (int64_t segment = 0; segment < s.segments; segment += step) {
        const int64_t end = min64(segment + step, s.segments);
        if (segment % scales_step == 0) {
          origin = segment;
          scale = whole_scales(p, s, row, segment, scales + room);
        }
        decode(p, s, shared, row, segment, end, scale, origin, scales, decoded);
        const int64_t start = segment * s.codes;
        for (int64_t i = segment; i < end; ++i) {
          const float* from = decoded + (i - segment) * s.codes;
          float* to = ordered + (i - segment) * s.codes;
          if (i >= s.whole) {
            for (int64_t j = 0; j < s.codes; ++j)
              if (order[j] >= 0) ordered[order[j] - start] = from[j];
          } else if (p.bits == 8) {
            memcpy(to, from, 4 * kSegment);
          } else {
            for (int64_t h = 0; h < kHalves; ++h)
              for (int64_t plane = 0; plane < s.planes; ++plane, from += 4 * L)
                interleave(from, to + plane * kSegment + h * 4 * L);
          }
        }
        write_row(p, at * p.k + start, ordered, min64(end * s.codes, p.k) - start);
      }
    }
  }

  // Bytes of a segment in the order in which `bytes` has them in its lanes, back to the order in memory.
  EQQ_INLINE void interleave(const float* from, float* to) {
    for (int j = 0; j < L; ++j)
      for (int c = 0; c < 4; ++c) to[4 * j + c] = from[c * L + j];
  }

  static void write_row(const Problem& p, int64_t at, float* values, int64_t count) {
    if (p.clip) {
      const float limit = p.x_type == kFloat16  ? 65504.0f
                        : p.x_type == kBFloat16 ? 3.3895313892515355e38f
                                                : 3.4028234663852886e38f;
      for (int64_t i = 0; i < count; ++i) {  // NaN stays
        const float v = values[i], below = v > limit ? limit : v;
        values[i] = below < -limit ? -limit : below;
      }
    }
    if (p.x_type == kFloat32) {
      memcpy(static_cast<float*>(p.y) + at, values, 4 * count);
    } else if (p.x_type == kBFloat16) {
      uint16_t* y = static_cast<uint16_t*>(p.y) + at;
      for (int64_t i = 0; i < count; ++i) y[i] = V::one_to_bf16(values[i]);
    } else {
      uint16_t* y = static_cast<uint16_t*>(p.y) + at;
      for (int64_t i = 0; i < count; ++i) y[i] = V::one_to_f16(values[i]);
    }
  }
};

}  // namespace

#include "float/direct.h"

#endif  // EQQUANT_KERNELS_H_
