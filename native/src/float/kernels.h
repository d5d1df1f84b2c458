// The product of floats: chooses the method, and divides the work into units.
#pragma once

#include "float/dense.h"
#include "float/dot.h"
#include "float/few_rows.h"
#include "float/many_rows.h"
#include "float/mix.h"
#include "float/prepare.h"

namespace {

template <class V>
struct Kernels {
  using D = Decode<V>;
  static constexpr auto prepare = Prepare<V>::prepare;

  static int64_t method(const Problem& p, const Shape& s, bool fused) {
    if (p.transpose) return Mix<V>::accepts(p, s) ? kMix : kTransposed;
    // `kFew` decodes while it multiplies. It is faster from the fourth row on, but slow with a partial last segment.
    const int64_t dots = fused && s.whole >= 4 * (s.segments - s.whole) ? min64(3, V::kDirectRows) : Dots<V>::most(p);
    if (p.m <= (s.mode == kAnyBlock ? 1 : dots)) return kDot;
    return p.m <= (fused ? V::kFusedRows : V::kFewRows) ? kFew : kPanels;
  }

  // The rows (or segments) of a unit of the weight: a multiple of `grain`, at most `most`.
  struct Bounds {
    int64_t grain, most;
  };

  // Plans the packing of `x`; returns the bounds of a unit of the weight.
  static Bounds plan_x(const Problem& p, const Shape& s, FloatDetail* d) {
    d->row_blocks = 1;
    d->m_padded = p.m;
    d->x_row = s.padded;
    switch (d->method) {
      case kDot:
      case kFew:
        d->x_row = few_row(s);
        d->x_batch = p.m * d->x_row;
        return d->method == kDot ? Bounds{V::kDotRows, kMostDots} : Bounds{V::kFewTile, 16 * V::kFewTile};
      case kPanels:
        d->m_padded = div_up(p.m, V::L) * V::L;
        d->x_batch = d->m_padded * s.padded;
        d->row_blocks = div_up(d->m_padded, kRowBlock);
        return {V::kTileRows, kMostRows};
      default:
        d->x_batch = div_up(p.n, kRowChunk) * p.m * kRowChunkStride;
        d->row_blocks = div_up(p.m, kRowBlock);
        return {1, max64(1, (p.m <= V::kWideRows ? 1024 : 512) / s.codes)};
    }
  }

  // Plans the scratch memory of a thread; returns its bytes.
  static int64_t plan_memory(const Problem& p, const Shape& s, bool fused, FloatDetail* d) {
    const int64_t room = 2 * D::scale_room(p, s, scale_segments(s)), scale_bytes = aligned(4 * room);  // per row
    switch (d->method) {
      case kDot: {
        const int64_t own = aligned(4 * (V::kDotRows * room + s.codes));
        return s.segments <= kShortRow ? max64(own, aligned(4 * kMostDots * (p.blocks + 16))) : own;
      }
      case kFew: {
        d->scales = aligned(4 * 2 * V::kFewTile * kChunkStride);
        int64_t codes = fused ? kScaleChunk : kChunk;
        while (codes > kChunk / 2 && codes * p.m > kFewFloats) codes /= 2;
        if (p.m > V::kFewGroup) codes = min64(codes, kChunk);
        d->few_step = max64(codes / s.codes, 1);
        d->sums = d->scales + (kFewBlock + 1) * scale_bytes;
        return d->sums + aligned(4 * kFewBlock * p.m * V::L);
      }
      case kPanels:
        d->scales = aligned(4 * d->rows * kChunkStride);
        d->sums = d->scales + (d->rows + 1) * scale_bytes;
        return d->sums + aligned(4 * d->rows * min64(d->m_padded, kRowBlock));
      case kMix: return typename Mix<V>::Room(p, s, d->rows).all;
      default: {
        const int64_t width = d->rows * s.codes;
        d->scales = aligned(4 * kRowChunk * width);
        d->sums = d->scales + 2 * aligned(4 * 2 * D::scale_room(p, s, d->rows));
        return d->sums + aligned(4 * min64(p.m, kRowBlock) * width);
      }
    }
  }

  static void plan(const Problem* problem, int64_t threads, Plan* out) {
    const Problem& p = *problem;
    const Shape s = D::shape_of(p);
    const bool fused = !p.transpose && FewRows<V>::fused_kernel(p, s, p.m) != nullptr;
    FloatDetail d = {};
    d.method = method(p, s, fused);
    const Bounds bounds = plan_x(p, s, &d);
    const int64_t wanted = 4 * threads;  // enough units that threads end at about the same time
    const int64_t outer = p.transpose ? s.segments : p.n;
    int64_t rows = div_up(outer * p.batch * d.row_blocks, max64(wanted, 1));
    // A unit is large enough that handing it to a thread costs little.
    const int64_t cost = p.m * (p.transpose ? p.n * s.codes : p.k);
    rows = max64(rows, (int64_t(1) << 17) / max64(cost, 1));
    d.rows = max64(min64(round_up(min64(rows, outer), bounds.grain), bounds.most), bounds.grain);
    d.chunks = div_up(outer, d.rows);
    const int64_t own = plan_memory(p, s, fused, &d);
    d.x_parts = max64(min64(p.transpose ? p.m : s.segments, max64(1, d.x_batch >> 16)), 1);
    out->shared_bytes = D::shared_header(s) + aligned(4 * d.x_batch * p.batch);
    out->own_bytes = max64(own, 64);
    out->parts = p.batch * d.x_parts;
    out->units = p.batch * d.row_blocks * d.chunks;
    // Few rows at a time, so that packed `x` stays in the cache, but enough units for all threads.
    if (d.method == kPanels) out->rows = kRowBlock * div_up(wanted, p.batch * div_up(p.n, bounds.most));
    set_detail(d, out);
  }

  static void run(const Problem* problem, const Plan* plan, const void* shared, void* own, int64_t unit) {
    const Problem& p = *problem;
    const Shape s = D::shape_of(p);
    const FloatDetail d = detail_of<FloatDetail>(plan);
    const int64_t chunk = unit % d.chunks, block = unit / d.chunks % d.row_blocks,
                  batch = unit / d.chunks / d.row_blocks;
    const float* x = D::open_shared(s, shared).x + batch * d.x_batch;
    const int64_t first = chunk * d.rows, outer = p.transpose ? s.segments : p.n;
    const int64_t count = min64(d.rows, outer - first);
    switch (d.method) {
      case kDot: return Dot<V>::run(p, s, d, shared, x, batch, first, count, static_cast<float*>(own));
      case kMix: return Mix<V>::run(p, s, shared, x, batch, first, count, static_cast<char*>(own));
      case kFew: return FewRows<V>::run(p, s, d, shared, x, batch, first, count, static_cast<char*>(own));
      case kPanels: return ManyRows<V>::run(p, s, d, shared, x, batch, block, first, count, static_cast<char*>(own));
      default: return Transposed<V>::run(p, s, d, shared, x, batch, block, first, count, static_cast<char*>(own));
    }
  }
};

}  // namespace
