// The kernels of instruction sets, and how one is chosen.
#pragma once

#include <string.h>

#include "core/ints.h"
#include "core/problem.h"

// How one implementation divides one problem. `plan` fills it in; the driver (`matmul.h`) allocates and schedules.
typedef struct Plan {
  int64_t shared_bytes;  // of the packed `x` and whatever else all units read; 64-byte aligned
  int64_t own_bytes;     // of scratch memory for each thread; 64-byte aligned
  int64_t parts;         // of the preparation, which run in any order
  int64_t units;         // of the product, which run in any order once all parts are done
  int64_t detail[13];    // of the implementation's own
  int64_t rows;          // of x that it takes at a time, or 0 for all: each part has a plan of its own
} Plan;

// The state of an implementation in `Plan::detail`: a struct of its own, as bytes.
template <typename Detail>
EQQ_INLINE void set_detail(const Detail& detail, Plan* plan) {
  static_assert(sizeof detail <= sizeof plan->detail && __is_trivially_copyable(Detail), "a plan has no room for it");
  memcpy(plan->detail, &detail, sizeof detail);
}
template <typename Detail>
EQQ_INLINE Detail detail_of(const Plan* plan) {
  Detail detail;
  memcpy(&detail, plan->detail, sizeof detail);
  return detail;
}

// A product, or decoding. Functions keep no state: whatever they need is in the problem, the plan and the two kinds of
// memory.
typedef struct MatmulKernel {
  void (*plan)(const Problem*, int64_t threads, Plan*);
  void (*prepare)(const Problem*, const Plan*, void* shared, int64_t part);
  void (*run)(const Problem*, const Plan*, const void* shared, void* own, int64_t unit);
  // Whether the kernel accepts a problem, and, where the values of x decide, what it packed; null if it always does.
  bool (*accepts)(const Problem*) = nullptr;
  bool (*accepts_packed)(const Problem*, const Plan*, const void* shared) = nullptr;
  const struct MatmulKernel* fallback = nullptr;  // the kernel that is asked next if not
} MatmulKernel;

// The first kernel that accepts a problem, of this one and its fallbacks; null if there is none.
EQQ_INLINE const MatmulKernel* find_kernel(const MatmulKernel* kernel, const Problem& problem) {
  while (kernel != nullptr && kernel->accepts != nullptr && !kernel->accepts(&problem)) kernel = kernel->fallback;
  return kernel;
}
// The same where the last one accepts all problems.
EQQ_INLINE const MatmulKernel& select_kernel(const MatmulKernel* kernel, const Problem& problem) {
  return *find_kernel(kernel, problem);
}

// The kernels of an instruction set. A further kind of kernel is a further struct of functions and a further pointer
// here.
typedef struct Isa {
  const char* name;
  const MatmulKernel* matmul;
  const MatmulKernel* decode;               // to a dense weight
  const struct Int8Kernel* int8;            // in `int8/int8.h`
  const struct EncodeKernel* encode;        // in `encode/encode.h`
  const struct SlabKernel* slabs;           // in `slabs/slabs.h`
  const struct AttentionKernel* attention;  // in `attention/attention.h`
} Isa;

// Kernels that rooms define for an instruction set, each in a file that CMake compiles for all of them; not all have
// all. `decode_scales`: scales of blocks `first` to `last` of a row, as float32, times the scale of the row.
#define EQQ_INSTRUCTION_SET(ISA)                                                              \
  namespace ISA {                                                                             \
  extern const MatmulKernel kMatmul, kDecode;                                                 \
  extern const struct Int8Kernel kInt8;                                                       \
  extern const struct EncodeKernel kEncode;                                                   \
  extern const struct SlabKernel kSlabs;                                                      \
  extern const struct AttentionKernel kAttention;                                             \
  void decode_scales(const Problem* p, int64_t row, int64_t first, int64_t last, float* out); \
  }
EQQ_INSTRUCTION_SET(generic)
EQQ_INSTRUCTION_SET(avx2)
EQQ_INSTRUCTION_SET(avx512)
EQQ_INSTRUCTION_SET(avx512vnni)
EQQ_INSTRUCTION_SET(avx512vbmi)
EQQ_INSTRUCTION_SET(amx)
EQQ_INSTRUCTION_SET(neon)
EQQ_INSTRUCTION_SET(dotprod)

// Floats times small integers with VNNI; the fallback is AVX-512, without and with VBMI.
extern const MatmulKernel kMatmulSlices, kMatmulSlicesVbmi;
// Floats on AMX with many rows of x: the fallback of `amx::kMatmul`.
extern const MatmulKernel kMatmulManyAmx;

// Conversions for every machine.
float half_to_float(uint16_t bits);
uint16_t float_to_half(float value);

// The best that this machine and its operating system allow, or the one that EQQUANT_CPU_ISA names. Null, with `*why`
// set, if it is unknown or cannot run here.
const Isa* choose_isa(const char** why);

// The instruction sets that this machine can run, worst first: how many, and each.
int num_isas(void);
const Isa* isa_at(int index);
