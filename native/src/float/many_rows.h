// Many rows of `x`: decodes rows of the weight to L2, and multiplies tiles with lanes along the rows of `x`.
#pragma once

#include "float/arrays.h"
#include "float/decode.h"
#include "float/tiles.h"

namespace {

template <class V>
struct ManyRows {
  using D = Decode<V>;
  using A = Arrays<V>;
  using F = typename V::F;
  using RowScales = typename D::RowScales;
  using DecodeRow = typename D::DecodeRow;
  static constexpr int L = V::L;

  static void run(const Problem& p, const Shape& s, const FloatDetail& d, const void* shared, const float* x,
                  int64_t batch, int64_t block, int64_t first, int64_t count, char* own) {
    float* decoded = reinterpret_cast<float*>(own);
    float* scales = reinterpret_cast<float*>(own + d.scales);
    float* sums = reinterpret_cast<float*>(own + d.sums);
    const DecodeRow decode = D::row_decoder(p);
    const int64_t start = block * kRowBlock, rows = min64(kRowBlock, d.m_padded - start);
    const int64_t step = chunk_segments(s), scales_step = scale_segments(s);
    const int64_t room = 2 * D::scale_room(p, s, scales_step), weight = first_row(&p, batch);
    memset(sums, 0, 4 * count * rows);
    RowScales scale[kMostRows];
    int64_t origin = 0;
    for (int64_t segment = 0; segment < s.segments; segment += step) {
      const int64_t end = min64(segment + step, s.segments), length = span(s, segment, end);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = weight + first + i;
        if (segment % scales_step == 0) {
          origin = segment;
          scale[i] = D::whole_scales(p, s, row, segment, scales + (i + 1) * room);
        }
        decode(p, s, shared, row, segment, end, scale[i], origin, scales, decoded + i * kChunkStride);
        // Prefetches the next piece of this row, or the first one of the next unit.
        const uint8_t* next = p.codes + (end < s.whole ? row * p.words + end * kSegment
                                                       : min64(row + d.rows, weight + p.n - 1) * p.words);
        for (int64_t j = 0; j < min64(step, s.whole); ++j) V::prefetch(next + j * kSegment);
      }
      for (int64_t m = 0; m < rows; m += 2 * L) {
        const int64_t lanes = min64(2 * L, rows - m);
        const float* panel = x + (start + m) * s.padded + segment * s.codes * lanes;
        if (lanes == L) {
          Tiles<V>::template tiles<1, V::kTileRows1, kChunkStride>(count, decoded, panel, L, length, sums + m, rows);
        } else {
          Tiles<V>::template tiles<2, V::kTileRows, kChunkStride>(count, decoded, panel, 2 * L, length, sums + m, rows);
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
        for (int64_t m = whole; m < real; ++m) A::write(p, at + m, sums[i * rows + m]);
      }
    } else {
      const int64_t squares = p.y_column == 1 ? count / L * L : 0;
      for (int64_t m = 0; m < whole; m += L)
        for (int64_t i = 0; i < squares; i += L) {
          F a[L];
#pragma GCC unroll 16
          for (int r = 0; r < L; ++r) a[r] = V::load(sums + (i + r) * rows + m);
          A::transpose(a);
#pragma GCC unroll 16
          for (int r = 0; r < L; ++r) V::store(static_cast<float*>(p.y) + base + (m + r) * p.y_row + i, a[r]);
        }
      for (int64_t m = 0; m < real; ++m)
        for (int64_t i = m < whole ? squares : 0; i < count; ++i)
          A::write(p, base + m * p.y_row + i * p.y_column, sums[i * rows + m]);
    }
  }
};

}  // namespace
