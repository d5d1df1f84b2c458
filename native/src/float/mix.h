// Transposed products with few rows of `x`: codes are decoded and multiplied in registers, with lanes along the
// results. Scales multiply `x` instead of codes.
#pragma once

#include "float/dots.h"
#include "float/transposed.h"

namespace {

template <class V>
struct Mix {
  using D = Decode<V>;
  using F = typename V::F;
  using RowScales = typename D::RowScales;
  using Table = typename V::Table;
  static constexpr int L = V::L;
  static constexpr int kHalves = D::kHalves, kMost = Dots<V>::kMost;

  // With short rows, as in a KV cache, decoding to memory first would take longest.
  static bool accepts(const Problem& p, const Shape& s) {
    return p.m <= (s.segments <= 4 ? 4 : 1) * V::kMixedRows && s.mode != kAnyBlock &&
           (s.whole == s.segments || s.mode == kOneScale);
  }

  // A segment of each of `count` rows of the weight.
  struct Rows {
    const uint8_t* bytes;
    int64_t words, count;
    const float *scale, *zero;  // scales and zero points of the segment, `room` floats from row to row
    int64_t room;
    const float* factor;  // the scales of a plane for all rows, contiguous; `step` from plane to plane
    int64_t step;
  };

  // Adds the products with `kM` rows of x to `sums`.
  template <int kBits, int kValues, Mode kMode, bool kZero, int kM>
  static void mix(const Rows& rows, const float* values, const float* x, float* sums, int64_t width) {
    const Table table = V::table(values);
#pragma GCC unroll 1
    for (int plane = 0; plane < 8 / kBits; ++plane) {
      float scaled[kM * kRowChunkStride];
      const float* xs = x;
      if constexpr (per_plane(kMode) == 1) {  // scale x once instead of all codes
        const float* factor = rows.factor + (kMode == kOneScale ? 0 : plane) * rows.step;
        for (int m = 0; m < kM; ++m)
          for (int64_t i = 0; i < rows.count; i += L)
            V::store(scaled + m * kRowChunkStride + i,
                     V::mul(V::load(x + m * kRowChunkStride + i), V::load(factor + i)));
        xs = scaled;
      }
      for (int h = 0; h < D::kHalves; ++h) {
        F acc[kM][4];
#pragma GCC unroll 8
        for (int m = 0; m < kM; ++m)
#pragma GCC unroll 4
          for (int v = 0; v < 4; ++v) acc[m][v] = V::zero();
        for (int64_t n = 0; n < rows.count; ++n) {
          F w[4];
          Dots<V>::template four<kBits, kValues, kMode, kZero, false>(rows.bytes + n * rows.words + 4 * L * h, h, plane,
                                                                      values, table, rows.scale + n * rows.room,
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
            float* to = sums + m * width + (h * (8 / kBits) + plane) * 4 * L + v * L;
            V::store(to, V::add(V::load(to), acc[m][v]));
          }
      }
    }
  }

  // Multiplies by all rows of x, in groups whose sums fit in registers.
  template <int kBits, int kValues, Mode kMode, bool kZero>
  static void mix_all(const Rows& rows, const float* values, const float* x, int64_t m, float* sums, int64_t width) {
    for (; m >= Dots<V>::kMost;
         m -= Dots<V>::kMost, x += Dots<V>::kMost * kRowChunkStride, sums += Dots<V>::kMost * width)
      mix<kBits, kValues, kMode, kZero, Dots<V>::kMost>(rows, values, x, sums, width);
    for (; m >= 2; m -= 2, x += 2 * kRowChunkStride, sums += 2 * width)
      mix<kBits, kValues, kMode, kZero, 2>(rows, values, x, sums, width);
    if (m > 0) mix<kBits, kValues, kMode, kZero, 1>(rows, values, x, sums, width);
  }

  using MixRows = void (*)(const Rows&, const float*, const float*, int64_t, float*, int64_t);

  static MixRows mixer(const Problem& p, Mode mode) {
    return D::by_codes(p, [&](auto codes) {
      using C = decltype(codes);
      return by_mode(
          mode, [](auto kind) -> MixRows { return mix_all<C::kBits, C::kValues, decltype(kind)::value, C::kZero>; });
    });
  }

  // Offsets into the scratch memory of a thread, in bytes.
  struct Room {
    int64_t rows, scales, factors, tails, sums, all;

    Room(const Problem& p, const Shape& s, int64_t count) {
      rows = 2 * D::scale_room(p, s, count);  // floats for the scales and zero points of a row
      scales = 0;
      factors = aligned(4 * kRowChunk * rows);
      tails = factors + aligned(4 * kRowChunkStride * (s.mode == kUniform ? count * s.planes : 1));
      sums = tails + (s.whole < s.segments ? kRowChunk * kSegment : 0);
      all = sums + aligned(4 * p.m * count * s.codes);
    }
  };

  // Multiplies segments `first` to `first + count` of all rows of a batch.
  static void run(const Problem& p, const Shape& s, const void* shared, const float* x, int64_t batch, int64_t first,
                  int64_t count, char* own) {
    const Room room(p, s, count);
    const MixRows mix = mixer(p, s.mode);
    float* scales = reinterpret_cast<float*>(own + room.scales);
    float* factors = reinterpret_cast<float*>(own + room.factors);
    uint8_t* tails = reinterpret_cast<uint8_t*>(own + room.tails);
    float* sums = reinterpret_cast<float*>(own + room.sums);
    const int64_t weight = first_row(&p, batch), width = count * s.codes, whole = min64(first + count, s.whole) - first;
    const int64_t grains = s.mode == kOneScale ? 0 : s.codes / s.grain;
    // Scales of all rows are contiguous, and can be decoded together.
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
        D::decode_scales(p, row, 0, some * p.blocks, scales);
      } else {
        for (int64_t i = 0; i < some; ++i) {
          const RowScales r =
              D::row_scales(p, s, row + i, first, max64(first + whole, first + 1), scales + i * room.rows);
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
        if (i >= whole && !Dots<V>::can_overread(p, rows.bytes + (some - 1) * p.words)) {
          for (int64_t r = 0; r < some; ++r) memcpy(tails + r * kSegment, rows.bytes + r * p.words, s.tail_bytes);
          rows.bytes = tails;
          rows.words = kSegment;
        }
        rows.factor = factors + i * grains * kRowChunkStride;
        mix(rows, D::table256(shared), xs, p.m, sums + i * s.codes, width);
        rows.scale += grains;
        rows.zero += grains;
      }
    }
    Transposed<V>::write_transposed(p, s, batch, 0, p.m, first, count, sums, width);
  }
};

}  // namespace
