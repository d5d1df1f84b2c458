#include "int8/int8.h"

#include <math.h>

#include "core/check.h"
#include "core/matmul.h"

const char* check_int8(const Int8Problem& problem, char* text, size_t room) {
  const Problem& p = problem.p;
  if (const char* wrong = check_problem(p, text, room)) return wrong;
  EQQ_CHECK(!p.transpose, "integer products are not transposed");
  EQQ_CHECK(problem.form >= kFloats && problem.form <= kUnsigned, "no x of form %d is known", problem.form);
  EQQ_CHECK(problem.form == kFloats || p.batch == 0 || p.m == 0 || problem.x_scale != nullptr,
            "the scales of x are missing");
  EQQ_CHECK(!problem.affine || problem.form != kSigned, "codes with zero points must be uint8");
  EQQ_CHECK(!problem.affine || problem.x_scale == nullptr || p.batch == 0 || p.m == 0 || problem.x_zero != nullptr,
            "the zero points of x are missing");
  const int codes = 1 << p.bits;
  float lowest = p.table[0], highest = p.table[0];
  for (int i = 0; i < codes; ++i) {
    EQQ_CHECK(fabsf(p.table[i]) <= 255 && p.table[i] == truncf(p.table[i]), "the table has %g, not integers",
              p.table[i]);
    lowest = p.table[i] < lowest ? p.table[i] : lowest;
    highest = p.table[i] > highest ? p.table[i] : highest;
  }
  EQQ_CHECK(highest - lowest <= 255, "the integers of the table span more than eight bits");
  const bool bytes = p.bits == 8 || is_split(p.bits);
  EQQ_CHECK(!bytes || p.values == kValueInteger, "codes of %d bits must be consecutive integers", p.bits);
  for (int i = 1; bytes && i < codes; ++i)
    EQQ_CHECK(p.table[i] == p.table[0] + static_cast<float>(i), "codes of %d bits must be consecutive integers",
              p.bits);
  EQQ_CHECK(p.offset == nullptr || is_consecutive(p.table, p.bits), "codes with offsets must be consecutive integers");
  return nullptr;
}
