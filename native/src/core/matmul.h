// The driver of a product: checks it, asks an instruction set for a plan, and has threads work on it.
#pragma once

#include <stddef.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "core/ints.h"
#include "core/isa.h"
#include "int8/int8.h"
#include "slabs/slabs.h"

// The error of a problem, as a sentence in `text`; or null. Reads no array.
const char* check_problem(const Problem& problem, char* text, size_t room);

// Zeroed only if it must be; null without memory.
void* allocate_aligned(int64_t bytes);
void free_aligned(void* memory);

// Runs `work(unit, worker)` for every unit below `units`, in the calling thread and in tasks of `pool`, and returns
// when all are done.
//
// Each worker has a range of units, whose rows of the weight follow each other: so it uses the bytes that a kernel
// prefetches at the end of a unit. A worker that is done helps with the next range, also if its worker never begins.
//
// It cannot deadlock, however many callers share the pool: the caller works as well, and waits only for units that some
// thread has begun. A task that begins later finds nothing to do; it touches nothing but `state`, which it owns a part
// of, so it may begin long after the caller is gone.
template <typename Pool, typename Work>
void run_units(Pool& pool, int64_t units, int64_t workers, const Work& work) {
  if (workers > units) workers = units;
  if (workers <= 1) {
    for (int64_t unit = 0; unit < units; ++unit) work(unit, int64_t{0});
    return;
  }
  struct alignas(64) Range {  // a line of its own
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  struct State {
    explicit State(int64_t workers) : ranges(workers) {}
    std::vector<Range> ranges;
    std::atomic<int64_t> done{0}, worker{1};
  };
  auto state = std::make_shared<State>(workers);
  for (int64_t i = 0; i < workers; ++i) {
    state->ranges[i].next = units * i / workers;
    state->ranges[i].end = units * (i + 1) / workers;
  }
  const auto loop = [](State& s, const Work* work, int64_t workers, int64_t worker) {
    for (int64_t i = 0; i < workers; ++i) {
      Range& range = s.ranges[(worker + i) % workers];
      for (;;) {
        const int64_t unit = range.next.fetch_add(1, std::memory_order_relaxed);
        if (unit >= range.end) break;
        (*work)(unit, worker);
        s.done.fetch_add(1, std::memory_order_release);
      }
    }
  };
  const Work* pointer = &work;
  for (int64_t i = 1; i < workers; ++i) {
    pool.Schedule([state, pointer, units, workers, loop] {
      if (state->done.load(std::memory_order_relaxed) >= units) return;
      loop(*state, pointer, workers, state->worker.fetch_add(1, std::memory_order_relaxed));
    });
  }
  loop(*state, pointer, workers, 0);
  for (int spins = 0; state->done.load(std::memory_order_acquire) < units; ++spins) {
    if (spins > 64) std::this_thread::yield();
  }
}

// Whether a kernel accepts the operands that it packed.
template <typename Kernel, typename Task>
bool accepts_packed(const Kernel&, const Task&, const Plan&, const void*) {
  return true;
}
inline bool accepts_packed(const MatmulKernel& kernel, const Problem& problem, const Plan& plan, const void* shared) {
  return kernel.accepts_packed == nullptr || kernel.accepts_packed(&problem, &plan, shared);
}
// The kernel that takes them instead, or null.
template <typename Kernel, typename Task>
const Kernel* fallback_of(const Kernel&, const Task&) {
  return nullptr;
}
inline const MatmulKernel* fallback_of(const MatmulKernel& kernel, const Problem& problem) {
  return find_kernel(kernel.fallback, problem);
}

// How many of some threads a problem is worth: a small one is done before another wakes.
inline int64_t useful_threads(const Problem& p, int64_t threads) {
  if (threads < 2) return 1;
  constexpr double kShare = 1 << 17, kRows = 16;  // so many rows of x take as long as decoding the weight
  const double codes = static_cast<double>(p.batch) * static_cast<double>(p.n) * static_cast<double>(p.k);
  const double shares = codes * (1 + static_cast<double>(p.m) / kRows) / kShare;
  return shares >= static_cast<double>(threads) ? threads : shares >= 2 ? static_cast<int64_t>(shares) : 1;
}

// `kRefused`: neither the kernel nor a fallback accepts the numbers of x.
enum Outcome { kDone, kNoMemory, kRefused };

// Has a kernel compute a problem of its own type, whose weight it can read.
template <typename Kernel, typename Task, typename Pool>
Outcome run_whole(const Kernel& kernel, const Task& problem, Pool& pool, int64_t threads) {
  Plan plan = {};
  kernel.plan(&problem, threads, &plan);
  const int64_t workers = plan.units < threads ? plan.units : threads;
  char* memory = static_cast<char*>(allocate_aligned(plan.shared_bytes + workers * plan.own_bytes));
  if (memory == nullptr) return kNoMemory;
  const Task* p = &problem;
  const Plan* q = &plan;
  const Kernel* k = &kernel;
  run_units(pool, plan.parts, threads, [=](int64_t part, int64_t) { k->prepare(p, q, memory, part); });
  if (!accepts_packed(kernel, problem, plan, memory)) {
    free_aligned(memory);
    const Kernel* other = fallback_of(kernel, problem);
    return other == nullptr ? kRefused : run_whole(*other, problem, pool, threads);
  }
  run_units(pool, plan.units, workers, [=](int64_t unit, int64_t worker) {
    k->run(p, q, memory, memory + q->shared_bytes + worker * q->own_bytes, unit);
  });
  free_aligned(memory);
  return kDone;
}

// The same for a weight that must be brought to another form, a slab at a time. Whether there was enough memory.
template <typename Kernel, typename Task, typename Pool>
bool run_slabs(const Slabs& slabs, const SlabKernel& forms, const Kernel& kernel, const Task& problem, Pool& pool,
               int64_t threads) {
  const Problem& p = weight_of(problem);
  const int64_t count = slabs.count();
  const auto task = [&](int64_t batch, int64_t index, void* own) {
    return with_weight(problem, batch, slabs.slab(p, batch, index, own));
  };
  // The last slab may be smaller, and has a plan of its own: at 1.
  Plan plans[2] = {};
  for (int64_t i = 0; i < 2; ++i) {
    const Task some = task(0, i * (count - 1), plans);
    kernel.plan(&some, 1, &plans[i]);
  }
  const auto at_least = [&](int64_t Plan::* bytes) {
    return plans[0].*bytes > plans[1].*bytes ? plans[0].*bytes : plans[1].*bytes;
  };
  const int64_t shared = at_least(&Plan::shared_bytes), own_bytes = slabs.own_bytes() + at_least(&Plan::own_bytes);
  const int64_t units = p.batch * count, workers = units < threads ? units : threads;
  char* memory = static_cast<char*>(allocate_aligned(slabs.sums_bytes() + 2 * p.batch * shared + workers * own_bytes));
  if (memory == nullptr) return false;
  float* sums = reinterpret_cast<float*>(memory);
  const auto packed_at = [&](int64_t batch, int64_t plan) {
    return memory + slabs.sums_bytes() + (2 * batch + plan) * shared;
  };
  char* const own = packed_at(p.batch, 0);
  const int64_t parts = p.batch * (plans[0].parts + plans[1].parts);
  run_units(pool, parts + (slabs.sums_bytes() > 0 ? p.batch * p.m : 0), threads, [&](int64_t part, int64_t) {
    if (part >= parts)
      return sum_blocks(forms, problem, (part - parts) / p.m, (part - parts) % p.m, sums + (part - parts) * p.blocks);
    const int64_t batch = part / (plans[0].parts + plans[1].parts), i = part % (plans[0].parts + plans[1].parts);
    const int64_t last = i >= plans[0].parts;
    const Task some = task(batch, last * (count - 1), plans);
    kernel.prepare(&some, &plans[last], packed_at(batch, last), i - last * plans[0].parts);
  });
  for (int64_t batch = 0; batch < p.batch; ++batch) {
    const Task some = task(batch, 0, plans);
    if (accepts_packed(kernel, some, plans[0], packed_at(batch, 0))) continue;
    free_aligned(memory);
    return run_slabs(slabs, forms, *fallback_of(kernel, some), problem, pool, threads);
  }
  run_units(pool, units, workers, [&](int64_t unit, int64_t worker) {
    const int64_t batch = unit / count, index = unit % count, last = index + 1 == count;
    char* mine = own + worker * own_bytes;
    slabs.fill(forms, p, batch, index, mine);
    const Task some = task(batch, index, mine);
    for (int64_t i = 0; i < plans[last].units; ++i)
      kernel.run(&some, &plans[last], packed_at(batch, last), mine + slabs.own_bytes(), i);
    slabs.add(forms, p, batch, index, mine, sums);
    if (has_floats(problem)) slabs.add_infinite(forms, p, batch, index, mine, sums);
  });
  free_aligned(memory);
  return true;
}

template <typename Kernel, typename Task, typename Pool>
bool run_kernel(const Slabs& slabs, const Isa& isa, const Kernel& kernel, const Task& problem, Pool& pool,
                int64_t threads) {
  return slabs.needed() ? run_slabs(slabs, *isa.slabs, kernel, problem, pool, threads)
                        : run_whole(kernel, problem, pool, threads) == kDone;
}

// Computes a product that `check_problem` found nothing wrong with. Whether there was enough memory.
template <typename Pool>
bool run_problem(const Isa& isa, Problem problem, Pool& pool, int64_t threads) {
  if (problem.batch == 0 || problem.m == 0 || (problem.transpose ? problem.k : problem.n) == 0) return true;
  threads = useful_threads(problem, threads);
  const Slabs slabs(problem, threads);
  if (const MatmulKernel* packed = find_kernel(isa.slabs->packed, problem)) {
    const Outcome outcome = run_whole(*packed, problem, pool, threads);
    if (outcome != kRefused) return outcome == kDone;
  }
  const Problem seen = slabs.seen(problem);
  Problem all = seen;
  if (!problem.transpose) all.n = problem.n;  // packed x meets all slabs
  const MatmulKernel& kernel = select_kernel(isa.matmul, all);
  Plan plan = {};
  kernel.plan(&seen, threads, &plan);
  // Parts of much the same size, all in whole panels: in a part of a few rows another kernel would add in another
  // order.
  const int64_t total = problem.m, parts = plan.rows > 0 ? div_up(total, plan.rows) : 1;
  const int64_t step = round_up(div_up(total, parts), 16), item = problem.x_type == kFloat32 ? 4 : 2;
  for (int64_t first = 0; first < total; first += step) {
    problem.m = total - first < step ? total - first : step;
    if (!run_kernel(slabs, isa, kernel, problem, pool, threads)) return false;
    problem.x = static_cast<const char*>(problem.x) + step * problem.x_row * item;
    problem.y = static_cast<char*>(problem.y) + step * problem.y_row * item;
  }
  return true;
}

// The same for integers, which `check_int8` checks.
template <typename Pool>
bool run_int8(const Isa& isa, const Int8Problem& problem, Pool& pool, int64_t threads) {
  if (problem.p.batch == 0 || problem.p.m == 0 || problem.p.n == 0) return true;
  threads = useful_threads(problem.p, threads);
  const Int8Kernel* packed = isa.slabs->packed_int8;
  if (packed != nullptr && packed->accepts(&problem)) return run_whole(*packed, problem, pool, threads) == kDone;
  return run_kernel(Slabs(problem.p, threads, true), isa, *isa.int8, problem, pool, threads);
}

// Decodes a weight, likewise.
template <typename Pool>
bool run_decode(const Isa& isa, const Problem& problem, Pool& pool, int64_t threads) {
  if (problem.batch == 0 || problem.n == 0 || problem.k == 0) return true;
  threads = useful_threads(problem, threads);
  const Slabs slabs(problem, threads);
  return run_kernel(slabs, isa, select_kernel(isa.decode, slabs.seen(problem)), problem, pool, threads);
}
