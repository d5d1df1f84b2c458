// Transposed products: tiles as in `many_rows.h`, with lanes along the decoded rows.
#pragma once

#include "float/arrays.h"
#include "float/decode.h"
#include "float/tiles.h"

namespace {

template <class V>
struct Transposed {
  using D = Decode<V>;
  using A = Arrays<V>;
  using RowScales = typename D::RowScales;
  using DecodeRow = typename D::DecodeRow;
  static constexpr int L = V::L;

  // Prefetches segments `first` to `last` of a row, and their first scales. Not inlined, since tiles need registers.
  // The `asm` keeps a compiler from dropping a call that only prefetches.
  EQQ_NOINLINE void fetch_row(const Problem& p, const Shape& s, int64_t row, int64_t first, int64_t last) {
    for (int64_t j = first; j < last; ++j) V::prefetch(p.codes + row * p.words + j * kSegment);
    const int64_t scale = row * p.blocks + first * s.codes / p.block_size;
    V::prefetch(static_cast<const char*>(p.scale) + scale * scale_bytes(p.scale_kind));
    __asm__ volatile("");
  }

  static void run(const Problem& p, const Shape& s, const FloatDetail& d, const void* shared, const float* x,
                  int64_t batch, int64_t block, int64_t first, int64_t count, char* own) {
    float* decoded = reinterpret_cast<float*>(own);
    float* scales = reinterpret_cast<float*>(own + d.scales);
    float* sums = reinterpret_cast<float*>(own + d.sums);
    const DecodeRow decode = D::row_decoder(p);
    const int64_t start = block * kRowBlock, rows = min64(kRowBlock, p.m - start), width = count * s.codes;
    const int64_t room = 2 * D::scale_room(p, s, d.rows), weight = first_row(&p, batch);
    memset(sums, 0, 4 * rows * width);
    for (int64_t n = 0; n < p.n; n += kRowChunk) {
      const int64_t some = min64(kRowChunk, p.n - n);
      for (int64_t i = 0; i < some; ++i) {
        const int64_t row = weight + n + i, end = min64(first + count, s.whole);
        RowScales r = {scales, scales};
        if (first < end) r = D::row_scales(p, s, row, first, end, scales);
        fetch_row(p, s, min64(row + kRowChunk, weight + p.n - 1), first, end);
        decode(p, s, shared, row, first, first + count, r, first, scales + room, decoded + i * width);
      }
      const float* xs = x + (n / kRowChunk * p.m + start) * kRowChunkStride;
      if (rows <= V::kWideRows) {
        for (int64_t c = 0; c < width; c += 4 * L)
          Tiles<V>::template tiles<4, V::kWideRows, kRowChunkStride>(rows, xs, decoded + c, width, some, sums + c,
                                                                     width);
      } else {
        for (int64_t c = 0; c < width; c += 2 * L)
          Tiles<V>::template tiles<2, V::kTileRows, kRowChunkStride>(rows, xs, decoded + c, width, some, sums + c,
                                                                     width);
      }
    }
    write_transposed(p, s, batch, start, rows, first, count, sums, width);
  }

  // Writes the results of rows `start` to `start + rows` of x, from the order of decoding to logical order.
  static void write_transposed(const Problem& p, const Shape& s, int64_t batch, int64_t start, int64_t rows,
                               int64_t first, int64_t count, const float* sums, int64_t width) {
    int64_t at[512];
    for (int64_t segment = first; segment < first + count; ++segment) {
      // The same in all whole segments.
      if (segment == first || segment >= s.whole)
        for (int64_t i = 0; i < s.codes; ++i) at[i] = D::logical(p, s, segment, i) - segment * s.codes;
      const float* from = sums + (segment - first) * s.codes;
      for (int64_t m = 0; m < rows; ++m) {
        const int64_t base = batch * p.y_batch + (start + m) * p.y_row + segment * s.codes * p.y_column;
        for (int64_t i = 0; i < s.codes; ++i)
          if (at[i] >= 0) A::write(p, base + at[i] * p.y_column, from[m * width + i]);
      }
    }
  }
};

}  // namespace
