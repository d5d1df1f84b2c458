// The product of integers: x as int8 codes and a scale per row, or floats that are quantized to that inside the call,
// with given scales or their own, times a weight of integers. Sums of a block are exact in 32 bits, and scaled in
// float32.
//
//   y(b, m, n) = x_scale(b, m) * sum over blocks of scale * row_scale * sum over k of code(b, m, k) (table[code] -
//   zero_point)
//
// With zero points of x too, products with a row of ones are the sums of the weight, which are subtracted as integers.
#pragma once

#include <stddef.h>

#include "core/isa.h"

enum Int8Form {
  kFloats = 0,    // of the type of y; without `x_scale` the scale of a row is its amax / 127, or spans its range
  kSigned = 1,    // int8
  kUnsigned = 2,  // uint8, with a bias of 128
};

typedef struct Int8Problem {
  Problem p;              // `x_type` is the type of y; no `transpose`; `x_batch` and so on count elements of `form`
  const float* x_scale;   // (batch, m), of codes, or given to floats; or null
  const uint8_t* x_zero;  // (batch, m), with `x_scale` of affine rows: a value is the unsigned code less this
  int32_t form;           // Int8Form
  int32_t affine;         // whether rows of x have zero points
} Int8Problem;

typedef struct Int8Kernel {
  void (*plan)(const Int8Problem*, int64_t threads, Plan*);
  void (*prepare)(const Int8Problem*, const Plan*, void* shared, int64_t part);
  void (*run)(const Int8Problem*, const Plan*, const void* shared, void* own, int64_t unit);
  bool (*accepts)(const Int8Problem*) = nullptr;  // null: all
} Int8Kernel;

// The error of a problem, as a sentence in `text`; or null.
const char* check_int8(const Int8Problem& problem, char* text, size_t room);
