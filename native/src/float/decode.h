// Decodes rows of the weight to floats: the order of decoding, scales, and segments of codes.
#pragma once

#include "core/runs.h"
#include "float/layout.h"

namespace {

template <class V>
struct Decode {
  using F = typename V::F;
  using Codes = typename V::Codes;
  using Table = typename V::Table;
  static constexpr int L = V::L;
  static constexpr int kHalves = 16 / L;  // vectors of bytes in a segment

  // Whether scales and zero points apply to decoded values, and not to the table.
  static constexpr bool after_lookup(Mode mode) {
    return per_plane(mode) > 1 || (mode == kUniform && !V::kScalesTables);
  }

  static Shape shape_of(const Problem& p) { return ::shape_of(p, V::kDirectRows); }

  //
  // Order
  //

  // Finds the byte of a segment, and the plane, of the code at position `i` in the order of decoding.
  EQQ_INLINE void position(int bits, int64_t i, int64_t* byte, int64_t* plane) {
    if (bits == 8) {
      *byte = i;
      *plane = 0;
      return;
    }
    const int shift = bits == 4 ? 1 : bits == 2 ? 2 : 3;  // of powers of two: small products wait for divisions
    const int64_t lane = i % L, vector = i / L, c = vector % 4, h = vector >> (2 + shift);
    *plane = (vector >> 2) & ((1 << shift) - 1);
    *byte = 4 * L * h + 4 * lane + c;
  }

  // Returns the logical position of code `i` of a segment in the order of decoding, or -1 for padding.
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

  static int64_t shared_header(const Shape& s) { return aligned(2048 + 4 * (indices(s) + 2) * s.codes); }

  static Shared open_shared(const Shape& s, const void* memory) {
    Shared r;
    char* bytes = static_cast<char*>(const_cast<void*>(memory));
    r.index = reinterpret_cast<int32_t*>(bytes + 2048);
    r.mask = r.index + indices(s) * s.codes;
    r.place = r.mask + s.codes;
    r.x = reinterpret_cast<float*>(bytes + shared_header(s));
    return r;
  }

  EQQ_INLINE const float* table256(const void* shared) { return static_cast<const float*>(shared); }

  //
  // Scales
  //

  // Decodes the scales of blocks `first` to `last` of a row. Kernels for all kinds of codes share this and
  // `last_scales`: a copy in each would be half of the library, and takes as long to compile.
  EQQ_NOINLINE void decode_scales(const Problem& p, int64_t row, int64_t first, int64_t last, float* out) {
    switch (p.scale_kind) {
      case kScaleFloat16: return decode_kind<kScaleFloat16>(p, row, first, last, out);
      case kScaleBFloat16: return decode_kind<kScaleBFloat16>(p, row, first, last, out);
      case kScaleE8M0: return decode_kind<kScaleE8M0>(p, row, first, last, out);
      case kScaleE4M3: return decode_kind<kScaleE4M3>(p, row, first, last, out);
      case kScaleE5M2: return decode_kind<kScaleE5M2>(p, row, first, last, out);
      case kScaleUE4M4: return decode_kind<kScaleUE4M4>(p, row, first, last, out);
      default: return decode_kind<kScaleFloat32>(p, row, first, last, out);
    }
  }

  template <int kKind>
  EQQ_INLINE void decode_kind(const Problem& p, int64_t row, int64_t first, int64_t last, float* out) {
    const int64_t count = last - first, at = row * p.blocks + first, size = scale_bytes(kKind);
    const F factor = V::broadcast(p.row_scale ? p.row_scale[row] : 1.0f);
    const uint8_t* bits = static_cast<const uint8_t*>(p.scale) + at * size;
    int64_t i = 0;
    for (; i + L <= count; i += L) V::store(out + i, V::mul(load_scales(kKind, bits + i * size), factor));
    if (i < count) {
      uint8_t rest[4 * L] = {0};
      float values[L];
      memcpy(rest, bits + i * size, (count - i) * size);
      V::store(values, V::mul(load_scales(kKind, rest), factor));
      memcpy(out + i, values, (count - i) * 4);
    }
  }

  EQQ_INLINE F load_scales(int kind, const uint8_t* bits) {
    switch (kind) {
      case kScaleFloat16: return V::f16(bits);
      case kScaleBFloat16: return V::bf16(bits);
      case kScaleE8M0: return V::e8m0(bits);
      case kScaleE4M3: return V::e4m3(bits);
      case kScaleE5M2: return V::e5m2(bits);
      case kScaleUE4M4: return V::ue4m4(bits);
      default: return V::load(bits);
    }
  }

  // Repeats the value of each block for its `ratio` grains, from grain `skip` of the first block on: `grains` values.
  static void expand(const float* blocks, int64_t ratio, int64_t skip, int64_t grains, float* out) {
    for (int64_t g = 0; g < grains; ++blocks) {
      const int64_t end = min64(g + ratio - skip, grains);
      for (; g < end; ++g) out[g] = *blocks;
      skip = 0;
    }
  }

  // Pointers to the scales and zero points of some segments of a row, laid out for their mode.
  struct RowScales {
    const float* scale;
    const float* zero;
  };

  // The number of floats that `row_scales` needs for one kind.
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

  // The scales of a plane in their lanes.
  template <Mode kMode>
  EQQ_INLINE F spread(const float* scale, typename V::Lanes lanes) {
    return per_plane(kMode) > 1 ? V::spread(scale, lanes) : V::broadcast(*scale);
  }

  // The scales of a partial last segment.
  EQQ_NOINLINE RowScales last_scales(const Problem& p, const Shape& s, int64_t row, float* scratch) {
    return row_scales(p, s, row, s.whole, s.segments, scratch);
  }

  // The scales of the whole segments among the next `scale_segments`.
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
      fetch<kZeros>(p, row, block, end, scratch);  // codes find them by index, as always in the tail
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

  // Decodes a vector of codes of eight bits, which are in logical order.
  template <int kValues>
  EQQ_INLINE F decode_bytes(const uint8_t* p, const float* table, F offset) {
    if (V::kLooksUpBytes || V::kTablesOfBytes) return V::bytes256(p, table);
    if (kValues == kValueInteger) return V::add(V::integers(p), offset);
    if (kValues == kValueE4M3) return V::e4m3(p);
    if (kValues == kValueE5M2) return V::e5m2(p);
    return V::bytes256(p, table);
  }

  // Decodes a segment of codes of eight bits.
  template <int kValues>
  EQQ_INLINE void decode_all_bytes(const uint8_t* p, const float* table, F offset, F* out) {
    if constexpr (V::kTablesOfBytes) {
      V::template decode64<kValues == kValueTable ? 4 : 2>(p, reinterpret_cast<const uint8_t*>(table + 256), out);
    } else {
#pragma GCC unroll 16
      for (int v = 0; v < 64 / L; ++v) out[v] = decode_bytes<kValues>(p + v * L, table, offset);
    }
  }

  // Decodes a segment to `out`, in the order of decoding. With `kOneScale`, codes of eight bits are neither scaled nor
  // shifted; the scale of others is in the table.
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
        } else if (kMode != kOneScale) {  // with one scale, the caller scales
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
        const Codes codes = V::codes(bytes + 4 * L * h);
        const typename V::Lanes lanes = V::lanes(h, per_plane(kMode));
        decode_planes<kBits, kMode, kZero, kMask, 0>(codes, lanes, table, scale, zero, index + h * kPlanes * 4 * L,
                                                     mask + h * kPlanes * 4 * L, out + h * kPlanes * 4 * L);
      }
    }
  }

  template <int kBits, Mode kMode, bool kZero, bool kMask, int kVector>
  EQQ_INLINE void decode_planes(Codes codes, typename V::Lanes lanes, const Table& table, const float* scale,
                                const float* zero, const int32_t* index, const int32_t* mask, float* out) {
    constexpr int kPlanes = 8 / kBits;
    if constexpr (kVector < kPlanes) {
      Table t = table;
      F s = V::zero(), z = V::zero();
      if constexpr (kMode == kUniform && V::kScalesTables) {
        if (kZero) t = V::offset(t, V::broadcast(zero[kVector]));
        t = V::scale(t, V::broadcast(scale[kVector]));
      } else if constexpr (after_lookup(kMode)) {
        s = spread<kMode>(scale + per_plane(kMode) * kVector, lanes);
        if (kZero) z = spread<kMode>(zero + per_plane(kMode) * kVector, lanes);
      }
      decode_four<kBits, kMode, kZero, kMask, kVector, 0>(codes, t, s, z, scale, zero, index, mask, out);
      decode_planes<kBits, kMode, kZero, kMask, kVector + 1>(codes, lanes, table, scale, zero, index, mask, out);
    }
  }

  template <int kBits, Mode kMode, bool kZero, bool kMask, int kPlaneIndex, int kByte>
  EQQ_INLINE void decode_four(Codes codes, const Table& t, F s, F z, const float* scale, const float* zero,
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

  // Decodes segments `first` to `last` of a row to floats. `r` has the scales of its segments from `origin` on; scales
  // of a partial last segment are decoded to `scratch`.
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
    if (last > s.whole)
      decode_last<kBits, kValues, kZero>(p, s, shared, row, scratch, out + (s.whole - first) * s.codes);
  }

  // Decodes a partial last segment to its order.
  template <int kBits, int kValues, bool kZero>
  static void decode_last(const Problem& p, const Shape& s, const void* shared, int64_t row, float* scratch,
                          float* out) {
    if (s.tail == s.codes) return decode_tail<kBits, kValues, kZero>(p, s, shared, row, scratch, out);
    const int64_t real = p.k - s.whole * s.codes;
    if (s.mode == kAnyBlock) {
      float tail[512];
      decode_tail<kBits, kValues, kZero>(p, s, shared, row, scratch, tail);
      for (int64_t i = 0; i < real; ++i) out[i] = tail[open_shared(s, shared).place[i]];
    } else {
      decode_in_order<kBits, kValues, kZero>(p, s, table256(shared), row, scratch, out);
    }
    for (int64_t i = real; i < s.tail; ++i) out[i] = 0.0f;
  }

  // Decodes a partial last segment to logical order, where each vector of that is of one block; writes whole vectors.
  template <int kBits, int kValues, bool kZero>
  static void decode_in_order(const Problem& p, const Shape& s, const float* values, int64_t row, float* scratch,
                              float* out) {
    const int64_t begin = s.whole * s.codes, block = begin / p.block_size;
    RowScales r;
    if (!kZero && p.scale_kind == kScaleFloat32 && p.row_scale == nullptr) {
      r.scale = r.zero = static_cast<const float*>(p.scale) + row * p.blocks + block;
    } else {
      r = last_scales(p, s, row, scratch);
    }
    uint8_t packed[kSegment] = {0}, codes[(8 / kBits + 1) * kSegment];
    memcpy(packed, p.codes + row * p.words + s.whole * kSegment, s.tail_bytes);
    unpack_segment<kBits>(packed, s.tail_bytes, 0, codes);
    const F offset = V::broadcast(values[0]);
    int64_t at = 0, left = (block + 1) * p.block_size - begin;  // of the block
    for (int64_t i = 0; i < p.k - begin; i += L, left -= L) {
      if (left == 0) {
        ++at;
        left = p.block_size;
      }
      F w;
      if constexpr (kBits == 8) {
        w = decode_bytes<kValues>(codes + i, values, offset);
      } else {
        w = V::bytes16(codes + i, values);
      }
      if (kZero) w = V::sub(w, V::broadcast(r.zero[at]));
      V::store(out + i, V::mul(w, V::broadcast(r.scale[at])));
    }
  }

  // Decodes a partial last segment to the order of decoding.
  template <int kBits, int kValues, bool kZero>
  static void decode_tail(const Problem& p, const Shape& s, const void* shared, int64_t row, float* scratch,
                          float* out) {
    const Shared common = open_shared(s, shared);
    const int64_t at = (indices(s) - 1) * s.codes;
    uint8_t bytes[kSegment] = {0};
    memcpy(bytes, p.codes + row * p.words + s.whole * kSegment, s.tail_bytes);
    const float* values = table256(shared);
    const RowScales r = last_scales(p, s, row, scratch);
    decode_segment<kBits, kValues, kAnyBlock, kZero, true>(bytes, values, V::table(values), r.scale, r.zero,
                                                           common.index + at, common.mask, out);
  }

  // Scales a sum of codes. An infinite scale makes NaN of a code of zero, even if the sum is not zero.
  EQQ_INLINE float scaled(float sum, float scale) { return sum * scale + 0.0f * scale; }

  using DecodeRow = void (*)(const Problem&, const Shape&, const void*, int64_t, int64_t, int64_t, RowScales, int64_t,
                             float*, float*);
  using DecodeLast = void (*)(const Problem&, const Shape&, const void*, int64_t, float*, float*);

  // Instantiates a template for the codes of a problem: calls `choose(CodeKind<bits, values, zero>())`.
  template <int bits, int values, bool zero>
  struct CodeKind {
    static constexpr int kBits = bits, kValues = values;
    static constexpr bool kZero = zero;  // whether there are zero points
  };

  template <class Choose>
  static auto by_codes(const Problem& p, const Choose& choose) {
    return p.zero_point != nullptr ? by_values<true>(p, choose) : by_values<false>(p, choose);
  }

  template <bool kZero, class Choose>
  static auto by_values(const Problem& p, const Choose& choose) {
    if constexpr (!V::kTablesOfBytes) {
      switch (p.bits) {
        case 1: return choose(CodeKind<1, 0, kZero>());
        case 2: return choose(CodeKind<2, 0, kZero>());
        case 4: return choose(CodeKind<4, 0, kZero>());
      }
    }
    constexpr bool kConverts = !V::kTablesOfBytes && !V::kLooksUpBytes;
    if constexpr (kConverts)
      if (p.values == kValueInteger) return choose(CodeKind<8, kValueInteger, kZero>());
    if constexpr (!kZero && !V::kLooksUpBytes) {  // no floats have zero points
      if (p.values == kValueE4M3) return choose(CodeKind<8, kValueE4M3, kZero>());
      // Bytes of tables are looked up alike.
      if (p.values == kValueE5M2) return choose(CodeKind<8, kConverts ? kValueE5M2 : kValueE4M3, kZero>());
    }
    return choose(CodeKind<8, kValueTable, kZero>());
  }

  static DecodeRow row_decoder(const Problem& p) {
    return by_codes(p, [&](auto codes) -> DecodeRow {
      using C = decltype(codes);
      return decode_row<C::kBits, C::kValues, C::kZero>;
    });
  }
};

}  // namespace
