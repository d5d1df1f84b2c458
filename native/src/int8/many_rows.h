// Many rows of `x`: lanes run along them.
#pragma once

#include "int8/weight.h"
#include "int8/x.h"

namespace {

// One or two panels of as many rows of `x` as a vector has lanes, a tile of rows of the weight, and one step.
struct Panel {
  const uint8_t* w;  // rows of bytes, `w_row` apart
  int64_t w_row;
  const uint8_t* x;     // groups of each row of `x`, one after the other
  int64_t x_panel;      // bytes of a panel
  const uint8_t* next;  // the same bytes of the next tile, which are fetched; or null
  int64_t next_row;     // bytes from one of its rows to the next
  int64_t bits;         // of a code
  int64_t bytes_in_16;  // of panels, which are added up in 16 bits, if `kSumsIn16Bits`
  Step step;
  const int32_t* sums_x;  // of the lanes for each run, runs `sums_stride` apart
  int64_t sums_stride;
  const int32_t* offset;   // what codes are off, for rows and runs: null if it is in `sums_x`
  const int32_t* shift;    // what codes of the lanes are too much; null without zero points of x
  const int32_t* weights;  // for rows and runs: sums of the weight in this step
  const float* scale;      // for rows and runs, `kRunRoom` apart
  float* sums;             // results so far, a row of the tile after the other
  int32_t* partial;        // sums of runs that have not ended, likewise
};

template <class V>
struct Int8ManyRows {
  using X = Int8X<V>;
  using W = Int8Weight<V>;
  using I = typename V::I;
  using F = typename V::F;
  static constexpr int L = V::L, kThirds = (V::kInt8TileRows + 2) / 3;  // of pointers, one for three rows

  // GCC would have a pointer for each row, and keep sums of all runs in registers, which are too few.
  template <typename T>
  EQQ_INLINE void hide(T*& p) {
    __asm__("" : "+r"(p));
  }

  // Adds the products of groups from `x` to `end` to the sums of a tile, and advances `x` and `w` past them.
  template <int kVectors, class Add>
  EQQ_INLINE void add_groups(const uint8_t** w, int64_t w_row, const uint8_t*& x, int64_t x_panel, const uint8_t* end,
                             I (*sums)[kVectors], Add add) {
    while (x < end) {
      I xs[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) xs[v] = V::load_int(x + v * x_panel);
#pragma GCC unroll 16
      for (int i = 0; i < V::kInt8TileRows; ++i) {
        const I ws = W::word(w[i / 3] + i % 3 * w_row);
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sums[i][v] = add(sums[i][v], ws, xs[v]);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kThirds; ++i) {
        w[i] += 4;
        hide(w[i]);
      }
      x += 4 * L;
    }
  }

  // `kSeveral`: whether the step has several runs.
  template <int kVectors, bool kZero, bool kShift, bool kSeveral>
  EQQ_NOINLINE void tile(const Panel& a) {
    constexpr int kRows = V::kInt8TileRows, kWidth = kVectors * L;
    const uint8_t* w[kThirds];  // every third row
#pragma GCC unroll 4
    for (int i = 0; i < kThirds; ++i) w[i] = a.w + 3 * i * a.w_row;
    const uint8_t* x = a.x;
    // Copies, since vectors that are stored might be of what `a` points to, for all that GCC knows.
    const int64_t w_row = a.w_row, x_panel = a.x_panel, bytes_in_16 = a.bytes_in_16, runs = kSeveral ? a.step.runs : 1,
                  length = a.step.length;
    const int32_t *sums_x = a.sums_x, *offset = a.offset, *weights = a.weights;
    const float* scale = a.scale;
    const bool begins = kSeveral || a.step.begins, ends = kSeveral || a.step.ends;
    int64_t bits = 0;  // of each row so far
    for (int64_t run = 0; run < runs; ++run, sums_x += a.sums_stride, ++offset, ++weights, ++scale) {
      I acc[kRows][kVectors];
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          if (!begins) {
            acc[i][v] = V::load_int(a.partial + i * kWidth + v * L);
          } else if (!W::kCorrects) {
            acc[i][v] = V::zero_int();
          } else {
            acc[i][v] = V::load_int(sums_x + v * L);
            if (kZero) acc[i][v] = V::mul(acc[i][v], V::broadcast_int(offset[i * kRunRoom]));
          }
          if (kShift)
            acc[i][v] =
                V::add(acc[i][v], V::mul(V::load_int(a.shift + v * L), V::broadcast_int(-weights[i * kRunRoom])));
        }
      float* sums = a.sums;
      hide(sums);
      for (int64_t left = length; left > 0; left -= 64) {
        const int64_t codes = min64(left, 64);
        if (a.next != nullptr && bits % 512 == 0) {
#pragma GCC unroll 16
          for (int i = 0; i < kRows; ++i) __builtin_prefetch(a.next + i * a.next_row + bits / 8, 0, 2);
        }
        bits += codes * a.bits;
        const uint8_t* end = x + codes * W::kBytes * L;
        if constexpr (V::kSumsIn16Bits) {
          while (x < end) {
            const uint8_t* stop = min64(end - x, bytes_in_16) + x;
            I sums16[kRows][kVectors];
#pragma GCC unroll 16
            for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
              for (int v = 0; v < kVectors; ++v) sums16[i][v] = V::zero_int();
            add_groups<kVectors>(w, w_row, x, x_panel, stop, sums16,
                                 [](I sum, I w, I x) { return V::add_products(sum, w, x); });
#pragma GCC unroll 16
            for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
              for (int v = 0; v < kVectors; ++v) acc[i][v] = V::add_sums(acc[i][v], sums16[i][v]);
          }
        } else {
          add_groups<kVectors>(w, w_row, x, x_panel, end, acc, [](I sum, I w, I x) { return V::dot(sum, w, x); });
        }
      }
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) {
          const int at = i * kWidth + v * L;
          if (ends) {
            V::store(sums + at, V::fma(V::to_float(acc[i][v]), V::broadcast(scale[i * kRunRoom]), V::load(sums + at)));
          } else {
            V::store(a.partial + at, acc[i][v]);
          }
        }
    }
  }

  template <int kVectors, bool kZero, bool kShift>
  EQQ_INLINE void tiles(const Panel& a) {
    a.step.runs > 1 ? tile<kVectors, kZero, kShift, true>(a) : tile<kVectors, kZero, kShift, false>(a);
  }

  template <int kVectors>
  EQQ_INLINE void tiles_of(const Panel& a) {
    if (a.shift == nullptr)
      return a.offset != nullptr ? tiles<kVectors, true, false>(a) : tiles<kVectors, false, false>(a);
    a.offset != nullptr ? tiles<kVectors, true, true>(a) : tiles<kVectors, false, true>(a);
  }

  // Sums of the weight in each run of a step, over codes that are no padding.
  static void sum_weights(const Runs& r, int64_t k, const Step& s, const uint8_t* w, const int32_t* offset,
                          int32_t* out) {
    for (int64_t run = 0; run < s.runs; ++run, w += s.length * W::kBytes) {
      const int64_t count = max64(min64(s.length, run_length(r, k, s.run + run) - s.offset), 0);
      int32_t sum = W::kCorrects ? (offset[run] - V::kBias) * static_cast<int32_t>(count) : 0;
      if (W::kBytes == 1) {
        for (int64_t i = 0; i < count; ++i) sum += w[i];
      } else {
        const int16_t* values = reinterpret_cast<const int16_t*>(w);
        for (int64_t i = 0; i < count; ++i) sum += values[i];
      }
      out[run] = sum;
    }
  }

  // Prefetches the memory of results, of some rows of the weight and of x: stores to many places do not fetch it in
  // time.
  static void fetch_results(const Problem& p, int64_t at, int64_t count, int64_t lanes) {
    const int64_t item = p.x_type == kFloat32 ? 4 : 2;
    const char* y = static_cast<const char*>(p.y) + at * item;
    const bool across = p.y_row == 1;
    const int64_t rows = across ? count : lanes, next = item * (across ? p.y_column : p.y_row);
    const int64_t bytes = across ? item * lanes : p.y_column == 1 ? item * count : 0;
    for (int64_t i = 0; i < rows; ++i, y += next)
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(y + b, 0, 2);
  }

  // Writes tiles of sums of `count` rows of the weight and `real` rows of `x`, of `width` that there are with padding.
  static void write_results(const Problem& p, int64_t base, int64_t count, int64_t real, int64_t width, int64_t rows,
                            const float* sums, const float* x_scale) {
    for (int64_t m = 0; m < real; m += 2 * L) {
      const int64_t lanes = min64(2 * L, width - m), some = min64(2 * L, real - m);
      const float* tiles = sums + m * rows;
      const int64_t at = base + m * p.y_row;
      if constexpr (V::kPacks) {
        for (int64_t l = 0; l < some; l += L)
          for (int64_t i = 0; i < count; i += L)
            Int8Pack<V>::write(p, at + l * p.y_row + i * p.y_column, tiles + i * lanes + l, lanes, x_scale + m + l,
                               min64(L, count - i), min64(L, some - l));
      } else if (p.y_row == 1) {
        for (int64_t i = 0; i < count; ++i)
          for (int64_t l = 0; l < some; ++l)
            X::write(p, at + l + i * p.y_column, tiles[i * lanes + l] * x_scale[m + l]);
      } else {
        for (int64_t l = 0; l < some; ++l)
          for (int64_t i = 0; i < count; ++i)
            X::write(p, at + l * p.y_row + i * p.y_column, tiles[i * lanes + l] * x_scale[m + l]);
      }
    }
  }

  static void run(const Int8Problem& problem, const Int8Detail& d, const char* shared, char* own, int64_t batch,
                  int64_t block, int64_t first, int64_t count) {
    const Problem& p = problem.p;
    const Runs r = runs_of(p);
    const Integers v = W::integers(p);
    float* scale = reinterpret_cast<float*>(own + d.scale_at);
    int32_t* offset = reinterpret_cast<int32_t*>(scale + (V::kInt8TileRows + 1) * kRunRoom + 16);
    int32_t* weights = offset + (V::kInt8TileRows + 1) * kRunRoom;
    const int32_t* shifts = reinterpret_cast<const int32_t*>(shared) + (p.batch + batch) * d.m_padded;
    float* sums = reinterpret_cast<float*>(own + d.sum_at);
    uint8_t* rooms = reinterpret_cast<uint8_t*>(own);
    const float* x_scale = reinterpret_cast<const float*>(shared) + batch * d.m_padded;
    const int32_t* x_sums = reinterpret_cast<const int32_t*>(shared + d.sums) + batch * (r.count + 1) * d.m_padded;
    const int64_t start = block * kInt8RowBlock, width = min64(kInt8RowBlock, d.m_padded - start);
    const uint8_t* x =
        reinterpret_cast<const uint8_t*>(shared + d.x) + (batch * d.m_padded + start) * row_codes(r) * W::kBytes;
    const int64_t real = min64(width, p.m - start), base = batch * p.y_batch + start * p.y_row + first * p.y_column;
    memset(sums, 0, 4 * d.rows * width);
    memset(weights, 0, 4 * V::kInt8TileRows * kRunRoom);  // of rows past the last one too
    Panel a;
    a.x_panel = L * row_codes(r) * W::kBytes;
    a.sums_stride = d.m_padded;
    a.scale = scale;
    a.weights = weights;
    a.offset = p.zero_point != nullptr ? offset : nullptr;
    a.bits = p.bits;
    a.bytes_in_16 = W::bytes_in_16(p);
    a.next_row = p.words;
    Step s = first_step(r);
    Step next = s;  // behind a step of the last rows comes the next one of the first
    for (bool more = r.count > 0; more; s = next) {
      more = next_step(r, next);
      const int64_t position = s.run * r.size + s.offset, from = step_start(r, s);
      a.step = s;
      for (int64_t tile = 0; tile < count; tile += V::kInt8TileRows) {
        const int64_t rows = min64(V::kInt8TileRows, count - tile), row = first_row(&p, batch) + first + tile;
        // Rows that all have the whole step as bytes are multiplied where they lie.
        const bool direct =
            W::kBytes == 1 && p.bits == 8 && rows == V::kInt8TileRows && in_a_row(r, s) && from + step_codes(s) <= p.k;
        a.w = direct ? p.codes + row * p.words + from : nullptr;
        a.w_row = direct ? p.words : kStepRoom;
        for (int64_t i = 0; i < rows; ++i) {
          W::step_scales(p, r, v, s, row + i, scale + i * kRunRoom, offset + i * kRunRoom);
          const uint8_t* w = direct ? a.w + i * p.words
                                    : W::decode(p, r, v, s, row + i, offset + i * kRunRoom, false,
                                                rooms + V::kInt8TileRows * kStepRoom, rooms + i * kStepRoom);
          if (i == 0) a.w = w;  // all rows begin at the same place of their memory
          if (problem.affine) sum_weights(r, p.k, s, w, offset + i * kRunRoom, weights + i * kRunRoom);
        }
        const bool here = tile + V::kInt8TileRows < count;
        const int64_t next_row = here ? row + V::kInt8TileRows : row - tile;
        a.next = here || more ? p.codes + next_row * p.words + step_start(r, here ? s : next) * p.bits / 8 : nullptr;
        if (a.next != nullptr) W::fetch_scales(p, r, here ? s : next, next_row, V::kInt8TileRows);
        for (int64_t m = 0; m < width; m += 2 * L) {
          a.x = x + (m * row_codes(r) + position * L) * W::kBytes;
          a.sums_x = x_sums + s.run * d.m_padded + start + m;
          a.shift = problem.affine ? shifts + start + m : nullptr;
          const int64_t lanes = min64(2 * L, width - m);
          if (!more && tile == 0) fetch_results(p, base + m * p.y_row, count, min64(lanes, real - m));
          a.sums = sums + m * d.rows + tile * lanes;
          a.partial = reinterpret_cast<int32_t*>(own + d.partial_at) + m * d.rows + tile * lanes;
          if (lanes == L) {
            tiles_of<1>(a);
          } else {
            tiles_of<2>(a);
          }
          a.next = nullptr;
        }
      }
    }
    write_results(p, base, count, real, width, d.rows, sums, x_scale + start);
  }
};

}  // namespace
