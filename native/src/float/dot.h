// One row of `x`, or a few: codes are decoded and multiplied in registers.
#pragma once

#include "float/arrays.h"
#include "float/dots.h"

namespace {

template <class V>
struct Dot {
  using D = Decode<V>;
  using A = Arrays<V>;
  using F = typename V::F;
  using Codes = typename V::Codes;
  using Table = typename V::Table;
  using RowScales = typename D::RowScales;
  using DecodeRow = typename D::DecodeRow;
  static constexpr int L = V::L;
  static constexpr int kRows = V::kDotRows;

  // Adds to `sums` the products of `kRows` rows and one row of x, over `segments` whole segments. `scales[r]` belong to
  // row `r`.
  template <class C, Mode kMode, int kRows>
  static void dot(const uint8_t* const* bytes, int64_t ahead, const RowScales* scales, int64_t segments,
                  const float* values, const int32_t*, const float* x, int64_t, F* sums) {
    constexpr int kBits = C::kBits, kValues = C::kValues;
    constexpr int64_t kStep = scales_of_segment(kBits, kMode);
    constexpr bool kZero = C::kZero;
    const Table plain = V::table(values);
    const F offset = V::broadcast(values[0]);
    Table tables[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
      tables[r] = kZero && kMode == kOneScale && kBits < 8 ? V::offset(plain, V::broadcast(scales[r].zero[0])) : plain;
    F acc[kRows], more[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) acc[r] = more[r] = V::zero();
    for (int64_t i = 0; i < segments; ++i) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) V::prefetch(bytes[r] + i * kSegment + ahead);
      if constexpr (kBits == 8) {
        constexpr int kVectors = 64 / L, kGrain = 64 / per_plane(kMode) / L;
        F part[kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) part[r] = V::zero();
        constexpr bool kAtOnce = V::kTablesOfBytes;
        constexpr int kOuter = kAtOnce ? kRows : 1, kInner = kAtOnce ? 1 : kRows;
#pragma GCC unroll 8
        for (int outer = 0; outer < kOuter; ++outer) {
          F all[kVectors];
          if (kAtOnce) D::template decode_all_bytes<kValues>(bytes[outer] + i * 64, values, offset, all);
#pragma GCC unroll 8
          for (int v = 0; v < kVectors; ++v) {
            const F xs = V::load(x + i * 64 + v * L);
#pragma GCC unroll 8
            for (int inner = 0; inner < kInner; ++inner) {
              const int r = outer + inner;
              F w = kAtOnce ? all[v] : D::template decode_bytes<kValues>(bytes[r] + i * 64 + v * L, values, offset);
              const int64_t g = kMode == kOneScale ? 0 : i * kStep + v / kGrain;
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
        for (int h = 0; h < D::kHalves; ++h) {
          const typename V::Lanes lanes = V::lanes(h, per_plane(kMode));
          Codes codes[kRows];
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) codes[r] = V::codes(bytes[r] + i * kSegment + 4 * L * h);
          dot_planes<kBits, kMode, kZero, kRows, 0>(codes, lanes, tables, scales, i * kStep,
                                                    x + i * 64 * kPlanes + h * kPlanes * 4 * L, acc, more);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sums[r] = V::add(sums[r], V::add(acc[r], more[r]));
  }

  template <int kBits, Mode kMode, bool kZero, int kRows, int kPlaneIndex>
  EQQ_INLINE void dot_planes(const Codes* codes, typename V::Lanes lanes, const Table* tables, const RowScales* scales,
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
        if (kZero && D::after_lookup(kMode))
          z = D::template spread<kMode>(scales[r].zero + at + per_plane(kMode) * kPlaneIndex, lanes);
        F w0 = V::lookup(t, V::template shift<kShift>(codes[r]));
        F w1 = V::lookup(t, V::template shift<kShift + 8>(codes[r]));
        F w2 = V::lookup(t, V::template shift<kShift + 16>(codes[r]));
        F w3 = V::lookup(t, V::template shift<kShift + 24>(codes[r]));
        if (kZero && D::after_lookup(kMode)) {
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
          const F s = D::template spread<kMode>(scales[r].scale + at + per_plane(kMode) * kPlaneIndex, lanes);
          F* sum = kPlaneIndex % 2 ? more : acc;
          sum[r] = V::fma(part, s, sum[r]);
        }
      }
      dot_planes<kBits, kMode, kZero, kRows, kPlaneIndex + 1>(codes, lanes, tables, scales, at, x, acc, more);
    }
  }

  EQQ_INLINE void sum_group(const F* sums, float* totals) {
    if constexpr (V::kSumsRows) {
      V::sum_rows(sums, totals);
    } else {
      for (int r = 0; r < V::kDotRows; ++r) totals[r] = V::sum(sums[r]);
    }
  }

  // What depends on the codes of the weight, on their scales, and on the number of rows of x.
  struct Loops {
    int64_t m;                     // rows of x
    typename Dots<V>::Loop whole;  // whole segments of a group of rows
    typename Dots<V>::Loop one;    // the same of one row, if m is one
    typename Dots<V>::Loop small;  // the same of short rows
    typename Dots<V>::Loop tail;   // a partial last segment, unless its blocks are decoded
    typename D::DecodeLast last;   // decodes it, of rows with blocks
  };

  template <class C, Mode kMode, int kM>
  static Loops loops_of() {
    constexpr auto several = Dots<V>::template dots<C, kMode, kM, false>,
                   tail = Dots<V>::template dots<C, kOneScale, kM, true>;
    Loops loops = {kM, several, several, several, tail, D::template decode_last<C::kBits, C::kValues, C::kZero>};
    if constexpr (kM == 1) {
      loops.whole = dot<C, kMode, kRows>;
      loops.one = dot<C, kMode, 1>;
    }
    return loops;
  }

  static Loops loops_for(const Problem& p, Mode mode, int64_t m) {
    return D::by_codes(p, [&](auto codes) {
      return by_mode(mode, [&](auto kind) {
        return by_count<Dots<V>::kMost>(
            m, [&](auto count) { return loops_of<decltype(codes), decltype(kind)::value, decltype(count)::value>(); });
      });
    });
  }
  static Loops loops_for(const Problem& p, const Shape& s, int64_t m) {
    Loops loops = loops_for(p, s.mode, m);
    if (s.tail_mode != kAnyBlock) loops.tail = loops_for(p, s.tail_mode, m).whole;
    return loops;
  }

  // Numbers that all groups of rows share: their divisions are too slow to repeat for each group.
  struct Group {
    int64_t chunk, room, step;
    int64_t ahead;  // bytes from codes to the prefetched codes of a later group
    bool direct;    // whether the loop reads scales as they are stored
    bool together;  // whether the scales and zero points of a group are decoded at once, for whole rows
  };

  static constexpr int kSums = Dots<V>::kMost * kRows;

  // Multiplies rows from `row` on in whole groups, whose scales are decoded together. Returns how many of `count` these
  // are. Leaves out the last rows of all, behind whose partial segment there is nothing to read.
  static int64_t short_rows(const Problem& p, const Shape& s, const void* shared, const Loops& loops, const float* x,
                            int64_t x_row, int64_t row, int64_t count, const Group& g, float* own, float* results) {
    const float* floats = static_cast<const float*>(p.scale) + row * p.blocks;
    const uint8_t* codes = p.codes + row * p.words;
    const float* values = D::table256(shared);
    const int32_t* mask = D::open_shared(s, shared).mask;
    if (!g.direct) {
      D::decode_scales(p, row, 0, count * p.blocks, own);
      floats = own;
    }
    int64_t r = 0;
    for (; r + kRows <= count; r += kRows, codes += kRows * p.words, floats += kRows * p.blocks) {
      const uint8_t* bytes[kRows];
      RowScales scales[kRows];
      F sums[kSums];
      for (int i = 0; i < kRows; ++i) bytes[i] = codes + i * p.words;
      for (int i = 0; i < kRows; ++i) scales[i].scale = scales[i].zero = floats + i * p.blocks;
      for (int i = 0; i < loops.m * kRows; ++i) sums[i] = V::zero();
      loops.small(bytes, g.ahead, scales, s.whole, values, mask, x, x_row, sums);
      if (s.whole < s.segments) {
        for (int i = 0; i < kRows; ++i) bytes[i] += s.whole * kSegment;
        if (!Dots<V>::can_overread(p, bytes[kRows - 1])) break;
        loops.tail(bytes, 0, scales, 1, values, mask, x + s.whole * s.codes, x_row, sums);
      }
      for (int m = 0; m < loops.m; ++m) {
        float* to = results + m * kMostDots + r;
        sum_group(sums + m * kRows, to);
        for (int i = 0; s.mode == kOneScale && i < kRows; ++i) to[i] = D::scaled(to[i], floats[i]);
      }
    }
    return r;
  }

  // Multiplies the partial last segment of rows `row` to `row + count`, where each row has one scale.
  static void multiply_tail(const Problem& p, const Shape& s, const void* shared, const Loops& loops, int64_t row,
                            int64_t count, const RowScales* scales, const float* x, int64_t x_row, F* sums) {
    uint8_t padded[kRows][kSegment];
    const uint8_t* bytes[kRows];
    for (int r = 0; r < kRows; ++r) {
      bytes[r] = p.codes + (row + min64(r, count - 1)) * p.words + s.whole * kSegment;
      if (Dots<V>::can_overread(p, bytes[r]) && (p.bits < 8 || s.mode == kOneScale)) continue;
      memset(padded[r], 0, kSegment);
      memcpy(padded[r], bytes[r], s.tail_bytes);
      bytes[r] = padded[r];
    }
    loops.tail(bytes, 0, scales, 1, D::table256(shared), D::open_shared(s, shared).mask, x, x_row, sums);
  }

  // The same for rows with blocks, if each group of lanes lies in one block. `all`: the scales and zero points of the
  // first row, if those of a group are decoded at once.
  static void multiply_groups(const Problem& p, const Shape& s, const void* shared, const Loops& loops,
                              const TailGroups& tail, int64_t row, int64_t count, const Group& g, RowScales all,
                              float* own, const float* x, int64_t x_row, F* sums) {
    float values[2][kRows][32];
    RowScales scales[kRows];
    for (int r = 0; r < kRows; ++r) {
      scales[r] = {values[0][r], values[1][r]};
      if (r >= count) {
        scales[r] = scales[count - 1];
        continue;
      }
      const int64_t at = r * p.blocks + tail.block;
      RowScales blocks = {all.scale + at, all.zero + at};
      if (!g.together) blocks = D::last_scales(p, s, row + r, own + r * g.room);
      spread_tail(tail, blocks.scale, values[0][r]);
      if (p.zero_point != nullptr) spread_tail(tail, blocks.zero, values[1][r]);
    }
    multiply_tail(p, s, shared, loops, row, count, scales, x, x_row, sums);
  }

  // The same for other blocks: decoded to memory, which has room for one row's.
  static void multiply_last(const Problem& p, const Shape& s, const void* shared, const Loops& loops, int64_t row,
                            int64_t count, float* own, float* tail, const float* x, int64_t x_row, F* sums) {
    for (int64_t r = 0; r < count; ++r) {
      loops.last(p, s, shared, row + r, own, tail);
      for (int m = 0; m < loops.m; ++m) {
        F sum = V::zero();
        for (int64_t i = 0; i < s.tail; i += L) sum = V::fma(V::load(tail + i), V::load(x + m * x_row + i), sum);
        sums[m * kRows + r] = sum;
      }
    }
  }

  // The scales and zero points of rows `row` to `row + count`, each row after the other.
  EQQ_INLINE RowScales scales_of_group(const Problem& p, int64_t row, int64_t count, const Group& g, float* own) {
    const bool zero = p.zero_point != nullptr;
    float* zeros = own + kRows * g.room / 2;
    for (int64_t r = 0; zero && r < count; ++r) unpack_zero_points(p, row + r, 0, p.blocks, zeros + r * p.blocks);
    if (g.direct) {
      const float* stored = static_cast<const float*>(p.scale) + row * p.blocks;
      return {stored, zero ? zeros : stored};
    }
    const int64_t some = p.row_scale == nullptr ? count : 1;  // each row has a factor of its own
    for (int64_t r = 0; r < count; r += some) D::decode_scales(p, row + r, 0, some * p.blocks, own + r * p.blocks);
    return {own, zero ? zeros : own};
  }

  // Multiplies rows `row` to `row + count` of the weight, at most `kDotRows`. Rows of all batches are counted together.
  static void dot_group(const Problem& p, const Shape& s, const void* shared, const Loops& loops, const float* x,
                        int64_t x_row, int64_t row, int64_t count, const Group& g, const TailGroups& tail, float* own,
                        float* results) {
    const float* values = D::table256(shared);
    F sums[kSums];
    for (int r = 0; r < loops.m * kRows; ++r) sums[r] = V::zero();
    float factor[kRows] = {0};  // with one scale
    RowScales scales[kRows];
    const RowScales all = g.together ? scales_of_group(p, row, count, g, own) : RowScales{own, own};
    const auto set_scales = [&](int64_t first, int64_t last) {
      for (int r = 0; r < kRows; ++r) {
        const int64_t within = min64(r, count - 1), at = row + within;  // past the end, repeats the last row
        if (g.together) {
          const int64_t from = within * p.blocks + first * g.step;
          scales[r] = {all.scale + from, all.zero + from};
        } else {
          scales[r] = D::row_scales(p, s, at, first, last, own + r * g.room);
        }
        if (s.mode == kOneScale) factor[r] = scales[r].scale[0];
      }
    };
    const auto loop = count == 1 ? loops.one : loops.whole;
    for (int64_t first = 0; first < s.whole; first += g.chunk) {
      const int64_t last = min64(first + g.chunk, s.whole);
      set_scales(first, last);
      const uint8_t* bytes[kRows];
      for (int r = 0; r < kRows; ++r) bytes[r] = p.codes + (row + min64(r, count - 1)) * p.words + first * kSegment;
      loop(bytes, g.ahead, scales, last - first, values, nullptr, x + first * s.codes, x_row, sums);
    }
    if (s.segments > s.whole) {
      const float* xs = x + s.whole * s.codes;
      F rest[kSums];  // apart, so that a short sum is added to a long one
      for (int r = 0; r < loops.m * kRows; ++r) rest[r] = V::zero();
      if (s.mode == kOneScale) {
        if (s.whole == 0) set_scales(0, 1);
        multiply_tail(p, s, shared, loops, row, count, scales, xs, x_row, rest);
      } else if (s.tail_mode != kAnyBlock) {
        multiply_groups(p, s, shared, loops, tail, row, count, g, all, own, xs, x_row, rest);
      } else {
        multiply_last(p, s, shared, loops, row, count, own, own + kRows * g.room, xs, x_row, rest);
      }
      for (int r = 0; r < loops.m * kRows; ++r) sums[r] = V::add(sums[r], rest[r]);
    }
    for (int m = 0; m < loops.m; ++m) {
      float totals[kRows];
      sum_group(sums + m * kRows, totals);
      for (int64_t r = 0; r < count; ++r)
        results[m * kMostDots + r] = s.mode == kOneScale ? D::scaled(totals[r], factor[r]) : totals[r];
    }
  }

  static void dot_rows(const Problem& p, const Shape& s, const void* shared, const Loops& loops, const float* x,
                       int64_t x_row, int64_t row, int64_t count, float* own, float* results) {
    Group g;
    g.chunk = scale_segments(s);
    g.room = 2 * D::scale_room(p, s, g.chunk);
    g.step = scales_of_segment(p.bits, s.mode);
    g.ahead = round_up(kAheadOfDots, V::kDotRows * max64(p.words, 1));
    const bool one_each = s.mode == kOneScale || p.block_size == s.grain,
               short_row = s.mode == kOneScale || s.whole <= g.chunk;
    const bool plain = p.zero_point == nullptr && p.row_scale == nullptr;
    g.direct = one_each && p.row_scale == nullptr && p.scale_kind == kScaleFloat32 && per_plane(s.mode) == 1;
    g.together = one_each && (short_row || (plain && g.direct));
    g.direct = g.direct && g.together;
    int64_t r = 0;
    if (g.together && plain && 0 < s.segments && s.segments <= kShortRow &&
        (s.whole == s.segments || s.mode == kOneScale))
      r = short_rows(p, s, shared, loops, x, x_row, row, count, g, own, results);
    TailGroups tail;
    if (s.tail_mode != kAnyBlock) tail = tail_groups(p);
    for (; r < count; r += V::kDotRows)
      dot_group(p, s, shared, loops, x, x_row, row + r, min64(V::kDotRows, count - r), g, tail, own, results + r);
  }

  static void run(const Problem& p, const Shape& s, const FloatDetail& d, const void* shared, const float* x,
                  int64_t batch, int64_t first, int64_t count, float* own) {
    float results[V::kDirectRows * kMostDots];
    const int64_t weight = first_row(&p, batch);
    if (s.mode != kAnyBlock) {
      const int64_t group = div_up(p.m, div_up(p.m, Dots<V>::kMost));
      for (int64_t m = 0; m < p.m; m += group)
        dot_rows(p, s, shared, loops_for(p, s, min64(group, p.m - m)), x + m * d.x_row, d.x_row, weight + first, count,
                 own, results + m * kMostDots);
    } else {
      const DecodeRow decode = D::row_decoder(p);
      const int64_t room = 2 * D::scale_room(p, s, scale_segments(s));
      float* segment = own + V::kDotRows * room;
      for (int64_t i = 0; i < count; ++i) {
        F sum = V::zero();
        for (int64_t at = 0; at < s.segments; ++at) {
          const int64_t row = weight + first + i;
          const RowScales scales = D::row_scales(p, s, row, at, at + 1, own);
          decode(p, s, shared, row, at, at + 1, scales, at, own + room, segment);
          for (int64_t j = 0; j < s.codes; j += L)
            sum = V::fma(V::load(segment + j), V::load(x + at * s.codes + j), sum);
        }
        results[i] = V::sum(sum);
      }
    }
    for (int64_t m = 0; m < p.m; ++m)
      for (int64_t i = 0; i < count; ++i)
        A::write(p, batch * p.y_batch + m * p.y_row + (first + i) * p.y_column, results[m * kMostDots + i]);
  }
};

}  // namespace
