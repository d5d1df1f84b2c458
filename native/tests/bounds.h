// How far results may be from exact ones, by counting roundings.
//
// A rounding to float32 changes a number by at most u = 2^-24 of it, and on average by u^2 / 3 in the square. A term of
// a sum passes through `r` roundings: a few of its own, and one each time that something is added to the partial sum it
// is a part of. So
//   - the error is at most r u times the sum of |term|: `most`.
//   - x is random, with mean zero. So are the terms, and squares of partial sums are sums of squares of terms.
//   Roundings
//     are independent, so that an error beyond `kSure` sqrt(r) u sqrt(sum of term^2) has a probability of 2e-14, by
//     Hoeffding's inequality: `likely`.
//   - the mean square of an error is at most r u^2 / 3 times the sum of term^2: `mean_square`.
// `r` depends on the path, since it says how many terms a partial sum has.
#pragma once

#include <math.h>

#include <algorithm>

#include "core/problem.h"

namespace {

constexpr double kUnit = 0x1p-24;  // u
constexpr double kSure = 6;

// Of a term: the zero point is subtracted, the scale is multiplied by the scale of the row, the code or x by that, and
// x by the code.
constexpr double kOfTerm = 4;
// Sums of lanes are added up, at most 16 of them, and what few vectors were summed apart.
constexpr double kOfLanes = 8;

double up(int64_t a, int64_t b) { return static_cast<double>((a + b - 1) / b); }

// Of a sum of `count` numbers, where so many are added one after the other, and then what they add up to.
double parts(int64_t count, int64_t part) { return static_cast<double>(std::min(count, part)) + up(count, part); }

// The roundings of a term of a product of floats, on an instruction set with vectors of `lanes` floats.
double float_roundings(const Problem& p, int lanes) {
  double sum;
  if (p.transpose) {
    sum = parts(p.n, 64);  // rows of the weight
  } else {
    // Lanes run along k, or along rows of x or of the weight: then 512 codes are added up at a time.
    sum = std::max(up(p.k, lanes), parts(p.k, 512));
  }
  if (p.offset != nullptr) {
    // Offsets, to which the middle of the table was added (3), meet sums of blocks of x: of lanes, 64 numbers of each
    // at a time, or where x lies by columns of 64 numbers at a time. Transposed, they meet 64 numbers of x at a time.
    const double block = p.x_column == 1 ? parts((p.block_size + lanes - 1) / lanes, 64) + 15 : parts(p.block_size, 64);
    const double offsets = p.transpose ? parts(p.n, 64) : block + up(p.blocks, lanes) + 15;
    sum = std::max(sum, offsets) + 3;
  }
  return kOfTerm + sum + kOfLanes;
}

// Of a product of integers: the sum of a block is exact, unless it is longer than 32768 codes. It becomes a float, and
// is multiplied by up to three scales. Where there are several, lanes are added up as floats.
double int8_roundings(const Problem& p) {
  const double runs = static_cast<double>(p.blocks) * up(std::max<int64_t>(p.block_size, 1), 32768);
  return kOfTerm + (runs > 1 ? runs + kOfLanes : 0);
}

double most(double roundings, double magnitude) { return roundings * kUnit * magnitude; }
double likely(double roundings, double squares) { return kSure * kUnit * sqrt(roundings * squares); }
double mean_square(double roundings, double squares) { return roundings * kUnit * kUnit / 3 * squares; }

// Kernels with tiles and slices have numbers as integers of 24 bits, or of 16, relative to the largest of a row: half a
// step is the error of x. Steps of the weight are powers of two, so up to twice as long. Of `k` products, times the
// largest of both, it is this in the root of the mean square.
double integer_error(bool coarse, double k) { return 0.5 / (coarse ? 32600 : 8355000) * sqrt((1 + 4) * k / 3); }

// A result that is rounded to 16 bits.
double result_rounding(int type, double value) {
  if (type == kFloat32) return 0;
  return fabs(value) * (type == kFloat16 ? 0x1p-11 : 0x1p-8) * 1.001 + (type == kFloat16 ? 0x1p-25 : 0);
}

// How many times its expectation a sum of squares of `count` independent errors may be, but for a probability of 1e-9:
// Laurent and Massart, Annals of Statistics 28, lemma 1. Transposed, results of a block share errors: x is scaled once
// for all of them, their offsets are one sum, and codes of one bit have but two products with each number of x, whose
// roundings are in every result. So a row of x has as many independent errors as blocks. One block and one row may be
// 51 times their expectation, where 600 independent results may not be 1.5 times.
double most_of_mean(double count) { return 1 + 2 * sqrt(20.7 / count) + 2 * 20.7 / count; }

}  // namespace
