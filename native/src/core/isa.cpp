// Which instruction sets this machine and its operating system allow.
#include "core/isa.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/simd_generic.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace {

// The instruction sets: what of each room they take, and from which set.
#define EQQ_ISA(NAME, MATMUL, DECODE, INT8, ENCODE, SLABS, ATTENTION) \
  {#NAME, &MATMUL, &DECODE::kDecode, &INT8::kInt8, &ENCODE::kEncode, &SLABS::kSlabs, &ATTENTION::kAttention}
const Isa kGeneric = EQQ_ISA(generic, generic::kMatmul, generic, generic, generic, generic, generic);
#if defined(__x86_64__) || defined(_M_X64)
const Isa kAvx2 = EQQ_ISA(avx2, avx2::kMatmul, avx2, avx2, avx2, avx2, avx2);
const Isa kAvx512 = EQQ_ISA(avx512, avx512::kMatmul, avx512, avx512, avx512, avx512, avx512);
const Isa kAvx512Vnni = EQQ_ISA(avx512vnni, kMatmulSlices, avx512, avx512vnni, avx512, avx512, avx512);
const Isa kAvx512Vbmi = EQQ_ISA(avx512vbmi, kMatmulSlicesVbmi, avx512vbmi, avx512vnni, avx512, avx512vbmi, avx512);
const Isa kAmx = EQQ_ISA(amx, amx::kMatmul, avx512vbmi, amx, avx512, avx512vbmi, avx512);
#elif defined(__aarch64__) || defined(_M_ARM64)
const Isa kNeon = EQQ_ISA(neon, neon::kMatmul, neon, neon, generic, generic, generic);
const Isa kDotprod = EQQ_ISA(dotprod, neon::kMatmul, neon, dotprod, generic, generic, generic);
#endif

struct Found {
  const Isa* all[8];
  int count;
};

#if defined(__x86_64__) || defined(_M_X64)

// The registers that the operating system saves. A machine may have instructions whose registers it does not.
uint64_t saved_registers() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

bool bit(uint32_t word, int index) { return word >> index & 1; }

#ifndef EQQUANT_EMULATE
// Linux allows a program the registers of tiles if it asks; other systems are not known to.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, and the state that it is for
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#endif

void find(Found& found) {
  uint32_t a, b, c, d, b7, c7, d7;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27)) return;  // OSXSAVE
  const bool fma = bit(c, 12), avx = bit(c, 28), f16c = bit(c, 29);
  if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return;
  const uint64_t saved = saved_registers();
  if (!(fma && avx && f16c && bit(b7, 5) && (saved & 6) == 6)) return;
  found.all[found.count++] = &kAvx2;
  const bool avx512 = bit(b7, 16) && bit(b7, 17) && bit(b7, 30) && bit(b7, 31);  // F, DQ, BW, VL
  if (!avx512 || (saved & 0xe6) != 0xe6) return;
  found.all[found.count++] = &kAvx512;
  if (!bit(c7, 11)) return;
  found.all[found.count++] = &kAvx512Vnni;
  if (!bit(c7, 1)) return;  // machines with tiles have it
  found.all[found.count++] = &kAvx512Vbmi;
#ifdef EQQUANT_EMULATE
  for (int i = found.count++; i > 0; --i) found.all[i] = found.all[i - 1];
  found.all[0] = &kAmx;  // the slowest
#else
  // Tiles, and integers; tiles are saved only for programs that ask.
  if (bit(d7, 24) && bit(d7, 25) && (saved & 0x60000) == 0x60000 && may_use_tiles()) found.all[found.count++] = &kAmx;
#endif
}

#elif defined(__aarch64__) || defined(_M_ARM64)

// The dot products of ARMv8.2, which all of Apple's machines have.
bool has_dotprod() {
#if defined(__APPLE__)
  return true;
#elif defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return false;
#endif
}

void find(Found& found) {
  found.all[found.count++] = &kNeon;
  if (has_dotprod()) found.all[found.count++] = &kDotprod;
}

#else

void find(Found&) {}

#endif

const Found& found() {
  static const Found all = [] {
    Found f = {};
    f.all[f.count++] = &kGeneric;
    find(f);
    return f;
  }();
  return all;
}

struct Choice {
  const Isa* isa;
  char why[256];
};

const Choice& choice() {
  static const Choice chosen = [] {
    Choice c = {};
    const char* name = getenv("EQQUANT_CPU_ISA");
    const Found& f = found();
    if (name == nullptr || *name == 0) {
      c.isa = f.all[f.count - 1];
      return c;
    }
    for (int i = 0; i < f.count; ++i)
      if (strcmp(f.all[i]->name, name) == 0) c.isa = f.all[i];
    if (c.isa == nullptr) {
      int at = snprintf(c.why, sizeof c.why, "EQQUANT_CPU_ISA is %.32s, and this machine has", name);
      for (int i = 0; i < f.count; ++i) at += snprintf(c.why + at, sizeof c.why - at, " %s", f.all[i]->name);
    }
    return c;
  }();
  return chosen;
}

}  // namespace

const Isa* choose_isa(const char** why) {
  const Choice& c = choice();
  if (c.isa == nullptr && why != nullptr) *why = c.why;
  return c.isa;
}

int num_isas(void) { return found().count; }

const Isa* isa_at(int index) { return index < 0 || index >= found().count ? nullptr : found().all[index]; }

float half_to_float(uint16_t bits) { return generic::Simd::one_f16(bits); }
uint16_t float_to_half(float value) { return generic::Simd::one_to_f16(value); }
