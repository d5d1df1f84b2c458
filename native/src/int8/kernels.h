// The product of integers: which method takes a problem, and how it is divided.
//
// With groups of four, codes of the weight are unsigned bytes, as they lie in memory, and codes of `x` are signed. The
// bias `lowest - zero_point` of each code is corrected with the sum of `x`, from which sums of a run begin. So results
// equal integer arithmetic, to the bit. With groups of two the weight's values are exact.
#pragma once

#include "int8/few_rows.h"
#include "int8/many_rows.h"
#include "int8/one_row.h"
#include "int8/prepare.h"

namespace {

template <class V>
struct Int8Kernels {
  // Calls `f` with the vocabulary that multiplies codes in registers, and returns whether one does.
  template <class F>
  EQQ_INLINE bool with_registers(const Int8Problem* problem, F f) {
    using Small = typename IntegerProducts<V>::SmallInRegisters;
    using Large = typename IntegerProducts<V>::LargeInRegisters;
    const Runs r = runs_of(problem->p);
    if (Int8OneRow<Small>::in_registers(*problem, r)) return f(Small()), true;
    if (Int8OneRow<Large>::in_registers(*problem, r)) return f(Large()), true;
    return false;
  }

  // Calls `f` with the vocabulary that multiplies unpacked codes.
  template <class F>
  EQQ_INLINE void with_unpacked(const Int8Problem* problem, F f) {
    using Small = typename IntegerProducts<V>::SmallUnpacked;
    Int8Weight<Small>::fits(problem->p) ? f(Small()) : f(V());
  }

  // Calls `f` with the vocabulary of a problem's method.
  template <class F>
  EQQ_INLINE void with_vocabulary(const Int8Problem* problem, F f) {
    if (!with_registers(problem, f)) with_unpacked(problem, f);
  }

  static void plan(const Int8Problem* problem, int64_t threads, Plan* out) {
    with_vocabulary(problem, [=](auto u) { plan_for<decltype(u)>(problem, threads, out); });
  }

  static void prepare(const Int8Problem* problem, const Plan* plan, void* memory, int64_t part) {
    with_vocabulary(problem, [=](auto u) { Int8Prepare<decltype(u)>::prepare(problem, plan, memory, part); });
  }

  // `U`: the vocabulary of the method.
  template <class U>
  static void plan_for(const Int8Problem* problem, int64_t threads, Plan* out) {
    using W = Int8Weight<U>;
    constexpr int L = U::L;
    const Problem& p = problem->p;
    const Runs r = runs_of(p);
    Int8Detail d;
    d.method = p.m <= U::kInt8FewRows ? kFewMethod : kPanelMethod;
    // After few rows of `x` with zero points there is one of ones.
    d.m_padded = d.method == kFewMethod ? p.m + problem->affine : round_up(p.m, L);
    d.row_blocks = d.method == kFewMethod ? 1 : div_up(d.m_padded, kInt8RowBlock);
    int64_t grain = d.method == kFewMethod ? U::kInt8DotRows : U::kInt8TileRows;
    if constexpr (U::kInRegisters) grain = Int8OneRow<U>::in_registers(*problem, r) ? U::kRegisterRows : grain;
    const int64_t most = d.method == kFewMethod ? 64 : round_up(kUnitRows, grain);
    int64_t rows = div_up(p.n * p.batch * d.row_blocks, 4 * threads);
    rows = max64(rows, (int64_t{1} << 18) / max64(p.m * p.k, 1));
    rows = max64(min64(round_up(min64(rows, p.n), grain), most), grain);
    d.rows = rows;
    d.chunks = div_up(p.n, rows);
    d.panels = d.method == kFewMethod ? 1 : d.m_padded / L;
    d.sums = round_up(8 * p.batch * d.m_padded, 64);
    d.lanes = d.sums + round_up(4 * p.batch * (r.count + 1) * d.m_padded, 64);
    const bool lanes = W::kCorrects && d.method == kFewMethod && by_lanes(r);
    d.x = d.lanes + (lanes ? 4 * L * p.batch * d.m_padded * W::lane_vectors(r) : 0);
    const int64_t end_of_x = round_up(d.x + p.batch * d.m_padded * row_codes(r) * W::kBytes, 64);
    int64_t tail = 0;
    if constexpr (U::kInRegisters)
      if (Int8OneRow<U>::in_registers(*problem, r)) tail = Int8OneRow<U>::tail_bytes(*problem, r);
    d.tail = tail > 0 ? end_of_x : 0;
    out->shared_bytes = end_of_x + p.batch * tail;
    out->parts = p.batch * d.panels;
    out->units = p.batch * d.row_blocks * d.chunks;
    // Decoded rows, and one more to decode in; scales and offsets; sums.
    const int64_t held = d.method == kFewMethod ? U::kInt8DotRows : rows;
    const int64_t width = d.method == kFewMethod ? d.m_padded * L : min64(d.m_padded, kInt8RowBlock);
    const int64_t decoded = d.method == kFewMethod ? U::kInt8DotRows : U::kInt8TileRows;
    d.scale_at = round_up((decoded + 1) * kStepRoom, 64);
    d.partial_at = d.scale_at + 3 * round_up(4 * (decoded + 1) * kRunRoom, 64);
    d.sum_at = d.partial_at + round_up(4 * held * width, 64);
    out->own_bytes = d.sum_at + round_up(4 * held * (width + (d.method == kFewMethod ? d.m_padded : 0)), 64);
    set_detail(d, out);
  }

  static void run(const Int8Problem* problem, const Plan* plan, const void* shared, void* own, int64_t unit) {
    const Int8Detail d = detail_of<Int8Detail>(plan);
    const int64_t chunk = unit % d.chunks, block = unit / d.chunks % d.row_blocks,
                  batch = unit / d.chunks / d.row_blocks;
    const int64_t first = chunk * d.rows, count = min64(d.rows, problem->p.n - first);
    const char* memory = static_cast<const char*>(shared);
    const auto in_registers = [&](auto u) { Int8OneRow<decltype(u)>::run(problem->p, d, memory, batch, first, count); };
    if (with_registers(problem, in_registers)) return;
    with_unpacked(problem, [&](auto u) {
      using U = decltype(u);
      if (d.method == kFewMethod) {
        Int8FewRows<U>::run(*problem, d, memory, static_cast<char*>(own), batch, first, count);
      } else {
        Int8ManyRows<U>::run(*problem, d, memory, static_cast<char*>(own), batch, block, first, count);
      }
    });
  }
};

}  // namespace
