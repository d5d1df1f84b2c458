"""The grid: lengths at which products change their path, or might forget a tail, by XLA and by native kernels.

Each length of a row, and each number of rows of the weight, has a case. What else a case has, `--seed` chooses, so that
all pairs of values come with one commit or another. `native/tests/fuzz_grid.h` has all pairs, for native kernels.
"""

import math
import random

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq
from eqquant._native import library as native

from .bounds import assert_within_bounds
from .helpers import FORMATS, SCALARS


K = (*range(1, 201), *range(255, 258), *range(511, 514), *range(1023, 1041), *range(4095, 4098))
N = (*range(1, 71), *range(127, 131))
M = (*range(1, 18), 31, 32, 33, 64, 127, 128, 129)
MANY = (513, 2049, 32802)

# Products of `x: (2, 2, m, inner)`, also given by columns as `c`, with a stack `w: (2, inner, outer)`. `select` gets
# indices that are traced.
ARRANGEMENTS = {
    "matrix": lambda matmul, select, x, c, w: matmul(x[0, 0], _layer(w, 1)),
    "vector": lambda matmul, select, x, c, w: matmul(x[1, 0, 0], _layer(w, 1)),
    "selected": lambda matmul, select, x, c, w: matmul(x[0, 1], select(w, 1)),
    "selected twice": lambda matmul, select, x, c, w: matmul(x[1], select(w, np.array([1, 1]))),
    "stack": lambda matmul, select, x, c, w: matmul(x[0], w),
    "x for all of a stack": lambda matmul, select, x, c, w: matmul(x[1, 1], w),
    "stack for all x": lambda matmul, select, x, c, w: matmul(x, w),
    "matrix for all x": lambda matmul, select, x, c, w: matmul(x, _layer(w, 0)),
    "x by columns": lambda matmul, select, x, c, w: matmul(c[0].mT, w),
    "w on the left": lambda matmul, select, x, c, w: matmul(w.mT, c[1]),
    "w on the left for all x": lambda matmul, select, x, c, w: matmul(_layer(w, 0).mT, c),
}


def _layer(stack, index):
    return jtu.tree_map(lambda a: a[index], stack)


def _cases(seed):
    choose = random.Random(seed)

    def some(values, count):
        return choose.sample([*values] * math.ceil(count / len(values)), count)

    lengths = (*K, *some(K, len(N)), *some(K[:64], len(MANY)))
    rows = (*some(N, len(K)), *N, *some(N[:16], len(MANY)))
    rows_of_x = (*some(M, len(K) + len(N)), *MANY)
    formats = some(SCALARS, len(lengths))
    for k, n, m, name in zip(lengths, rows, rows_of_x, formats, strict=True):
        marks = pytest.mark.slow if m in MANY or choose.randrange(9) else ()
        yield pytest.param(k, n, m, name, some(ARRANGEMENTS, 4), id=f"K{k}-N{n}-M{m}-{name}", marks=marks)


def pytest_generate_tests(metafunc):
    metafunc.parametrize("k, n, m, name, arrangements", _cases(metafunc.config.option.seed))


def test_product(k, n, m, name, arrangements):
    numbers = np.random.default_rng(k)
    w = numbers.standard_normal((2, n, k), np.float32)
    x = {flag: numbers.standard_normal((2, 2, m, inner), np.float32) for flag, inner in ((False, k), (True, n))}
    dense = set()

    @jax.jit  # one program, since compiling takes longest
    def run(w, x, c, one):
        q, ys = eqq.quantize(w, FORMATS[name].format), {}
        for implementation in ("xla",) if native.refusal() else ("xla", "cpu"):
            for what in arrangements:
                for transpose in (False, True):
                    key = (implementation, what, transpose)

                    def matmul(x, w, key=key):
                        if eqq.explain_matmul(x, w).implementation != "dense":
                            return eqq.matmul(x, w, implementation=key[0])
                        dense.add(key)
                        return eqq.matmul(x, w)

                    select = lambda w, index: eqq.take_layer(w, index * one)
                    operands = (x[transpose], c[transpose], q if transpose else q.mT)
                    ys[key] = ARRANGEMENTS[what](matmul, select, *operands)
        return q, ys

    q, ys = run(w, x, {flag: np.ascontiguousarray(a.mT) for flag, a in x.items()}, jnp.int32(1))
    for key, y in ys.items():
        implementation, what, transpose = key
        product = lambda x, w, what=what: ARRANGEMENTS[what](np.matmul, _layer, x, x.mT, w)
        implementation = "xla" if key in dense else implementation
        assert_within_bounds(product, y, x[transpose], q, implementation, transpose=transpose)
