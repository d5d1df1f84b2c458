"""The quantized matmul: its shapes and dtypes, its rules under transformations, its memory, its implementations."""

import functools as ft
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq
from eqquant._matmul.kernels import xla_cpu
from eqquant._matmul.problem import MatmulProblem
from eqquant._wrappers.low_precision import LowPrecisionArray

from .helpers import assert_close, FORMATS, primitives, temp_bytes, weights


N, K = 6, 70


@pytest.fixture(params=["int8", "nf4"])
def q(request, getkey):
    return eqq.quantize(weights(getkey(), (N, K)), request.param)


@pytest.fixture
def stacked(getkey):
    return eqq.quantize(weights(getkey(), (3, N, K)), "int8")


def matmuls(f, *args):
    """Shape of `x` and parameters of each quantized matmul in `f`, also inside loops and calls."""

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "quantized_matmul":
                yield eqn.invars[0].aval.shape, eqn.params
            for inner in jtu.tree_leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
                inner = getattr(inner, "jaxpr", inner)
                yield from visit(inner) if hasattr(inner, "eqns") else ()

    return list(visit(eqx.filter_make_jaxpr(f)(*args)[0].jaxpr))


def assert_on_primitive(f, *args):
    names = primitives(f, *args)
    assert "quantized_matmul" in names and "dot_general" not in names, names


# Shapes and dtypes


@pytest.mark.parametrize("shape", [(K,), (K, 5), (2, K, 5), (2, 3, K, 5), (K, 1)], ids=str)
@pytest.mark.parametrize("axis", [-1, 0])
def test_both_sides(getkey, shape, axis):
    w, x = weights(getkey(), (N, K)), weights(getkey(), shape)
    q, t = eqq.quantize(w, "int8", axis=axis), eqq.quantize(w.T, "int8", axis=axis)
    flip = x if x.ndim == 1 else jnp.swapaxes(x, -1, -2)
    assert_close(q @ x, jnp.matmul(q.dequantize(), x))
    assert_close(t.T @ x, jnp.matmul(t.dequantize().T, x))
    assert_close(flip @ t, jnp.matmul(flip, t.dequantize()))
    assert_close(flip @ q.T, jnp.matmul(flip, q.dequantize().T))
    for f in (lambda: q @ x, lambda: t.T @ x, lambda: flip @ t, lambda: flip @ q.T):
        assert_on_primitive(f)
    assert_on_primitive(jax.jit(lambda x, t: x @ t), flip, t)


@pytest.mark.parametrize("wbatch, xbatch", [((3,), (3,)), ((3,), ()), ((2, 1), (3,))])
@pytest.mark.parametrize("axis", [-1, -2])
def test_stacked_weights_broadcast(getkey, wbatch, xbatch, axis):
    q = eqq.quantize(weights(getkey(), (*wbatch, N, K)), "int8", axis=axis)
    dense = q.dequantize()
    with jax.numpy_rank_promotion("allow"):
        for x in (weights(getkey(), (*xbatch, K, 2)), weights(getkey(), (K,))):
            assert_close(q @ x, jnp.matmul(dense, x))
            assert_on_primitive(lambda q, x: q @ x, q, x)
        for x in (weights(getkey(), (*xbatch, 4, N)), weights(getkey(), (N,))):
            assert_close(x @ q, jnp.matmul(x, dense))
        x = weights(getkey(), (*xbatch, N, 4))
        assert_close(q.mT @ x, jnp.matmul(jnp.swapaxes(dense, -1, -2), x))


def test_where_the_quantized_axis_is_not_one_of_the_last_two(getkey):
    q = eqq.quantize(weights(getkey(), (8, N, K)), "int8", axis=0)
    conv = eqq.quantize(weights(getkey(), (8, N, K)), "int8", axis=(-2, -1))
    # The rows of `q` are of 8 values: for more columns, copies of `x` would be larger than a dense `q`.
    for w, columns, dense in ((q, 8, False), (q, 9, True), (conv, 3, True)):
        x = weights(getkey(), (K, columns))
        assert_close(w @ x, jnp.matmul(w.dequantize(), x))
        assert (eqq.explain_matmul(w, x).implementation == "dense") is dense
    told = eqq.explain_matmul(conv, x)
    assert "a part of the quantized axes (-2, -1)" in told.verdicts["dense"]
    assert told.problem == MatmulProblem(1, 8 * N, K, np.dtype("float32"), conv.format, False)
    row = eqq.explain_matmul(LowPrecisionArray(weights(getkey(), (K,)), "int8", "int8"), x)
    assert row.verdicts["dense"].startswith("it has one dimension") and row.problem[:3] == (1, 1, K)


@pytest.mark.parametrize("xdtype", ["float32", "bfloat16", "float16", "int32", "int8", "bool"])
@pytest.mark.parametrize("wdtype", ["float32", "bfloat16", "float16"])
def test_dtypes(getkey, xdtype, wdtype):
    q = eqq.quantize(weights(getkey(), (N, K)), "int8", dtype=wdtype)
    x = jnp.round(3 * weights(getkey(), (4, K))).astype(xdtype)
    with jax.numpy_dtype_promotion("strict" if xdtype == wdtype else "standard"):
        dtype = jnp.result_type(x, q.dequantize())
        # Native kernels multiply a wider `x` by values that they do not round to the dtype of the weight.
        multiplied = q.astype(dtype) if eqq.explain_matmul(x, q.T).implementation == "cpu" else q
        expected = np.asarray(x, np.float64) @ np.asarray(multiplied.dequantize(), np.float64).T
        for y in (x @ q.T, (q @ x.T).T, jax.jit(lambda q, x: q @ x.T)(q, x).T):
            assert y.dtype == dtype
            assert_close(y, expected, tol=1e-5 if y.dtype == jnp.float32 else 1e-2)


def test_float64(getkey):
    with jax.enable_x64(True):
        q = eqq.quantize(np.random.default_rng(0).normal(size=(N, K)), "int8")
        x = np.random.default_rng(1).normal(size=(K, 5))
        assert q.dtype == (q @ x).dtype == (x.T @ q.T).dtype == jnp.float64
        dense = np.asarray(q.dequantize())
        assert_close(q @ x, dense @ x, tol=1e-14)


def test_numpy_and_quantized_operands(q, getkey):
    p = eqq.quantize(weights(getkey(), (K, 5)), "int8")
    for y in (q @ p, eqq.matmul(q, p)):
        assert_close(y, q.dequantize() @ p.dequantize())
    x = np.random.default_rng(0).normal(size=(K, 3)).astype(np.float32)
    assert_close(q @ x, np.asarray(q) @ x)
    assert_close(x.T @ q.T, x.T @ np.asarray(q).T)
    assert_on_primitive(lambda q: x.T @ q.T, q)


def test_mismatched_lengths(q):
    for f in (lambda: q @ jnp.ones((N, 3)), lambda: eqq.matmul(q, jnp.ones((N, 3)))):
        with pytest.raises(ValueError, match=rf"\({N}, {K}\) @ \({N}, 3\)"):
            f()
    for f in (lambda: jnp.ones((3, K)) @ q, lambda: eqq.matmul(jnp.ones((3, K)), q)):
        with pytest.raises(ValueError, match=rf"\(3, {K}\) @ \({N}, {K}\)"):
            f()


# Batching


@pytest.mark.parametrize(
    "batched, shape, m",
    [
        (lambda f: jax.vmap(f), (5, K), 5),
        (lambda f: jax.vmap(f, in_axes=1), (K, 5), 5),
        (lambda f: jax.vmap(jax.vmap(f)), (5, 4, K), 20),
        (lambda f: jax.vmap(jax.vmap(f, in_axes=1), in_axes=2), (K, 4, 5), 20),
        (lambda f: jax.jit(jax.vmap(jax.jit(f))), (5, K), 5),
    ],
    ids=["one", "axis1", "nested", "nested_axes", "jit"],
)
def test_vmap_over_x_folds_into_rows(q, getkey, batched, shape, m):
    x = weights(getkey(), shape)
    for side in (lambda w, x: w @ x, lambda w, x: x @ w.T, lambda w, x: w.T @ (w @ x)):
        assert_close(batched(ft.partial(side, q))(x), batched(ft.partial(side, q.dequantize()))(x))
        found = matmuls(batched(ft.partial(side, q)), x)
        assert found and all(len(s) == 2 and s[0] == m for s, _ in found)
        assert not {"scan", "while"} & set(primitives(batched(ft.partial(side, q)), x))


@pytest.mark.long
@pytest.mark.parametrize("transposed", [False, True])
def test_vmap_over_stacked(stacked, getkey, transposed):
    f = (lambda w, x: x @ w) if transposed else (lambda w, x: w @ x)
    inner = N if transposed else K
    dense = stacked.dequantize()
    x = weights(getkey(), (inner,))
    assert_close(jax.vmap(f, in_axes=(0, None))(stacked, x), jax.vmap(f, in_axes=(0, None))(dense, x))
    xs = weights(getkey(), (3, inner))
    assert_close(jax.vmap(f)(stacked, xs), jax.vmap(f)(dense, xs))
    assert len(matmuls(jax.vmap(f), stacked, xs)) == 1
    xs = weights(getkey(), (4, 3, inner))
    ensemble = jax.vmap(jax.vmap(f, in_axes=(None, 0)), in_axes=(0, 1))  # a batch through each
    assert_close(ensemble(stacked, xs), ensemble(dense, xs))
    assert [s for s, _ in matmuls(ensemble, stacked, xs)] == [(3, 4, inner)]
    product = jax.vmap(jax.vmap(f, in_axes=(0, None)), in_axes=(None, 0))
    assert_close(product(stacked, xs[:, 0]), product(dense, xs[:, 0]))
    assert len(matmuls(product, stacked, xs[:, 0])) == 1


# Differentiation

DERIVATIVES = {
    "grad": lambda f: jax.grad(lambda x: jnp.sum(jnp.sin(f(x)))),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),)),
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "hessian": lambda f: jax.hessian(lambda x: jnp.sum(f(x) ** 3)),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](jnp.cos(x)),
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](jnp.cos(f(x))),
    "linear_transpose": lambda f: lambda x: jax.linear_transpose(f, x)(jnp.cos(f(x))),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.sin(f(x))))),
    "vmap_of_grad": lambda f: lambda x: jax.vmap(jax.grad(lambda x: jnp.sum(f(x) ** 2)))(jnp.stack([x, 2 * x])),
    "grad_of_vmap": lambda f: lambda x: jax.grad(lambda x: jnp.sum(jax.vmap(f)(x) ** 2))(jnp.stack([x, 2 * x])),
    "jit_of_grad": lambda f: jax.jit(jax.grad(lambda x: jnp.sum(f(x) ** 2))),
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("shape, format", [((K,), "nf4"), ((K, 3), "int8")], ids=["vector", "matrix"])
def test_derivatives(getkey, derivative, shape, format):
    q, x = eqq.quantize(weights(getkey(), (N, K)), format), weights(getkey(), shape)
    d = DERIVATIVES[derivative]
    assert_close(d(lambda x: q @ x)(x), d(lambda x: q.dequantize() @ x)(x))
    assert_on_primitive(d(lambda x: q @ x), x)
    x = x.T
    assert_close(d(lambda x: x @ q.T)(x), d(lambda x: x @ q.dequantize().T)(x))


@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives_over_stacked(stacked, getkey, derivative):
    x = weights(getkey(), (3, 4, N))
    d = DERIVATIVES[derivative]
    assert_close(d(lambda x: x @ stacked)(x), d(lambda x: x @ stacked.dequantize())(x))


def test_scan_over_stacked_forward_and_reverse(getkey):
    w = eqq.quantize(weights(getkey(), (3, K, K)) / 8, "int8")
    x = weights(getkey(), (K,))

    def loss(x, w):
        return jnp.sum(jax.lax.scan(jax.checkpoint(lambda x, w: (jnp.tanh(w @ x), None)), x, w)[0])

    assert_close(
        eqx.filter_jit(jax.value_and_grad(loss))(x, w), eqx.filter_jit(jax.value_and_grad(loss))(x, w.dequantize())
    )
    assert_on_primitive(jax.grad(loss), x, w)
    batched = jax.vmap(jax.grad(loss), in_axes=(0, None))
    assert {s for s, _ in matmuls(batched, weights(getkey(), (5, K)), w)} == {(5, K)}


# Memory, and the loop over rows


def struct(shape, format):
    return jax.eval_shape(lambda x: eqq.quantize(x, format), jax.ShapeDtypeStruct(shape, jnp.float32))


@pytest.mark.parametrize("m", [1, 128])
@pytest.mark.parametrize("format", ["nf4", "int8", "int4"])
def test_no_dense_copy_of_the_weight(format, m):
    q, x = struct((4096, 4096), format), jax.ShapeDtypeStruct((m, 4096), jnp.float32)
    for f in (lambda q, x: x @ q.T, lambda q, x: x @ q, lambda q, x: jax.grad(lambda x: jnp.sum(x @ q))(x)):
        assert temp_bytes(f, q, x) < 16 * 2**20  # dense, it is 64 MiB


def test_embedding_lookup_leaves_the_table_alone():
    ids = jax.ShapeDtypeStruct((32,), jnp.int32)
    assert temp_bytes(lambda q, ids: q[ids], struct((50000, 256), "nf4"), ids) < 2 * 2**20  # dense, it is 49 MiB


def test_a_broadcast_batch_is_more_rows():
    """Of `x` only the axes that the weight has too are batch. The rest become rows, and no weight is copied."""
    q, x = struct((4, 512, 512), "int8"), jax.ShapeDtypeStruct((64, 1, 8, 512), jnp.float32)
    # Where the sum runs along the blocks, the axis that only the weight has is one of more rows, too.
    for f, rows in ((lambda q, x: x @ q, (4, 64 * 8, 512)), (lambda q, x: x @ q.mT, (64 * 8, 512))):
        f = jax.jit(f)
        with jax.numpy_rank_promotion("allow"):
            assert f.eval_shape(q, x).shape == (64, 4, 8, 512)
            assert [shape for shape, _ in matmuls(f, q, x)] == [rows]
            # `x` for each of the 4 is 4 MiB, and so is the result. 64 copies of the codes were 64 MiB.
            assert temp_bytes(f, q, x) < 32 * 2**20


def test_small_products_equal_numpy(getkey):
    """Batches of either side, vectors, and matrices of a stack, from both sides of both orders."""
    draw = lambda *shape: np.asarray(weights(getkey(), shape))
    w, x, one, many = draw(3, 1, 5, 8), draw(3, 4, 2, 8), draw(8), draw(7, 1, 4, 2, 8)

    @jax.jit
    def run(w, x, one, many):
        results = []
        for axis in (-1, -2):
            q, p = (eqq.quantize(a, "int8", axis=axis) for a in (w, w[0, 0]))
            with jax.numpy_rank_promotion("allow"), eqq.no_dense():
                large = [many @ q.mT, q @ many.mT, x @ q.mT] if axis == -1 else [x @ q.mT]
                small = [p @ one, one @ p.mT, x @ p.mT, jax.vmap(lambda q, x: x @ q.mT)(q, x[:, :1])]
            results.append((q.dequantize(), p.dequantize(), large, small))
        return results

    for (q, p, large, small), axis in zip(jax.tree.map(np.asarray, run(w, x, one, many)), (-1, -2), strict=True):
        wanted = [many @ q.mT, q @ many.mT, x @ q.mT] if axis == -1 else [x @ q.mT]
        wanted += [p @ one, one @ p.mT, x @ p.mT, x[:, :1] @ q.mT]
        for found, expected in zip([*large, *small], wanted, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.long
def test_a_broadcast_batch_equals_numpy(getkey):
    q = eqq.quantize(weights(getkey(), (3, 1, N, K)), "int8")
    dense = q.dequantize()
    with jax.numpy_rank_promotion("allow"):
        for w, d in ((q, dense), (q.mT, jnp.swapaxes(dense, -1, -2))):
            for batch in ((5, 1, 4), (3, 4), (1, 1), (2, 3, 1), (4,), ()):
                x = weights(getkey(), (*batch, 2, w.shape[-2]))
                assert_close(x @ w, jnp.matmul(x, d))
                assert_close(w.mT @ x.mT, jnp.matmul(d.mT, x.mT))
        with pytest.raises(ValueError, match="broadcast"):
            jnp.ones((2, 1, 5, N)) @ q


@pytest.mark.parametrize("shape", [(3, N, 0), (3, 0, K), (0, N, K)], ids=str)
def test_empty_stacks(getkey, shape):
    q, axes = eqq.quantize(jnp.ones(shape), "int8"), (0, None)
    for w, d in ((q, jnp.ones(shape)), (q.mT, jnp.ones(shape).mT)):
        x = jnp.ones((w.shape[-1],))
        assert_close(jax.vmap(lambda w, x: w @ x, axes)(w, x), jax.vmap(lambda w, x: w @ x, axes)(d, x))


@pytest.mark.long
@pytest.mark.parametrize("m", [1, 128])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_loop_over_rows(getkey, monkeypatch, m, batch):
    monkeypatch.setattr(xla_cpu, "ROWS_BYTES", 2**18)  # 187 of the 1100 rows at a time: a remainder
    q = eqq.quantize(weights(getkey(), (*batch, 1100, 700)), "nf4")
    x, t = weights(getkey(), (*batch, m, 700)), weights(getkey(), (*batch, m, 1100))
    by_xla = ft.partial(eqq.matmul, implementation="xla")  # native kernels, where installed, have no loop to see
    forward, backward = jax.jit(lambda q, x: by_xla(x, q.mT)), jax.jit(lambda q, t: by_xla(t, q))
    for f, operand, dense in ((forward, x, q.mT), (backward, t, q)):
        assert "while" in f.lower(q, operand).as_text()
        assert_close(f(q, operand), np.asarray(operand, np.float64) @ np.asarray(dense, np.float64), tol=2e-6)


# Precision, implementations


def test_default_precision_is_carried(q):
    x = jnp.ones((K,))
    assert matmuls(lambda x: q @ x, x)[0][1]["precision"] is None
    with jax.default_matmul_precision("highest"):
        assert matmuls(lambda x: q @ x, x)[0][1]["precision"] == "highest"
        assert_close(q @ x, q.dequantize() @ x)
    explicit = lambda x: eqq.matmul(q, x, precision=jax.lax.Precision.HIGH)
    assert matmuls(explicit, x)[0][1]["precision"] == jax.lax.Precision.HIGH


def test_forced_implementation(q, getkey):
    x = weights(getkey(), (3, K))
    assert_close(eqq.matmul(x, q.T, implementation="xla"), x @ q.dequantize().T)
    assert matmuls(lambda x: eqq.matmul(x, q.T, implementation="xla"), x)[0][1]["implementation"] == "xla"
    unknown = ft.partial(eqq.matmul, implementation="fast")
    for run in (unknown, jax.jit(unknown)):
        with pytest.raises(ValueError, match="`implementation` must be one of .*xla, or None. Got 'fast'"):
            run(x, q.T)
    conv = eqq.quantize(weights(getkey(), (8, N, K)), "int8", axis=(-2, -1))
    for operands in ((x, x.T), (conv, x.T)):
        with pytest.raises(ValueError, match="`implementation` is for"):
            eqq.matmul(*operands, implementation="xla")


@pytest.mark.parametrize("platform", [None, "cpu", "cuda", "rocm", "tpu"])
def test_explain(q, platform):
    x = jax.ShapeDtypeStruct((5, K), jnp.float32)
    told = eqq.explain_matmul(x, q.T, platform=platform)
    assert told.platform == (platform or jax.default_backend())
    assert told.verdicts[told.implementation].startswith("chosen") and "xla" in told.verdicts
    assert sum(v.startswith("chosen") for v in told.verdicts.values()) == 1
    assert told.problem == MatmulProblem(5, N, K, np.dtype("float32"), q.format, False)
    assert "dequantized" not in told.verdicts[told.implementation]
    table = told.__rich__()
    chosen = [verdict.startswith("chosen") for verdict in table.columns[1].cells]
    assert [row.style == "bold" for row in table.rows] == chosen
    assert table.title.startswith(f"float32(5, {K}) . W({N}, {K})^T, ")
    across = eqq.explain_matmul(jnp.ones(N), q, platform=platform)
    assert across.problem.transpose and across.__rich__().title.startswith(f"float32(1, {N}) . W({N}, {K}), ")
    for name in (*told.verdicts, repr(q.format), told.platform, "float32"):
        assert name in str(told)
    assert json.loads(json.dumps(told.to_dict()))["implementation"] == told.implementation
    if platform == "cuda":
        assert "cpu, cpu_int8 " in str(told) and str(told).count("it is for cpu, and this is cuda") == 1
    assert eqq.explain_matmul(q, jnp.ones((2, K, 4)), platform=platform).problem.m == 8
    with pytest.raises(TypeError, match="quantized operand"):
        eqq.explain_matmul(x, x)
    with pytest.raises(ValueError, match=rf"\(4, 5\) @ \({K}, {N}\)"):
        eqq.explain_matmul(jnp.ones((4, 5)), q.T)
    with pytest.raises(ValueError, match="`platform` must be one of cpu, cuda, rocm, tpu. Got 'metal'"):
        eqq.explain_matmul(x, q.T, platform="metal")
    assert eqq.explain_matmul(x, q.T, platform="gpu").platform == "cuda"
    assert eqq.explain_matmul([1.0] * K, q.T).problem.m == 1
    one = eqq.quantize(jnp.ones((1, K)), "int8")
    assert eqq.explain_matmul(jnp.ones((2, 1)), one, platform="rocm").implementation == "xla"
    with pytest.raises(ValueError, match="ndim"):  # as the product itself
        eqq.explain_matmul(jnp.float32(2), q)


def test_explain_equals_the_bound_implementation(getkey):
    """It reads the primitive that the product binds: the same shapes, whichever way they come."""
    stacked = eqq.quantize(weights(getkey(), (3, N, K)), "int8")
    for w, x in (
        (stacked, jnp.ones((K,))),
        (stacked, jnp.ones((3, K, 2))),
        (stacked, jnp.ones((5, 1, K, 2))),
        (stacked.mT, jnp.ones((N, 2))),
        (eqq.quantize(weights(getkey(), (N, K)), "int8"), jnp.ones((4, 2, K, 5))),
    ):
        with jax.numpy_rank_promotion("allow"):
            told = eqq.explain_matmul(w, x)
            ((shape, params),) = matmuls(lambda w, x: w @ x, w, x)
        assert (told.problem.m, told.problem.transpose) == (shape[-2], params["transpose"])
        assert shape[-1] == (told.problem.n if told.problem.transpose else told.problem.k)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_lowers_for_other_platforms(q, platform):
    lower = lambda f, *args: jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    assert "dot_general" in lower(lambda q, x: q @ x, q, jnp.ones((K, 8)))
    assert "dot_general" in lower(jax.grad(lambda x, q: jnp.sum(x @ q)), jnp.ones((8, N)), q)


@pytest.mark.parametrize("name", ["nf4", "int8", "mxfp4", "int4_affine", "nvfp4"])
def test_empty_sums_are_zero(name):
    """A quantized axis of length zero."""
    q = eqq.quantize(jnp.ones((5, 0)), FORMATS[name].format)
    np.testing.assert_array_equal(q @ jnp.ones(0), np.zeros(5))
    np.testing.assert_array_equal(jax.jit(lambda x, q: x @ q.T)(jnp.ones((3, 0)), q), np.zeros((3, 5)))
    assert (jnp.ones((3, 5)) @ q).shape == (3, 0)


def test_without_jit(getkey):
    """Outside of `jit` each primitive is a program of its own, which `jax.disable_jit` forbids."""
    x, q = weights(getkey(), (3, 64)), eqq.quantize(weights(getkey(), (8, 64)), "int8")
    with jax.disable_jit():
        y = x @ q.T
    np.testing.assert_allclose(y, x @ q.T, rtol=1e-5, atol=1e-5)
