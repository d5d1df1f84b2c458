// Named tests of single kernels: `unit.cpp` runs each on every instruction set of this machine, and `fuzz.cpp` tries
// what nobody thought of. Tests see the library through the two headers below, and nothing else of it.
#ifndef EQQUANT_TESTS_UNIT_H_
#define EQQUANT_TESTS_UNIT_H_

#include <stdint.h>

#include <functional>
#include <string>

#include "core/matmul.h"
#include "encode/encode.h"

// Adds a test. Its name says what breaks where it fails: "matmul/zero points/many rows".
void test(const std::string& name, std::function<void(const Isa&)> body);

// Says that the test that runs fails, and why. The test goes on.
__attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

// Whether two numbers are at most so far apart. NaN is near NaN alone, and an infinity near itself.
bool near(double actual, double expected, double bound);

// Each adds the tests of one file.
void add_decode_tests();
void add_matmul_tests();
void add_slice_tests();
void add_integer_row_tests();
void add_int8_tests();
void add_encode_tests();
void add_trellis_tests();
void add_attention_tests();
void add_check_tests();

#endif  // EQQUANT_TESTS_UNIT_H_
