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
  const int64_t parts = attention_parts(p), one = part_sums(p), own = scratch_bytes(p);
  constexpr double kShare = 1 << 16;  // numbers of the cache that are worth a thread
  const double shares = attention_numbers(p) / kShare;
  if (shares < static_cast<double>(threads)) threads = max64(static_cast<int64_t>(shares), 1);
  const int64_t units = heads * parts, workers = min64(units, threads);
  const int64_t sums_bytes = round_up(4 * units * one, 64);
  char* memory = static_cast<char*>(allocate_aligned(sums_bytes + max64(workers, 1) * own));
  if (memory == nullptr) return false;
  float* sums = reinterpret_cast<float*>(memory);
  std::atomic<bool> enough{true};
  run_units(pool, units, workers, [&](int64_t unit, int64_t worker) {
    char* mine = memory + sums_bytes + worker * own;
    if (!attend_part(isa, p, unit / parts, unit % parts, mine, sums + unit * one)) enough = false;
  });
  for (int64_t head = 0; head < heads; ++head) merge_parts(p, head, parts, sums + head * parts * one);
  free_aligned(memory);
  return enough;
}
