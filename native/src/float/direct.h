// Products with few rows of x that decode codes in registers: no decoded row is written, since multiplying what was
// written would take as long as decoding it.
#ifndef EQQUANT_DIRECT_H_
#define EQQUANT_DIRECT_H_

#include "float/kernels.h"

namespace {

template <class V>
struct Direct {
  using K = Kernels<V>;
  using F = typename V::F;
  using I = typename V::I;
  using Table = typename V::Table;
  using RowScales = typename K::RowScales;
  static constexpr int L = V::L, kHalves = K::kHalves, kRows = V::kDotRows;
  static constexpr int kMost = V::kFewGroup < 4 ? 2 : 4;  // rows of x, for whose sums there are registers

  // Four vectors of a plane of a segment, from its bytes `4 L h` on. `scale` and `zero` are those of the segment. One
  // scale of a whole plane is left to whoever asks, unless `kScaled`.
  template <int kBits, int kValues, Mode kMode, bool kZero, bool kScaled, int kPlaneIndex>
  EQQ_INLINE void four(const uint8_t* bytes, int h, const float* values, const Table& table, const float* scale,
                       const float* zero, F* w) {
    constexpr int kScales = per_plane(kMode), kAt = kMode == kOneScale ? 0 : kPlaneIndex * kScales;
    constexpr bool kOfTable = kBits < 8 && kScales == 1 && V::kScalesTables;
    if constexpr (kBits == 8) {
      const F offset = V::broadcast(values[0]);
      if constexpr (V::kTablesOfBytes && kValues != kValueInteger) {
        K::template decode_all_bytes<kValues>(bytes, values, offset, w);
      } else {
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) w[v] = K::template decode_bytes<kValues>(bytes + v * L, values, offset);
      }
    } else {
      Table t = table;
      if (kOfTable && kZero) t = V::offset(t, V::broadcast(zero[kAt]));
      if (kOfTable && kScaled) t = V::scale(t, V::broadcast(scale[kAt]));
      constexpr int kShift = kPlaneIndex * kBits;
      const I codes = V::bytes(bytes);
      w[0] = V::lookup(t, V::template shift<kShift>(codes));
      w[1] = V::lookup(t, V::template shift<kShift + 8>(codes));
      w[2] = V::lookup(t, V::template shift<kShift + 16>(codes));
      w[3] = V::lookup(t, V::template shift<kShift + 24>(codes));
    }
    if constexpr (!kOfTable) {
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        F s = V::zero(), z = s;
        if constexpr (kBits < 8 && kScales > 1) {
          const typename V::Lanes lanes = V::lanes(h, kScales);
          s = V::spread(scale + kAt, lanes);
          if (kZero) z = V::spread(zero + kAt, lanes);
        } else {
          const int at = kAt + (kBits == 8 ? (4 * h + v) * L * kScales / 64 : 0);
          if (kScaled || kScales > 1) s = V::broadcast(scale[at]);
          if (kZero) z = V::broadcast(zero[at]);
        }
        if (kZero) w[v] = V::sub(w[v], z);
        if (kScaled || kScales > 1) w[v] = V::mul(w[v], s);
      }
    }
  }

  // Whether a whole segment can be read here, although a row ends before: what follows is codes of the weight too.
  EQQ_INLINE bool can_read_on(const Problem& p, const uint8_t* bytes) {
    const int64_t rows = (p.selected != nullptr ? p.stack : p.batch) * p.n;
    return bytes + kSegment <= p.codes + (rows - 1) * p.words + packed_bytes(p.k, p.bits);
  }

  //
  // x times the weight: lanes run along k
  //

  // Up to how many rows of x, which are decoded for anew in each group. Gathering takes too long for that.
  static int64_t most(const Problem& p) {
    return p.bits == 8 && p.values == kValueTable && !V::kTablesOfBytes ? min64(kMost, V::kDirectRows) : V::kDirectRows;
  }

  // Products of `kRows` rows of the weight and `kM` of x, added to `sums`, those of a row of x side by side. A scale
  // that a whole row has is left to whoever asks. With `kMask`, of codes that are no padding.
  template <int kBits, int kValues, Mode kMode, bool kZero, int kM, bool kMask>
  static __attribute__((noinline)) void dots(const uint8_t* const* bytes, int64_t ahead, const RowScales* scales,
                                             int64_t step, int64_t segments, const float* values, const int32_t* mask,
                                             const float* x, int64_t x_row, F* sums) {
    const Table table = V::table(values);
    F acc[kRows][kM];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) acc[r][m] = V::zero();
    for (int64_t i = 0; i < segments; ++i) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) V::prefetch(bytes[r] + i * kSegment + ahead);
      for (int h = 0; h < kHalves; ++h)
        dots_of_planes<kBits, kValues, kMode, kZero, kM, kMask, 0>(bytes, i, h, scales, i * step, values, table, mask,
                                                                   x + i * kSegment * (8 / kBits), x_row, acc);
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 8
      for (int m = 0; m < kM; ++m) sums[m * kRows + r] = V::add(sums[m * kRows + r], acc[r][m]);
  }

  template <int kBits, int kValues, Mode kMode, bool kZero, int kM, bool kMask, int kPlaneIndex>
  EQQ_INLINE void dots_of_planes(const uint8_t* const* bytes, int64_t segment, int h, const RowScales* scales,
                                 int64_t at, const float* values, const Table& table, const int32_t* mask,
                                 const float* x, int64_t x_row, F (*acc)[kM]) {
    if constexpr (kPlaneIndex < 8 / kBits) {
      const int place = (h * (8 / kBits) + kPlaneIndex) * 4 * L;
#pragma GCC unroll 4
      for (int r = 0; r < kRows; r += 2) {  // two rows share what is loaded of x
        F w[2][4];
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          four<kBits, kValues, kMode, kZero, kMode != kOneScale, kPlaneIndex>(
              bytes[r + i] + segment * kSegment + 4 * L * h, h, values, table, scales[r + i].scale + at,
              scales[r + i].zero + at, w[i]);
#pragma GCC unroll 4
          for (int v = 0; kMask && v < 4; ++v) w[i][v] = V::masked(w[i][v], mask + place + v * L);
        }
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v)
#pragma GCC unroll 8
          for (int m = 0; m < kM; ++m) {
            const F xs = V::load(x + m * x_row + place + v * L);
            acc[r][m] = V::fma(w[0][v], xs, acc[r][m]);
            acc[r + 1][m] = V::fma(w[1][v], xs, acc[r + 1][m]);
          }
      }
      dots_of_planes<kBits, kValues, kMode, kZero, kM, kMask, kPlaneIndex + 1>(bytes, segment, h, scales, at, values,
                                                                               table, mask, x, x_row, acc);
    }
  }

  template <int kBits, int kValues, bool kZero, int kM>
  EQQ_INLINE void dots_of_mode(Mode mode, const uint8_t* const* bytes, int64_t ahead, const RowScales* scales,
                               int64_t step, int64_t segments, const float* values, const float* x, int64_t x_row,
                               F* sums) {
    if (mode == kOneScale) {
      dots<kBits, kValues, kOneScale, kZero, kM, false>(bytes, ahead, scales, 0, segments, values, nullptr, x, x_row,
                                                        sums);
    } else if (mode == kBy32) {
      dots<kBits, kValues, kBy32, kZero, kM, false>(bytes, ahead, scales, step, segments, values, nullptr, x, x_row,
                                                    sums);
    } else if (mode == kBy16) {
      dots<kBits, kValues, kBy16, kZero, kM, false>(bytes, ahead, scales, step, segments, values, nullptr, x, x_row,
                                                    sums);
    } else {
      dots<kBits, kValues, kUniform, kZero, kM, false>(bytes, ahead, scales, step, segments, values, nullptr, x, x_row,
                                                       sums);
    }
  }

  // Rows `row` on in whole groups, whose scales are decoded together: how many of `count` these are. Not the last of
  // all codes, where these end within a segment.
  template <int kBits, int kValues, bool kZero, int kM>
  static __attribute__((noinline)) int64_t short_rows(const Problem& p, const Shape& s, const void* shared,
                                                      const float* x, int64_t x_row, int64_t row, int64_t count,
                                                      const typename K::Group& g, float* own, float* results) {
    const float* floats = static_cast<const float*>(p.scale) + row * p.blocks;
    const uint8_t* codes = p.codes + row * p.words;
    if (!g.direct) {
      K::decode_scales(p, row, 0, count * p.blocks, own);
      floats = own;
    }
    int64_t r = 0;
    for (; r + kRows <= count; r += kRows, codes += kRows * p.words, floats += kRows * p.blocks) {
      const uint8_t* bytes[kRows];
      RowScales scales[kRows];
      F sums[kM * kRows];
      for (int i = 0; i < kRows; ++i) bytes[i] = codes + i * p.words;
      for (int i = 0; i < kRows; ++i) scales[i].scale = scales[i].zero = floats + i * p.blocks;
      for (int i = 0; i < kM * kRows; ++i) sums[i] = V::zero();
      const float* values = K::table256(shared);
      dots_of_mode<kBits, kValues, kZero, kM>(s.mode, bytes, g.ahead, scales, g.step, s.whole, values, x, x_row, sums);
      if (s.whole < s.segments) {
        for (int i = 0; i < kRows; ++i) bytes[i] += s.whole * kSegment;
        if (!can_read_on(p, bytes[kRows - 1])) break;
        dots<kBits, kValues, kOneScale, kZero, kM, true>(bytes, 0, scales, 0, 1, values, K::open_shared(s, shared).mask,
                                                         x + s.whole * s.codes, x_row, sums);
      }
      for (int m = 0; m < kM; ++m) {
        float* to = results + m * kMostDots + r;
        K::sum_group(sums + m * kRows, to);
        for (int i = 0; s.mode == kOneScale && i < kRows; ++i) to[i] = K::scaled(to[i], floats[i]);
      }
    }
    return r;
  }

  // The last segment of rows `row` to `row + count`, which is cut short, where each row has one scale.
  template <int kBits, int kValues, bool kZero, int kM>
  static __attribute__((noinline)) void dots_of_tail(const Problem& p, const Shape& s, const void* shared, int64_t row,
                                                     int64_t count, const RowScales* scales, const float* x,
                                                     int64_t x_row, F* sums) {
    const Shared common = K::open_shared(s, shared);
    uint8_t padded[kRows][kSegment];
    const uint8_t* bytes[kRows];
    for (int r = 0; r < kRows; ++r) {
      bytes[r] = p.codes + (row + min64(r, count - 1)) * p.words + s.whole * kSegment;
      if (can_read_on(p, bytes[r])) continue;
      memset(padded[r], 0, kSegment);
      memcpy(padded[r], bytes[r], s.tail_bytes);
      bytes[r] = padded[r];
    }
    for (int i = 0; i < kM * kRows; ++i) sums[i] = V::zero();
    dots<kBits, kValues, kOneScale, kZero, kM, true>(bytes, 0, scales, 0, 1, K::table256(shared), common.mask, x, x_row,
                                                     sums);
  }

  //
  // x times the weight, transposed: lanes run along the results
  //

  // Of short rows, such as those of a cache of keys and values, decoding ahead would take longest.
  static bool mixes(const Problem& p, const Shape& s) {
    return p.m <= (s.segments <= 4 ? 4 : 1) * V::kMixedRows && s.mode != kAnyBlock &&
           (s.whole == s.segments || s.mode == kOneScale);
  }

  // A segment of some rows of the weight.
  struct Rows {
    const uint8_t* bytes;
    int64_t words, count;
    const float *scale, *zero;  // of the segment, `room` floats from row to row
    int64_t room;
    const float* factor;  // one scale of a plane: those of all rows side by side, `step` from plane to plane
    int64_t step;
  };

  // Adds to `sums` the products of `kM` rows of x.
  template <int kBits, int kValues, Mode kMode, bool kZero, int kM>
  static void mix(const Rows& rows, const float* values, const float* x, float* sums, int64_t width) {
    mix_planes<kBits, kValues, kMode, kZero, kM, 0>(rows, values, V::table(values), x, sums, width);
  }

  template <int kBits, int kValues, Mode kMode, bool kZero, int kM, int kPlaneIndex>
  EQQ_INLINE void mix_planes(const Rows& rows, const float* values, const Table& table, const float* x, float* sums,
                             int64_t width) {
    if constexpr (kPlaneIndex < 8 / kBits) {
      float scaled[kM * kRowChunkStride];
      const float* xs = x;
      if constexpr (per_plane(kMode) == 1) {  // x is scaled instead, once for all codes
        const float* factor = rows.factor + (kMode == kOneScale ? 0 : kPlaneIndex) * rows.step;
        for (int m = 0; m < kM; ++m)
          for (int64_t i = 0; i < rows.count; i += L)
            V::store(scaled + m * kRowChunkStride + i,
                     V::mul(V::load(x + m * kRowChunkStride + i), V::load(factor + i)));
        xs = scaled;
      }
      for (int h = 0; h < kHalves; ++h) {
        F acc[kM][4];
#pragma GCC unroll 8
        for (int m = 0; m < kM; ++m)
#pragma GCC unroll 4
          for (int v = 0; v < 4; ++v) acc[m][v] = V::zero();
        for (int64_t n = 0; n < rows.count; ++n) {
          F w[4];
          four<kBits, kValues, kMode, kZero, false, kPlaneIndex>(rows.bytes + n * rows.words + 4 * L * h, h, values,
                                                                 table, rows.scale + n * rows.room,
                                                                 rows.zero + n * rows.room, w);
#pragma GCC unroll 8
          for (int m = 0; m < kM; ++m) {
            const F factor = V::broadcast(xs[m * kRowChunkStride + n]);
#pragma GCC unroll 4
            for (int v = 0; v < 4; ++v) acc[m][v] = V::fma(w[v], factor, acc[m][v]);
          }
        }
#pragma GCC unroll 8
        for (int m = 0; m < kM; ++m)
#pragma GCC unroll 4
          for (int v = 0; v < 4; ++v) {
            float* to = sums + m * width + (h * (8 / kBits) + kPlaneIndex) * 4 * L + v * L;
            V::store(to, V::add(V::load(to), acc[m][v]));
          }
      }
      mix_planes<kBits, kValues, kMode, kZero, kM, kPlaneIndex + 1>(rows, values, table, x, sums, width);
    }
  }

  // All rows of x, in groups for whose sums there are registers.
  template <int kBits, int kValues, Mode kMode, bool kZero>
  static void mix_all(const Rows& rows, const float* values, const float* x, int64_t m, float* sums, int64_t width) {
    for (; m >= kMost; m -= kMost, x += kMost * kRowChunkStride, sums += kMost * width)
      mix<kBits, kValues, kMode, kZero, kMost>(rows, values, x, sums, width);
    for (; m >= 2; m -= 2, x += 2 * kRowChunkStride, sums += 2 * width)
      mix<kBits, kValues, kMode, kZero, 2>(rows, values, x, sums, width);
    if (m > 0) mix<kBits, kValues, kMode, kZero, 1>(rows, values, x, sums, width);
  }

  using Mix = void (*)(const Rows&, const float*, const float*, int64_t, float*, int64_t);

  static Mix mixer(const Problem& p, Mode mode) {
    return K::by_codes(p,
                       [&](auto codes) { return mixer_of<decltype(codes)::kBits, decltype(codes)::kValues>(p, mode); });
  }

  template <int kBits, int kValues>
  static Mix mixer_of(const Problem& p, Mode mode) {
    const bool zero = p.zero_point != nullptr;
    switch (mode) {
      case kOneScale:
        return zero ? mix_all<kBits, kValues, kOneScale, true> : mix_all<kBits, kValues, kOneScale, false>;
      case kUniform: return zero ? mix_all<kBits, kValues, kUniform, true> : mix_all<kBits, kValues, kUniform, false>;
      case kBy32: return zero ? mix_all<kBits, kValues, kBy32, true> : mix_all<kBits, kValues, kBy32, false>;
      default: return zero ? mix_all<kBits, kValues, kBy16, true> : mix_all<kBits, kValues, kBy16, false>;
    }
  }

  // Where scratch memory of a thread has what: bytes.
  struct Room {
    int64_t rows, scales, factors, tails, sums, all;

    Room(const Problem& p, const Shape& s, int64_t count) {
      rows = 2 * K::scale_room(p, s, count);  // of a row: its scales and its zero points
      scales = 0;
      factors = aligned(4 * kRowChunk * rows);
      tails = factors + aligned(4 * kRowChunkStride * (s.mode == kUniform ? count * s.planes : 1));
      sums = tails + (s.whole < s.segments ? kRowChunk * kSegment : 0);
      all = sums + aligned(4 * p.m * count * s.codes);
    }
  };

  // Segments `first` to `first + count` of all rows of a batch.
  static void run(const Problem& p, const Shape& s, const void* shared, const float* x, int64_t batch, int64_t first,
                  int64_t count, char* own) {
    const Room room(p, s, count);
    const Mix mix = mixer(p, s.mode);
    float* scales = reinterpret_cast<float*>(own + room.scales);
    float* factors = reinterpret_cast<float*>(own + room.factors);
    uint8_t* tails = reinterpret_cast<uint8_t*>(own + room.tails);
    float* sums = reinterpret_cast<float*>(own + room.sums);
    const int64_t weight = first_row(&p, batch), width = count * s.codes, whole = min64(first + count, s.whole) - first;
    const int64_t grains = s.mode == kOneScale ? 0 : s.codes / s.grain;
    // Scales of rows that lie side by side can be decoded together.
    const bool together = p.zero_point == nullptr && p.row_scale == nullptr && count == s.segments &&
                          (s.mode == kOneScale || p.block_size == s.grain);
    memset(factors, 0, room.tails - room.factors);
    memset(sums, 0, 4 * p.m * width);
    for (int64_t n = 0; n < p.n; n += kRowChunk) {
      const int64_t row = weight + n, some = min64(kRowChunk, p.n - n);
      Rows rows;
      rows.count = some;
      rows.room = together ? p.blocks : room.rows;
      rows.scale = rows.zero = scales;
      rows.step = s.mode == kOneScale ? 0 : kRowChunkStride;
      if (together) {
        K::decode_scales(p, row, 0, some * p.blocks, scales);
      } else {
        for (int64_t i = 0; i < some; ++i) {
          const typename K::RowScales r =
              K::row_scales(p, s, row + i, first, max64(first + whole, first + 1), scales + i * room.rows);
          rows.zero = scales + (r.zero - r.scale);
        }
      }
      if (per_plane(s.mode) == 1)
        for (int64_t g = 0; g < (s.mode == kOneScale ? 1 : whole * grains); ++g)
          for (int64_t i = 0; i < some; ++i) factors[g * kRowChunkStride + i] = scales[i * rows.room + g];
      const float* xs = x + n / kRowChunk * p.m * kRowChunkStride;
      for (int64_t i = 0; i < count; ++i) {
        rows.bytes = p.codes + row * p.words + (first + i) * kSegment;
        rows.words = p.words;
        if (i >= whole && !can_read_on(p, rows.bytes + (some - 1) * p.words)) {
          for (int64_t r = 0; r < some; ++r) memcpy(tails + r * kSegment, rows.bytes + r * p.words, s.tail_bytes);
          rows.bytes = tails;
          rows.words = kSegment;
        }
        rows.factor = factors + i * grains * kRowChunkStride;
        mix(rows, K::table256(shared), xs, p.m, sums + i * s.codes, width);
        rows.scale += grains;
        rows.zero += grains;
      }
    }
    K::write_turned(p, s, batch, 0, p.m, first, count, sums, width);
  }
};

}  // namespace

#endif  // EQQUANT_DIRECT_H_
