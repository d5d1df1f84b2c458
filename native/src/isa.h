// What an instruction set offers, and how one is chosen. Each `isa_*.cpp` fills one `Isa`.
#ifndef EQQUANT_ISA_H_
#define EQQUANT_ISA_H_

#include "problem.h"

// How one implementation divides one problem. `plan` fills it in; the driver (`matmul.cpp`) allocates and schedules.
typedef struct Plan {
  int64_t shared_bytes;  // of the packed `x` and whatever else all units read; 64-byte aligned
  int64_t own_bytes;     // of scratch memory for each thread; 64-byte aligned
  int64_t parts;         // of the preparation, which run in any order
  int64_t units;         // of the product, which run in any order once all parts are done
  int64_t detail[12];    // of the implementation's own
  int64_t rows;          // of x that it wants at a time, or 0 for all: each part of so many has a plan of its own
} Plan;

// The product. Functions keep no state: whatever they need is in the problem, the plan and the two kinds of memory.
typedef struct MatmulKernel {
  void (*plan)(const Problem*, int64_t threads, Plan*);
  void (*prepare)(const Problem*, const Plan*, void* shared, int64_t part);
  void (*run)(const Problem*, const Plan*, const void* shared, void* own, int64_t unit);
} MatmulKernel;

// A further kind of kernel (int8 x int8, encoding, ...) is a further struct of functions and a further pointer here,
// which is null where an instruction set has none; whoever calls it takes the generic one then.
typedef struct Isa {
  const char* name;
  MatmulKernel matmul;
} Isa;

extern const Isa kIsaGeneric;
#if defined(__x86_64__) || defined(_M_X64)
extern const Isa kIsaAvx2;
extern const Isa kIsaAvx512;
#endif

// The best that this machine and its operating system allow, or the one that EQQUANT_CPU_ISA names. Null, with
// `*why` set, if that one is unknown or cannot run here.
const Isa* choose_isa(const char** why);

// The instruction sets that this machine can run, worst first: how many, and each.
int num_isas(void);
const Isa* isa_at(int index);

#endif  // EQQUANT_ISA_H_
