// What `tools/mutate_native.py` writes into a copy of the sources: all mutants are compiled at once, and the variable
// of the environment EQQUANT_MUTANT says which of them runs. `EQQUANT_REACHED` names a file that gets a byte for each
// mutant: whether the tests came by.
#pragma once

extern int active_mutant;
extern unsigned char reached_mutants[];

#define EQQ_MUTANT static inline __attribute__((always_inline))

namespace {
namespace mutant {

EQQ_MUTANT bool is(int id) {
  reached_mutants[id] = 1;
  return active_mutant == id;
}
EQQ_MUTANT bool not_in(int id) { return !is(id); }

// `a + b` is written `a + Add<id>() + b`, which has the same place among other operators.
#define EQQ_OPERATOR(NAME, OPERATOR, OTHER)                         \
  template <int kId>                                                \
  struct NAME {};                                                   \
  template <int kId, class A>                                       \
  struct Left##NAME {                                               \
    A a;                                                            \
  };                                                                \
  template <int kId, class A>                                       \
  EQQ_MUTANT Left##NAME<kId, A> operator OPERATOR(A a, NAME<kId>) { \
    return {a};                                                     \
  }                                                                 \
  template <int kId, class A, class B>                              \
  EQQ_MUTANT auto operator OPERATOR(Left##NAME<kId, A> left, B b) { \
    return is(kId) ? left.a OTHER b : left.a OPERATOR b;            \
  }
EQQ_OPERATOR(Add, +, -)
EQQ_OPERATOR(Subtract, -, +)
EQQ_OPERATOR(Multiply, *, +)
EQQ_OPERATOR(Divide, /, *)
EQQ_OPERATOR(Rest, %, +)
EQQ_OPERATOR(Less, <, <=)
EQQ_OPERATOR(LessEqual, <=, <)
EQQ_OPERATOR(Greater, >, >=)
EQQ_OPERATOR(GreaterEqual, >=, >)
EQQ_OPERATOR(Equal, ==, !=)
EQQ_OPERATOR(Unequal, !=, ==)
EQQ_OPERATOR(And, &, |)
EQQ_OPERATOR(Or, |, &)
EQQ_OPERATOR(ShiftLeft, <<, >>)
EQQ_OPERATOR(ShiftRight, >>, <<)
#undef EQQ_OPERATOR

// A constant, which is one more.
template <int kId, class T>
EQQ_MUTANT T constant(T value) {
  return is(kId) ? value + 1 : value;
}

template <int kId, class T>
EQQ_MUTANT T min64(T a, T b) {
  return (a < b) != is(kId) ? a : b;
}
template <int kId, class T>
EQQ_MUTANT T max64(T a, T b) {
  return (a > b) != is(kId) ? a : b;
}
template <int kId>
EQQ_MUTANT long div_up(long a, long b) {
  return (is(kId) ? a : a + b - 1) / b;
}
template <int kId>
EQQ_MUTANT long round_up(long a, long b) {
  return (is(kId) ? a : a + b - 1) / b * b;
}

}  // namespace mutant
}  // namespace
