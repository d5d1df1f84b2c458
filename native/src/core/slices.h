// How many bits of x survive as integers of some slices: bytes with a sign.
#pragma once

#include <stdint.h>

namespace {

// The integer for the amax, of `slices` slices, with room for rounding.
constexpr float largest_of(int64_t slices) { return slices == 2 ? 32600 : slices == 3 ? 8355000 : 2139000000; }

// Smaller integers keep few bits; integers below the second bound hardly any.
constexpr int few_bits_of(int64_t slices) { return slices == 2 ? 1 << 7 : 1 << 16; }
constexpr int hardly_any_of(int64_t slices) { return slices == 2 ? 1 << 5 : 1 << 12; }

}  // namespace
