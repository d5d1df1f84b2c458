// What an instruction set offers, and how one is chosen. Each `isa_*.cpp` fills one `Isa`.
#ifndef EQQUANT_ISA_H_
#define EQQUANT_ISA_H_

#include <string.h>

#include "core/ints.h"
#include "core/problem.h"

// How one implementation divides one problem. `plan` fills it in; the driver (`matmul.cpp`) allocates and schedules.
typedef struct Plan {
  int64_t shared_bytes;  // of the packed `x` and whatever else all units read; 64-byte aligned
  int64_t own_bytes;     // of scratch memory for each thread; 64-byte aligned
  int64_t parts;         // of the preparation, which run in any order
  int64_t units;         // of the product, which run in any order once all parts are done
  int64_t detail[12];    // of the implementation's own
  int64_t rows;          // of x that it wants at a time, or 0 for all: each part of so many has a plan of its own
} Plan;

// What an implementation keeps in `Plan::detail`: a struct of its own, as bytes.
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
  // Whether the kernel takes a problem, and, where the values of x decide, whether it can multiply what it prepared;
  // null if it always does. And the kernel that is asked next if not.
  bool (*takes)(const Problem*) = nullptr;
  bool (*suits)(const Problem*, const Plan*, const void* shared) = nullptr;
  const struct MatmulKernel* otherwise = nullptr;
} MatmulKernel;

// A further kind of kernel (int8 x int8, encoding, ...) is a further struct of functions and a further pointer here,
// which is null where an instruction set has none; whoever calls it takes the generic one then.
typedef struct Isa {
  const char* name;
  const MatmulKernel* matmul;
  const MatmulKernel* decode;     // to a dense weight
  const struct Int8Kernel* int8;  // in `int8.h`; null for the generic one
} Isa;

extern const Isa kIsaGeneric;
#if defined(__x86_64__) || defined(_M_X64)
extern const Isa kIsaAvx2;
extern const Isa kIsaAvx512;
extern const MatmulKernel kMatmulAvx512, kDecodeAvx512;  // of those that add to it
extern const MatmulKernel kMatmulVnni, kMatmulVnniVbmi;  // these ask the first or second kind of AVX-512 next
extern const Isa kIsaAvx512Vnni;
extern const MatmulKernel kMatmulAvx512Vbmi, kDecodeAvx512Vbmi;
extern const Isa kIsaAvx512Vbmi;
extern const MatmulKernel kMatmulAmx, kMatmulFewAmx;
extern const Isa kIsaAmx;
#elif defined(__aarch64__) || defined(_M_ARM64)
extern const Isa kIsaNeon;
#endif

// The scales of blocks `first` to `last` of a row, as float32, times that of the row.
void decode_scales_generic(const Problem* p, int64_t row, int64_t first, int64_t last, float* out);
void decode_scales_avx2(const Problem* p, int64_t row, int64_t first, int64_t last, float* out);
void decode_scales_avx512(const Problem* p, int64_t row, int64_t first, int64_t last, float* out);

// Conversions for every machine.
float half_to_float(uint16_t bits);
uint16_t float_to_half(float value);

// The best that this machine and its operating system allow, or the one that EQQUANT_CPU_ISA names. Null, with
// `*why` set, if that one is unknown or cannot run here.
const Isa* choose_isa(const char** why);

// The instruction sets that this machine can run, worst first: how many, and each.
int num_isas(void);
const Isa* isa_at(int index);

#endif  // EQQUANT_ISA_H_
