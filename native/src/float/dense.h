// Decoding to a dense weight: rows are decoded to the cache as for a product, and permuted to logical order there.
#pragma once

#include "float/prepare.h"

namespace {

template <class V>
struct Dense {
  using D = Decode<V>;
  using RowScales = typename D::RowScales;
  using DecodeRow = typename D::DecodeRow;
  static constexpr int L = V::L;
  static constexpr int kHalves = D::kHalves;

  static void plan(const Problem* problem, int64_t threads, Plan* out) {
    const Problem& p = *problem;
    const Shape s = D::shape_of(p);
    const int64_t rows = p.batch * p.n, most = max64(1, (int64_t(1) << 17) / p.k);
    out->detail[0] = min64(most, div_up(rows, 4 * threads));  // rows in a unit
    out->shared_bytes = D::shared_header(s);
    out->own_bytes = aligned(4 * (2 * 2 * D::scale_room(p, s, scale_segments(s)) + 2 * kChunk + s.codes));
    out->parts = 1;
    out->units = div_up(rows, out->detail[0]);
  }

  static void prepare(const Problem* problem, const Plan*, void* shared, int64_t) {
    Prepare<V>::prepare_tables(*problem, D::shape_of(*problem), shared);
  }

  static void run(const Problem* problem, const Plan* plan, const void* shared, void* own, int64_t unit) {
    const Problem& p = *problem;
    const Shape s = D::shape_of(p);
    const int64_t first = unit * plan->detail[0], last = min64(first + plan->detail[0], p.batch * p.n);
    const int64_t step = chunk_segments(s), scales_step = scale_segments(s),
                  room = 2 * D::scale_room(p, s, scales_step);
    float* scales = static_cast<float*>(own);
    float* decoded = scales + 2 * room;
    float* ordered = decoded + kChunk;
    int32_t* order = reinterpret_cast<int32_t*>(ordered + kChunk);  // the logical positions of a partial last segment
    if (s.whole < s.segments)
      for (int64_t i = 0; i < s.codes; ++i) order[i] = static_cast<int32_t>(D::logical(p, s, s.whole, i));
    const DecodeRow decode = D::row_decoder(p);
    for (int64_t at = first; at < last; ++at) {
      const int64_t row = first_row(&p, at / p.n) + at % p.n;
      RowScales scale = {scales, scales};
      int64_t origin = 0;
      for (int64_t segment = 0; segment < s.segments; segment += step) {
        const int64_t end = min64(segment + step, s.segments);
        if (segment % scales_step == 0) {
          origin = segment;
          scale = D::whole_scales(p, s, row, segment, scales + room);
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
            for (int64_t h = 0; h < D::kHalves; ++h)
              for (int64_t plane = 0; plane < s.planes; ++plane, from += 4 * L)
                interleave(from, to + plane * kSegment + h * 4 * L);
          }
        }
        write_row(p, at * p.k + start, ordered, min64(end * s.codes, p.k) - start);
      }
    }
  }

  // Permutes decoded codes from the order of decoding to the order of their bytes.
  EQQ_INLINE void interleave(const float* from, float* to) {
    for (int j = 0; j < L; ++j)
      for (int c = 0; c < 4; ++c) to[4 * j + c] = from[c * L + j];
  }

  static void write_row(const Problem& p, int64_t at, float* values, int64_t count) {
    if (p.clip) {
      const float limit = p.x_type == kFloat16  ? 65504.0f
                        : p.x_type == kBFloat16 ? 3.3895313892515355e38f
                                                : 3.4028234663852886e38f;
      for (int64_t i = 0; i < count; ++i) {  // keeps NaN
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
