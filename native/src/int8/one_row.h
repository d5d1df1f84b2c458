// One row of `x`: codes are decoded in registers, one row of the weight after the other as they lie in memory.
#pragma once

#include "int8/weight.h"
#include "int8/x.h"

namespace {

template <class V>
struct Int8OneRow {
  using X = Int8X<V>;
  using W = Int8Weight<V>;
  using I = typename V::I;
  using F = typename V::F;
  static constexpr int L = V::L;

  static constexpr int64_t kScaleCodes = 4096;         // of a row, whose scales are decoded at a time
  static constexpr bool kToL2 = V::kRegisterRows > 2;  // with AVX-512: its prefetches are too many for L1

  EQQ_INLINE void prefetch(const uint8_t* w, bool to_l1) {
    if (to_l1) {
      __builtin_prefetch(w);
    } else {
      __builtin_prefetch(w, 0, 2);
    }
  }

  // Whether all vectors of codes are whole blocks or parts of one, with sums by lanes.
  static bool in_registers(const Int8Problem& q, const Runs& r) {
    const Problem& p = q.p;
    if (!V::kInRegisters || q.affine || p.m != 1 || r.per_block != 1) return false;
    if (!W::fits(p)) return false;
    if (r.count == 1) return true;
    if (!by_lanes(r) || r.size != r.real) return false;
    const TailGroups t = tail_groups(p);
    return (r.size <= 64 || t.first % r.size == 0) && (t.count == 0 || t.groups > 0);
  }

  // The bytes of x for a partial last segment: codes, and their sums by lanes.
  EQQ_INLINE int64_t tail_bytes(const Int8Problem& q, const Runs& r) {
    const int64_t planes = 8 / q.p.bits;
    return r.count > 1 && q.p.k % (64 * planes) > 0 ? planes * (64 + 4 * L) : 0;
  }

  // Writes them from packed x: planes are padded with zeros.
  static void pack_tail(const Problem& p, int32_t factor, const uint8_t* x, uint8_t* out) {
    const TailGroups t = tail_groups(p);
    memset(out, 0, 64 * t.planes);
    for (int64_t at = 0; at < t.count; at += t.plane)
      memcpy(out + 64 * (at / t.plane), x + t.first + at, min64(t.plane, t.count - at));
    int32_t* lanes = reinterpret_cast<int32_t*>(out + 64 * t.planes);
    for (int64_t i = 0; i < t.planes * L; ++i) lanes[i] = factor * sum_of_four(out + 4 * i);
  }

  // The sum of products of codes, of a row that has one scale.
  template <int kBits, bool kLookUp>
  static int32_t one_scale(const Problem& p, const uint8_t* w, const uint8_t* x, I table) {
    constexpr int kPlanes = 8 / kBits, kTogether = kPlanes >= 4 ? 1 : 4 / kPlanes, kSums = kTogether * kPlanes;
    const int64_t segments = p.k / (64 * kPlanes), rest = p.words - 64 * segments;
    I acc[kSums];
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) acc[i] = V::zero_int();
    int64_t s = 0;
    for (; s + kTogether <= segments; s += kTogether) {
#pragma GCC unroll 4
      for (int j = 0; j < kTogether; ++j) {
        prefetch(w + 64 * (s + j) + (kToL2 ? kFar : kAhead), !kToL2);
        const I bytes = V::load_int(w + 64 * (s + j));
#pragma GCC unroll 8
        for (int i = 0; i < kPlanes; ++i) {
          I c = V::template byte_codes<kBits>(bytes, i);
          if (kLookUp) c = V::lookup_bytes(table, c);
          acc[j * kPlanes + i] = V::dot(acc[j * kPlanes + i], c, V::load_int(x + 64 * ((s + j) * kPlanes + i)));
        }
      }
    }
    for (; 64 * s < p.words; ++s) {
      // The planes of a last segment that is cut short are short as well.
      const int64_t plane = s < segments ? 64 : rest;
      const I bytes = V::load_int(w + 64 * s, plane);
#pragma GCC unroll 8
      for (int i = 0; i < kPlanes; ++i) {
        const int64_t at = 64 * s * kPlanes + i * plane, count = min64(plane, p.k - at);
        if (count <= 0) continue;
        I c = V::template byte_codes<kBits>(bytes, i);
        if (kLookUp) c = V::lookup_bytes(table, c);
        acc[i] = V::dot(acc[i], c, V::load_int(x + at, count));
      }
    }
#pragma GCC unroll 8
    for (int i = 1; i < kSums; ++i) acc[0] = V::add(acc[0], acc[i]);
    return V::sum(acc[0]);
  }

  // Sums of scaled products of `kRegisterRows` rows in blocks: `kBlocks` in a vector, or with 0 one in several vectors.
  // The rows share what is loaded of `x`. Rows past `count` are the last one again. `decoded`: the scales of the rows,
  // one row's behind another's; or null, then they are decoded here, a step at a time. `biases`: likewise the
  // offsets of their codes.
  template <int kBits, bool kLookUp, int kBlocks, bool kZero>
  static void many_scales(const Problem& p, const Runs& r, const Integers& v, int64_t row, int64_t count,
                          const uint8_t* x, const int32_t* lanes, const float* decoded, const int32_t* biases, I table,
                          float* out) {
    constexpr int kPlanes = 8 / kBits, kRows = V::kRegisterRows, kRoom = kScaleCodes / 16 + 32 * kPlanes;
    constexpr int kScales = kBlocks > 0 ? kBlocks : 1;  // of a vector
    const int64_t per = kBlocks > 0 ? 1 : r.size / 64, step = round_up(kScaleCodes, r.size * kPlanes);
    // The next rows, as they lie in memory: a line of each in turn would double the time where the weight is not
    // cached.
    const int64_t ahead = max64(kToL2 ? kFar : kNear, kRows * p.words);
    float room[kRows * kRoom];
    int32_t offset[kRows][kZero ? kRoom : 1];
    const float* scale[kRows];
    const int32_t* bias[kRows];
    const uint8_t* w[kRows];
    F sums[kRows];
    I acc[kRows];
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      w[i] = p.codes + (row + min64(i, count - 1)) * p.words;
      sums[i] = V::zero();
      acc[i] = V::zero_int();
    }
    for (int64_t from = 0; from < p.k; from += step) {
      const int64_t to = min64(from + step, p.k), first = from / r.size, last = div_up(to, r.size);
      for (int i = 0; i < kRows; ++i) {
        const int64_t at = min64(i, count - 1);
        scale[i] = decoded != nullptr ? decoded + at * p.blocks + first : room + i * kRoom;
        if (decoded == nullptr) V::scales(&p, row + at, first, last, room + i * kRoom);
        bias[i] = biases != nullptr ? biases + at * p.blocks + first : offset[i];
        if (kZero && biases == nullptr) W::offsets(p, v, row + at, first, last, offset[i]);
      }
      int64_t block = 0, of_block = 0;  // of this step; vectors of the block so far
      for (int64_t s = from / (64 * kPlanes); s * 64 * kPlanes < to; ++s) {
        I bytes[kRows];
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          prefetch(w[0] + 64 * (s * kRows + i) + ahead, ahead == kNear);
          bytes[i] = V::load_int(w[i] + 64 * s);
        }
#pragma GCC unroll 8
        for (int plane = 0; plane < kPlanes; ++plane) {
          if (kBlocks > 0 || of_block == 0) {
            const I lane = V::load_int(lanes + (first / kScales + block) * L);
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i)
              acc[i] = kZero ? V::mul(lane, W::several(bias[i] + block * kScales, kScales)) : lane;
          }
          const I xs = V::load_int(x + 64 * (s * kPlanes + plane));
          const bool ends = kBlocks > 0 || ++of_block == per;
#pragma GCC unroll 8
          for (int i = 0; i < kRows; ++i) {
            I c = V::template byte_codes<kBits>(bytes[i], plane);
            if (kLookUp) c = V::lookup_bytes(table, c);
            acc[i] = V::dot(acc[i], c, xs);
            if (ends) sums[i] = V::fma(V::to_float(acc[i]), W::several(scale[i] + block * kScales, kScales), sums[i]);
          }
          if (ends) {
            of_block = 0;
            ++block;
          }
        }
      }
    }
    for (int i = 0; i < kRows; ++i) out[i] = V::sum(sums[i]);
  }

  using ManyScales = void (*)(const Problem&, const Runs&, const Integers&, int64_t, int64_t, const uint8_t*,
                              const int32_t*, const float*, const int32_t*, I, float*);
  template <int kBits, bool kLookUp, bool kZero>
  EQQ_INLINE ManyScales scales_of(int64_t size) {
    return size == 64 ? many_scales<kBits, kLookUp, 1, kZero>
         : size == 32 ? many_scales<kBits, kLookUp, 2, kZero>
         : size == 16 ? many_scales<kBits, kLookUp, 4, kZero>
                      : many_scales<kBits, kLookUp, 0, kZero>;
  }
  template <int kBits, bool kLookUp>
  EQQ_INLINE ManyScales scales_of(const Problem& p, int64_t size) {
    return p.zero_point != nullptr ? scales_of<kBits, kLookUp, true>(size) : scales_of<kBits, kLookUp, false>(size);
  }

  // Adds the products of a partial last segment of rows with blocks.
  static void add_tail(const Problem& p, const TailGroups& t, const Runs& r, const Integers& v, int64_t row,
                       int64_t count, const uint8_t* x, const float* decoded, const int32_t* biases,
                       ManyScales multiply, I table, float* sums) {
    constexpr int kRows = V::kRegisterRows;
    const int64_t groups = t.planes * t.groups, bytes = p.words - t.first * p.bits / 8;
    uint8_t codes[64 * kRows] = {0};
    float scales[32 * kRows], room[32 + 4], rest[kRows];
    int32_t of_groups[32 * kRows], of_row[32 + 4];
    for (int64_t i = 0; i < count; ++i) {
      const float* blocks = decoded != nullptr ? decoded + i * p.blocks + t.block : room;
      if (decoded == nullptr) V::scales(&p, row + i, t.block, t.block + t.blocks, room);
      spread_tail(t, blocks, scales + i * groups);
      if (p.zero_point != nullptr) {
        if (biases == nullptr) W::offsets(p, v, row + i, t.block, t.block + t.blocks, of_row);
        spread_tail(t, biases != nullptr ? biases + i * p.blocks + t.block : of_row, of_groups + i * groups);
      }
      memcpy(codes + 64 * i, p.codes + (row + i) * p.words + t.first * p.bits / 8, bytes);
    }
    Problem q = p;
    q.codes = codes;
    q.words = 64;
    q.k = 64 * t.planes;
    q.blocks = groups;
    Runs s = r;
    s.size = 64 / t.groups;
    const int32_t* lanes = reinterpret_cast<const int32_t*>(x + 64 * t.planes);
    multiply(q, s, v, 0, count, x, lanes, scales, of_groups, table, rest);
    for (int64_t i = 0; i < count; ++i) sums[i] += rest[i];
  }

  template <int kBits, bool kLookUp>
  static void rows_in_registers(const Problem& p, const Int8Detail& d, const char* shared, int64_t batch, int64_t first,
                                int64_t count) {
    const Runs r = runs_of(p);
    const Integers v = integers_of(p);
    const I table = V::byte_table(v.table);
    const uint8_t* x = reinterpret_cast<const uint8_t*>(shared + d.x) + batch * row_codes(r);
    const int32_t* lanes = reinterpret_cast<const int32_t*>(shared + d.lanes) + batch * W::lane_vectors(r) * L;
    const int32_t x_sum = reinterpret_cast<const int32_t*>(shared + d.sums)[batch * (r.count + 1)];
    const float x_scale = reinterpret_cast<const float*>(shared)[batch];
    const bool zero = p.zero_point != nullptr;
    const ManyScales several_scales = scales_of<kBits, kLookUp>(p, r.size);
    const int64_t weight = first_row(&p, batch);
    if (r.count > 1) {
      const TailGroups t = tail_groups(p);
      const uint8_t* of_tail = reinterpret_cast<const uint8_t*>(shared + d.tail) + batch * t.planes * (64 + 4 * L);
      const ManyScales tail_scales = scales_of<kBits, kLookUp>(p, 64 / max64(t.groups, 1));
      Problem whole = p;
      whole.k = t.first;
      // Float32 scales are read where they lie, unless a vector has several: those are loaded four at a time, also past
      // the end. Others are decoded for `held` rows, as many as have room, while the next ones are prefetched, and zero
      // points for each group. With too many blocks `many_scales` decodes them.
      const bool direct = p.scale_kind == kScaleFloat32 && p.row_scale == nullptr && r.size >= 64;
      constexpr int64_t kRoom = 256 * V::kRegisterRows;
      const int64_t fit = kRoom / p.blocks & -V::kRegisterRows, held = direct ? 0 : fit;
      const int64_t scales_of_row = p.blocks * scale_bytes(p.scale_kind);
      float room[kRoom + 4];
      int32_t zeros[kRoom + 4];
      const int32_t* biases = zero && fit > 0 ? zeros : nullptr;
      for (int64_t n = first; n < first + count; n += V::kRegisterRows) {
        const int64_t rows = min64(V::kRegisterRows, first + count - n), at = held > 0 ? (n - first) % held : 0;
        const float* decoded = held > 0 ? room + at * p.blocks : nullptr;
        if (direct) decoded = static_cast<const float*>(p.scale) + (weight + n) * p.blocks;
        if (held > 0 && at == 0) {
          const int64_t last = min64(n + held, first + count), some = p.row_scale == nullptr ? last - n : 1;
          for (int64_t i = n; i < last; i += some)
            V::scales(&p, weight + i, 0, some * p.blocks, room + (i - n) * p.blocks);
        }
        for (int64_t i = 0; biases != nullptr && i < rows; ++i)
          W::offsets(p, v, weight + n + i, 0, p.blocks, zeros + i * p.blocks);
        const char* later =
            static_cast<const char*>(p.scale) + (weight + n + max64(held, V::kRegisterRows)) * scales_of_row;
        for (int64_t i = 0; i < V::kRegisterRows * scales_of_row; i += 64) __builtin_prefetch(later + i);
        float sums[V::kRegisterRows];
        several_scales(whole, r, v, weight + n, rows, x, lanes, decoded, biases, table, sums);
        if (t.count > 0) add_tail(p, t, r, v, weight + n, rows, of_tail, decoded, biases, tail_scales, table, sums);
        for (int64_t i = 0; i < rows; ++i) X::write(p, batch * p.y_batch + (n + i) * p.y_column, sums[i] * x_scale);
      }
      return;
    }
    for (int64_t n = first; n < first + count; ++n) {
      const int64_t row = weight + n;
      float scale[4 + 1];
      V::scales(&p, row, 0, 1, scale);
      int32_t factor = 1;
      if (zero) W::offsets(p, v, row, 0, 1, &factor);
      const int32_t sum = one_scale<kBits, kLookUp>(p, p.codes + row * p.words, x, table);
      X::write(p, batch * p.y_batch + n * p.y_column, static_cast<float>(sum + factor * x_sum) * scale[0] * x_scale);
    }
  }

  static void run(const Problem& p, const Int8Detail& d, const char* shared, int64_t batch, int64_t first,
                  int64_t count) {
    if constexpr (V::kInRegisters) {
      const Integers v = integers_of(p);
      const bool look = v.looks_up || v.shift > 0;
      auto* rows = rows_in_registers<1, false>;
      if constexpr (V::kMostCode == 255) rows = rows_in_registers<8, false>;
      if (p.bits == 4) rows = look ? rows_in_registers<4, true> : rows_in_registers<4, false>;
      if (p.bits == 2) rows = look ? rows_in_registers<2, true> : rows_in_registers<2, false>;
      if (p.bits == 1) rows = look ? rows_in_registers<1, true> : rows_in_registers<1, false>;
      rows(p, d, shared, batch, first, count);
    }
  }
};

}  // namespace
