// Runs the named tests: all, or those whose name, or instruction set, contains every argument.
//
//   unit [part of a name] ...
#include "unit.h"

#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <utility>
#include <vector>

#include "poison.h"

namespace {

constexpr int kMostMessages = 3;  // of one test on one instruction set

struct Test {
  std::string name;
  std::function<void(const Isa&)> body;
};

std::vector<Test> tests;
std::string running;
int messages = 0;

void name_crash() {
  printf("CRASH %s\n", running.c_str());
  fflush(stdout);
}

void name_signal(int number) {
  name_crash();
  signal(number, SIG_DFL);
  raise(number);
}

bool wanted(const std::string& title, int argc, char** argv) {
  for (int i = 1; i < argc; ++i)
    if (title.find(argv[i]) == std::string::npos) return false;
  return true;
}

}  // namespace

// What sanitizers call before they report.
extern "C" __attribute__((visibility("default"))) void __asan_on_error() { name_crash(); }
extern "C" __attribute__((visibility("default"))) void __ubsan_on_report() { name_crash(); }

void test(const std::string& name, std::function<void(const Isa&)> body) { tests.push_back({name, std::move(body)}); }

void fail(const char* format, ...) {
  if (++messages > kMostMessages) return;
  printf("FAIL %s: ", running.c_str());
  va_list arguments;
  va_start(arguments, format);
  vprintf(format, arguments);
  va_end(arguments);
  printf("\n");
}

bool near(double actual, double expected, double bound) {
  if (isnan(expected)) return isnan(actual);
  if (isinf(expected)) return actual == expected;
  return fabs(actual - expected) <= bound;  // not so for NaN
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 1 << 12);
  for (const int number : {SIGSEGV, SIGILL, SIGFPE, SIGABRT}) {
    const auto before = signal(number, name_signal);
    if (before != SIG_DFL) signal(number, before);  // the handler of a sanitizer
  }
  add_decode_tests();
  add_matmul_tests();
  add_slice_tests();
  add_integer_row_tests();
  add_int8_tests();
  add_encode_tests();
  add_trellis_tests();
  add_attention_tests();
  add_check_tests();
  int ran = 0, failed = 0;
  for (const Test& one : tests)
    for (int i = 0; i < num_isas(); ++i) {
      running = one.name + " on " + isa_at(i)->name;
      if (!wanted(running, argc, argv)) continue;
      messages = 0;
      one.body(*isa_at(i));
      ++ran;
      failed += messages > 0;
      if (messages > kMostMessages) printf("     %d more of %s\n", messages - kMostMessages, running.c_str());
    }
  printf("%d tests ran on", ran);
  for (int i = 0; i < num_isas(); ++i) printf(" %s", isa_at(i)->name);
  printf(": %d failed\n", failed);
  return failed > 0 || ran == 0;
}
