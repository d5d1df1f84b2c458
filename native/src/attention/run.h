// The driver of attention: has threads compute the parts, and merges them.
#pragma once

#include "attention/attention.h"
#include "core/matmul.h"

// Computes attention that `check_attention` found nothing wrong with. Whether there was enough memory.
template <typename Pool>
bool run_attention(const Isa& isa, const AttentionProblem& problem, Pool& pool, int64_t threads) {
  const AttentionProblem& p = problem;
  const int64_t heads = p.batch * p.heads;
  if (heads * p.rows * p.size == 0) return true;
  const AttentionPlan plan = plan_attention(p);
  constexpr double kShare = 1 << 15;  // work that is worth a thread
  const double shares = plan.work / kShare;
  if (shares < static_cast<double>(threads)) threads = max64(static_cast<int64_t>(shares), 1);
  const int64_t blocks = heads * plan.blocks, units = blocks * plan.parts, workers = min64(units, threads);
  const int64_t one = block_sums(p), sums_bytes = plan.parts > 1 ? round_up(4 * units * one, 64) : 0;
  char* memory = static_cast<char*>(allocate_aligned(sums_bytes + max64(workers, 1) * plan.own_bytes));
  if (memory == nullptr) return false;
  float* sums = reinterpret_cast<float*>(memory);
  std::atomic<bool> enough{true};
  run_units(pool, units, workers, [&](int64_t unit, int64_t worker) {
    char* mine = memory + sums_bytes + worker * plan.own_bytes;
    if (!attend_unit(isa, p, plan, unit, mine, plan.parts > 1 ? sums + unit * one : nullptr)) enough = false;
  });
  if (plan.parts > 1)
    for (int64_t block = 0; block < blocks; ++block) merge_parts(p, plan, block, sums + block * plan.parts * one);
  free_aligned(memory);
  return enough;
}
