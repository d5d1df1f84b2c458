#include "encode/encode.h"

#include "core/check.h"

const char* check_encode(const EncodeProblem& p, char* text, size_t room) {
  EQQ_CHECK(p.bits >= 1 && p.bits <= 8, "codes have 1 to 8 bits, not %d", p.bits);
  EQQ_CHECK(p.n >= 0 && p.k >= 0, "lengths must not be negative");
  EQQ_CHECK(p.block_size >= 1, "blocks must have at least one code, not %lld", static_cast<long long>(p.block_size));
  EQQ_CHECK(p.k == 0 || p.blocks == (p.k + p.block_size - 1) / p.block_size, "scales and blocks differ in number");
  EQQ_CHECK(p.words == packed_bytes(p.k, p.bits), "rows of %lld codes of %d bits do not have %lld bytes",
            static_cast<long long>(p.k), p.bits, static_cast<long long>(p.words));
  EQQ_CHECK(p.x_type >= kFloat32 && p.x_type <= kFloat16, "no floats of kind %d are known", p.x_type);
  EQQ_CHECK(p.rule >= kSteps && p.rule <= kUp, "no rule %d is known", p.rule);
  EQQ_CHECK(p.rule != kSteps || (p.num_steps >= 0 && p.num_steps <= 256), "there may be at most 256 steps");
  EQQ_CHECK(p.nan >= 0 && p.nan < 1 << p.bits, "the code of NaN is beyond the codes");
  for (int64_t i = 0; p.rule == kSteps && i <= p.num_steps; ++i)
    EQQ_CHECK(p.codes[i] >= 0 && p.codes[i] < 1 << p.bits, "a code has more bits than %d", p.bits);
  return nullptr;
}

const char* check_trellis(const TrellisProblem& p, char* text, size_t room) {
  EQQ_CHECK(p.bits >= 1 && p.bits <= 4, "trellis codes have 1 to 4 bits, not %d", p.bits);
  const int64_t whole = p.k / kTrellisSegment * kTrellisSegment;
  const int64_t length = whole + (p.k - whole + kTrellisUnit - 1) / kTrellisUnit * kTrellisUnit;
  EQQ_CHECK(p.words == length * p.bits / 8, "rows of %lld values of %d bits do not have %lld bytes",
            static_cast<long long>(p.k), p.bits, static_cast<long long>(p.words));
  EQQ_CHECK(p.feedback == nullptr || p.k <= kTrellisSegment, "rows with feedback have at most %d values, not %lld",
            kTrellisSegment, static_cast<long long>(p.k));
  return nullptr;
}
