// A few rows of `x`: decodes rows of the weight to L1, and multiplies with lanes along `k`.
#pragma once

#include "float/arrays.h"
#include "float/decode.h"

namespace {

template <class V>
struct FewRows {
  using D = Decode<V>;
  using A = Arrays<V>;
  using F = typename V::F;
  using Table = typename V::Table;
  using RowScales = typename D::RowScales;
  using DecodeRow = typename D::DecodeRow;
  static constexpr int L = V::L;

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

  // Whole segments of `kFewTile` rows of the weight to multiply, and the segment to decode after them.
  struct FewStep {
    const uint8_t *bytes, *next, *ahead;  // codes of this step, codes that follow it, and codes to prefetch
    const float *scale, *next_scale;
    float *decoded, *next_decoded;  // segment `i` lies at place `(start + i) & mask`
    int64_t start, mask, segments;
    int64_t words, room, step;  // bytes from row to row; scales from row to row, and from segment to segment
  };

  // Decodes the next segment, one row at a time, while it multiplies this one: permutes and FMAs use different ports.
  // The first segment is decoded before; the last decodes the first segment of the next step.
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
        D::template decode_segment<kBits, kValues, kMode, false, false>(
            bytes + part * f.words, values, table, own, nullptr, nullptr, nullptr, to + part * kChunkStride);
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

  // Returns how many rows of `x` are multiplied at a time, in groups of about equal size.
  EQQ_INLINE int64_t few_group(const Problem& p, const Shape& s) {
    const bool fused = p.m > V::kFewGroup && fused_kernel(p, s, p.m) != nullptr;
    return div_up(p.m, div_up(p.m, fused ? V::kFusedGroup : V::kFewGroup));
  }

  // Returns the fused kernel for up to `m` rows of `x`, or null.
  static FewFused fused_kernel(const Problem& p, const Shape& s, int64_t m) {
    if constexpr (V::kFusesFew) {
      if (p.zero_point != nullptr) return nullptr;
      if constexpr (V::kTablesOfBytes) {
        if (s.mode == kOneScale && s.whole < s.segments) return nullptr;
        return p.values == kValueTable ? fused_of<8, kValueTable>(s, m) : fused_of<8, kValueE4M3>(s, m);
      } else if (p.bits == 4) {
        return fused_of<4, 0>(s, m);
      }
    }
    return nullptr;
  }

  template <int kBits, int kValues>
  static FewFused fused_of(const Shape& s, int64_t m) {
    if (s.mode == kAnyBlock) return nullptr;
    return by_mode(s.mode, [&](auto mode) {
      return by_count<V::kFewGroup, 2>(m, [&](auto count) -> FewFused {
        return few_fused<kBits, kValues, decltype(mode)::value, decltype(count)::value>;
      });
    });
  }

  using FewMicro = void (*)(const float*, const float*, int64_t, int64_t, float*);

  EQQ_INLINE FewMicro few_kernel(int64_t m) {
    return by_count<V::kFewGroup>(
        m, [](auto count) -> FewMicro { return few_micro<V::kFewTile, decltype(count)::value>; });
  }

  // The operands and the scratch memory of a unit.
  struct Unit {
    const Problem& p;
    const Shape& s;
    const void* shared;
    const float* x;
    int64_t x_row;
    int64_t weight;  // the first row of the batch
    int64_t group;   // rows of `x` that are multiplied at a time
    int64_t room;    // floats for the scales of a row
    int64_t size;    // floats of the sums of a tile
    int64_t grains;  // scales of a segment
    DecodeRow decode;
    FewFused fused;
    bool as_stored;    // whether stored scales are contiguous, one for each grain
    bool direct;       // whether they are floats, too
    bool scales_sums;  // whether the one scale of a row multiplies the sum, not the codes
    float *decoded, *other, *scales, *sums;
    float one = 1;

    Unit(const Problem& p, const Shape& s, const FloatDetail& d, const void* shared, const float* x, int64_t batch,
         char* own)
        : p(p), s(s), shared(shared), x(x), x_row(d.x_row), weight(first_row(&p, batch)), group(few_group(p, s)),
          room(2 * D::scale_room(p, s, scale_segments(s))), size(V::kFewTile * p.m * L),
          grains(s.mode == kOneScale ? 0 : s.codes / s.grain), decode(D::row_decoder(p)),
          fused(fused_kernel(p, s, group)), decoded(reinterpret_cast<float*>(own)),
          other(decoded + V::kFewTile * kChunkStride), scales(reinterpret_cast<float*>(own + d.scales)),
          sums(reinterpret_cast<float*>(own + d.sums)) {
      const bool short_rows = s.mode != kAnyBlock && p.block_size == s.grain && s.whole <= scale_segments(s);
      as_stored = (s.mode == kOneScale || short_rows) && s.whole == s.segments && p.zero_point == nullptr &&
                  p.row_scale == nullptr;
      direct = as_stored && p.scale_kind == kScaleFloat32 && per_plane(s.mode) == 1;
      scales_sums = fused != nullptr && s.mode == kOneScale && p.bits == 8 && p.k > 0;
    }
  };

  // Finds the scales of rows `row0` to `row0 + some`, from a segment on.
  EQQ_INLINE void find_scales(const Unit& u, int64_t row0, int64_t some, int64_t segment, RowScales* scale) {
    const Problem& p = u.p;
    float* to = u.scales + u.room;
    if (u.scales_sums) {
      for (int64_t i = 0; i < some; ++i) scale[i].scale = scale[i].zero = &u.one;
    } else if (u.as_stored) {
      const float* from = static_cast<const float*>(p.scale) + row0 * p.blocks;
      if (!u.direct) {
        D::decode_scales(p, row0, 0, some * p.blocks, to);
        from = to;
      }
      for (int64_t i = 0; i < some; ++i) scale[i].scale = scale[i].zero = from + i * p.blocks;
    } else {
      for (int64_t i = 0; i < some; ++i) scale[i] = D::whole_scales(p, u.s, row0 + i, segment, to + i * u.room);
    }
  }

  // The scales of the next block of rows, to prefetch while this one is multiplied.
  struct Ahead {
    const char *at, *end;
    int64_t share;  // bytes for each tile

    Ahead(const Unit& u, int64_t next, int64_t tiles) {
      const int64_t scale_row = u.p.blocks * scale_bytes(u.p.scale_kind);
      const int64_t after = min64(kFewBlock, u.weight + u.p.n - next);
      at = static_cast<const char*>(u.p.scale) + next * scale_row;
      end = at + after * scale_row;
      share = round_up(div_up(after * scale_row, max64(tiles, 1)), 64);
    }
    EQQ_INLINE void some(Ahead& a) {
      for (const char* upto = a.at + a.share; a.at < a.end && a.at < upto; a.at += 64) V::prefetch(a.at);
    }
  };

  // Segments `segment` to `end` of the `some` rows of a block.
  struct Span {
    int64_t segment, end;
    int64_t origin;  // the first segment that `scale` holds
    int64_t offset;  // the scales from `origin` to `segment`
    bool continues;  // whether the next segments are whole, and have their scales already
    int64_t row0, some;
    const RowScales* scale;
  };

  // Multiplies whole segments of a tile, and decodes the next ones meanwhile. `ready`: whether the first is decoded.
  // Returns whether the first segment of the next call is.
  EQQ_INLINE bool multiply_fused(Unit& u, FewStep& f, const Span& a, int64_t r, bool ready, const float* xs,
                                 float* tile_sums) {
    constexpr int kRows = V::kFewTile;
    const Problem& p = u.p;
    const Shape& s = u.s;
    const bool single = f.mask == 1;
    const int64_t row = a.row0 + r;
    f.bytes = p.codes + row * p.words + a.segment * kSegment;
    f.scale = a.scale[r].scale + a.offset;
    f.decoded = u.decoded;
    f.segments = a.end - a.segment;
    if (!ready)
      for (int64_t i = 0; i < kRows; ++i)
        u.decode(p, s, u.shared, row + i, a.segment, a.segment + 1, a.scale[r + i], a.origin, u.scales,
                 u.decoded + (f.start & f.mask) * s.codes + i * kChunkStride);
    const bool below = r + 2 * kRows <= a.some;
    ready = below || (r + kRows >= a.some && a.continues);
    f.next = f.bytes;
    f.next_scale = f.scale;
    if (ready) {
      const int64_t at = below ? r + kRows : 0;
      f.next = p.codes + (a.row0 + at) * p.words + (below ? a.segment : a.end) * kSegment;
      f.next_scale = a.scale[at].scale + (below ? a.offset : (a.end - a.origin) * u.grains);
    }
    f.ahead = ready ? f.next : p.codes + min64(row + kRows, u.weight + p.n - kRows) * p.words;
    f.next_decoded = single ? u.decoded + ((f.start + f.segments) & 1) * s.codes : u.other;
    u.fused(f, D::table256(u.shared), xs, u.x_row, tile_sums);
    for (int64_t m = u.group; m < p.m; m += u.group)
      few_kernel(min64(u.group, p.m - m))(u.decoded, xs + m * u.x_row, u.x_row, span(s, a.segment, a.end),
                                          tile_sums + m * kRows * L);
    if (single) {
      f.start = (f.start + f.segments) & 1;
    } else {
      float* swap = u.decoded;
      u.decoded = u.other;
      u.other = swap;
    }
    return ready;
  }

  // Multiplies segments of a tile of `rows` rows: decodes a piece, then multiplies it.
  EQQ_INLINE void multiply_pieces(const Unit& u, const Span& a, int64_t r, int64_t rows, const float* xs,
                                  float* tile_sums) {
    constexpr int kRows = V::kFewTile;
    const Problem& p = u.p;
    const Shape& s = u.s;
    const int64_t piece = chunk_segments(s);
    for (int64_t from = a.segment; from < a.end; from += piece, xs += piece * s.codes) {
      const int64_t to = min64(from + piece, a.end);
      for (int64_t i = 0; i < kRows; ++i) {
        const int64_t at = min64(i, rows - 1), row = a.row0 + r + at;
        const int64_t next = min64(row + kRows, u.weight + p.n - 1);
        for (int64_t j = from; j < min64(to, s.whole); ++j) V::prefetch(p.codes + next * p.words + j * kSegment);
        u.decode(p, s, u.shared, row, from, to, a.scale[r + at], a.origin, u.scales, u.decoded + i * kChunkStride);
      }
      for (int64_t m = 0; m < p.m; m += u.group)
        few_kernel(min64(u.group, p.m - m))(u.decoded, xs + m * u.x_row, u.x_row, span(s, from, to),
                                            tile_sums + m * kRows * L);
    }
  }

  // Reduces the sums of a tile of `rows` rows, scales them by `factors`, and writes them from `base` on.
  EQQ_INLINE void write_sums(const Unit& u, int64_t base, int64_t rows, const float* tile_sums, const float* factors) {
    constexpr int kRows = V::kFewTile;
    const Problem& p = u.p;
    for (int64_t start = 0; start < p.m; start += u.group) {
      const int64_t width = min64(u.group, p.m - start);
      for (int64_t m = 0; m < width; ++m) {
        const float* from = tile_sums + (start * kRows + m) * L;
        float totals[kRows];
        if constexpr (V::kSumsRows) {
          static_assert(kRows == V::kDotRows, "sum_rows takes as many");
          F a[kRows];
          for (int i = 0; i < kRows; ++i) a[i] = V::load(from + i * width * L);
          V::sum_rows(a, totals);
        } else {
          for (int i = 0; i < kRows; ++i) totals[i] = V::sum(V::load(from + i * width * L));
        }
        for (int64_t i = 0; i < rows; ++i)
          A::write(p, base + (start + m) * p.y_row + i * p.y_column,
                   factors != nullptr ? D::scaled(totals[i], factors[i]) : totals[i]);
      }
    }
  }

  // Multiplies rows `first` to `first + count` of a batch, in blocks for which a piece of `x` stays in L1.
  static void run(const Problem& p, const Shape& s, const FloatDetail& d, const void* shared, const float* x,
                  int64_t batch, int64_t first, int64_t count, char* own) {
    constexpr int kRows = V::kFewTile;
    Unit u(p, s, d, shared, x, batch, own);
    const int64_t step = d.few_step, scales_step = scale_segments(s);
    FewStep f;
    f.words = p.words;
    f.room = u.scales_sums ? 0 : u.as_stored ? p.blocks : u.room;
    f.step = u.grains;
    f.start = 0;
    f.mask = u.group >= p.m ? 1 : -1;  // with one group, only two decoded segments are kept
    for (int64_t block = 0; block < count; block += kFewBlock) {
      const int64_t some = min64(kFewBlock, count - block), row0 = u.weight + first + block;
      memset(u.sums, 0, 4 * div_up(some, kRows) * u.size);
      Ahead ahead(u, row0 + some, div_up(s.segments, step) * div_up(some, kRows));
      RowScales scale[kFewBlock];
      Span a = {0, 0, 0, 0, false, row0, some, scale};
      bool ready = false;  // whether the next first segments are decoded
      for (; a.segment < s.segments; a.segment = a.end) {
        a.end = min64(a.segment + step, s.segments);
        if (a.segment % scales_step == 0) {
          a.origin = a.segment;
          ready = false;
          find_scales(u, row0, some, a.segment, scale);
        }
        a.offset = (a.segment - a.origin) * u.grains;
        a.continues = a.end < s.segments && a.end % scales_step != 0 && min64(a.end + step, s.segments) <= s.whole;
        const float* xs = x + a.segment * s.codes;
        for (int64_t r = 0; r < some; r += kRows) {
          const int64_t rows = min64(kRows, some - r);
          float* tile_sums = u.sums + r / kRows * u.size;
          Ahead::some(ahead);
          if (u.fused != nullptr && rows == kRows && a.end <= s.whole) {
            ready = multiply_fused(u, f, a, r, ready, xs, tile_sums);
          } else {
            ready = false;
            multiply_pieces(u, a, r, rows, xs, tile_sums);
          }
        }
      }
      float factors[kFewBlock];
      for (int64_t i = 0; u.scales_sums && i < some; ++i) D::decode_scales(p, row0 + i, 0, 1, factors + i);
      for (int64_t r = 0; r < some; r += kRows)
        write_sums(u, batch * p.y_batch + (first + block + r) * p.y_column, min64(kRows, some - r),
                   u.sums + r / kRows * u.size, u.scales_sums ? factors + r : nullptr);
    }
  }
};

}  // namespace
