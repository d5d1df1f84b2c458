// Prepares memory that threads share: tables, and `x` as floats in the order of decoding.
#pragma once

#include "float/arrays.h"
#include "float/decode.h"

namespace {

template <class V>
struct Prepare {
  using D = Decode<V>;
  using A = Arrays<V>;
  using F = typename V::F;
  static constexpr int L = V::L;
  static constexpr int kHalves = D::kHalves;

  static void prepare_tables(const Problem& p, const Shape& s, void* shared) {
    const Shared common = D::open_shared(s, shared);
    float* table = static_cast<float*>(shared);
    const int codes = 1 << p.bits;
    for (int i = 0; i < max64(codes, 16); ++i) table[i] = p.table[i & (codes - 1)];  // lookups read sixteen
    if (V::kTablesOfBytes)
      for (int i = 0; i < 256; ++i) {
        uint8_t bytes[4];  // the low one first, as on every machine with this
        memcpy(bytes, table + i, 4);
        for (int j = 0; j < 4; ++j) reinterpret_cast<uint8_t*>(table + 256)[256 * j + i] = bytes[j];
      }
    int64_t segment = s.mode == kAnyBlock ? 0 : s.tail == s.codes ? s.whole : s.segments;
    for (int64_t at = 0; segment < s.segments; ++segment)
      for (int64_t i = 0; i < s.codes; ++i, ++at) {
        const int64_t k = D::logical(p, s, segment, i);
        const int64_t first = segment * s.codes / p.block_size;
        common.index[at] = k < 0 || s.mode == kOneScale ? 0 : static_cast<int32_t>(k / p.block_size - first);
        common.mask[i] = k < 0 ? 0 : -1;  // the last one stays
        if (segment == s.whole && k >= 0) common.place[k - s.whole * s.codes] = static_cast<int32_t>(i);
      }
  }

  template <int kType>
  EQQ_INLINE void pack_rows(const Problem& p, int64_t from, int64_t codes, const int32_t* order, float* out,
                            int64_t out_row) {
    if (p.x_row == 1) {
      for (int64_t i = 0; i < codes; ++i)
        V::store(out + order[i] * out_row, A::template load_x<kType>(p.x, from + i * p.x_column));
      return;
    }
    for (int64_t i = 0; i < codes; i += L) {
      F a[L];
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r) a[r] = A::template load_x<kType>(p.x, from + r * p.x_row + i);
      A::transpose(a);
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r) V::store(out + order[i + r] * out_row, a[r]);
    }
  }

  // Packs a whole segment of one row of `x`, whose elements are contiguous.
  template <int kType>
  EQQ_INLINE void pack_segment(const Problem& p, const Shape& s, int64_t from, float* out) {
    for (int64_t plane = 0; plane < s.planes; ++plane, from += kPlane) {
      float x[kPlane];
      for (int i = 0; i < kPlane; i += L) V::store(x + i, A::template load_x<kType>(p.x, from + i));
      for (int h = 0; h < D::kHalves; ++h) {
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
    const Shape s = D::shape_of(p);
    const FloatDetail d = detail_of<FloatDetail>(plan);
    const Shared common = D::open_shared(s, shared);
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
  static void pack(const Problem& p, const Shape& s, const FloatDetail& d, int64_t batch, int64_t first, int64_t last,
                   float* out) {
    const int64_t base = batch * p.x_batch;
    if (p.transpose) {
      for (int64_t m = first; m < last; ++m)
        for (int64_t n = 0; n < p.n; n += kRowChunk) {
          float* to = out + (n / kRowChunk * p.m + m) * kRowChunkStride;
          const int64_t from = base + m * p.x_row + n * p.x_column, some = min64(kRowChunk, p.n - n);
          const int64_t vectors = p.x_column == 1 ? some / L * L : 0;
          for (int64_t i = 0; i < vectors; i += L) V::store(to + i, A::template load_x<kType>(p.x, from + i));
          for (int64_t i = vectors; i < some; ++i) to[i] = A::template read<kType>(p.x, from + i * p.x_column);
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
      // The order is the same in all segments but the last.
      const int64_t codes = segment < s.whole ? s.codes : s.tail;
      if (segment == begin || segment >= s.whole) {
        for (int64_t i = 0; i < codes; ++i) {
          int64_t k = segment * s.codes + i;
          if (codes == s.codes) {
            k = D::logical(p, s, segment, i);
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
            row[i] = order[i] < 0 ? 0.0f : A::template read<kType>(p.x, from + order[i] * p.x_column);
        }
        continue;
      }
      // A panel is two vectors of rows; the last may be one.
      const bool full = segment < s.whole || (codes < s.codes && codes == p.k - segment * s.codes);
      const bool whole = full && (p.x_row == 1 || p.x_column == 1);
      for (int64_t m = 0; m < d.m_padded; m += 2 * L) {
        const int64_t width = min64(2 * L, d.m_padded - m);
        float* panel = out + m * s.padded + segment * s.codes * width;
        for (int64_t v = 0; v < width; v += L) {
          const int64_t from = start + (m + v) * p.x_row, rows = min64(L, p.m - m - v);
          if (whole && rows == L) {
            pack_rows<kType>(p, from, codes, inverse, panel + v, width);
            continue;
          }
          for (int64_t i = 0; i < codes; ++i) {
            float* to = panel + i * width + v;
            const int64_t some = order[i] < 0 ? 0 : rows;
            for (int64_t r = 0; r < some; ++r)
              to[r] = A::template read<kType>(p.x, from + r * p.x_row + order[i] * p.x_column);
            for (int64_t r = max64(some, 0); r < L; ++r) to[r] = 0.0f;
          }
        }
      }
    }
  }
};

}  // namespace
