"""Two methods of your own: the scale of least absolute error, and the scale of least error at the outputs of a layer.

A method decides how codes are found, for every format alike: one class with one function. The first chooses the scale
of each block from its values. The second also weighs each input feature by statistics of the data, which
`collect_stats` collects and `quantize_tree` hands out leaf by leaf.
"""

# %% Imports
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Float32, UInt8
from rich.console import Console
from rich.table import Table

import eqquant as eqq


# %% The method
class Norm(eqq.extend.AbstractScaleMethod):
    """Takes the scale that leaves the lowest sum of |error| ** p in each block."""

    p: float = eqx.field(static=True, default=1.0)

    def choose_scales(
        self, blocks: Float32[Array, "*batch blocks block"], format: eqq.extend.AbstractFormat
    ) -> tuple[Float32[Array, "*batch blocks"], UInt8[Array, "*batch blocks"] | None]:
        candidates = []
        for factor in (1, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5):
            # The format's own scale for a shorter range: values beyond it are clipped.
            scale, zero_point = eqq.AbsMax().choose_scales(factor * blocks, format)
            divisor = jnp.where(scale == 0, 1, scale)[..., None]
            shift = 0 if zero_point is None else zero_point[..., None].astype(jnp.float32)
            decoded = (format.decode(format.encode(blocks / divisor + shift)) - shift) * divisor
            candidates.append((jnp.sum(jnp.abs(decoded - blocks) ** self.p, axis=-1), scale, zero_point))
        errors, *found = jax.tree_util.tree_map(lambda *x: jnp.stack(x), *candidates)
        best = jnp.argmin(errors, axis=0)[None]
        return jax.tree_util.tree_map(lambda x: jnp.take_along_axis(x, best, axis=0)[0], tuple(found))


# %% One array: the format does not change
w = jr.t(jr.key(0), 3.0, (256, 1024))  # heavy tails
q = eqq.quantize(w, "int4", method=Norm())
assert q.format == eqq.Int4()

# %% A whole model, with the method for some of its weights
model = eqx.nn.MLP(in_size=64, out_size=8, width_size=128, depth=2, key=jr.key(1))
rules = {"layers.0.*": eqq.QuantConfig("int4", Norm(2.0)), "*": "int8"}
print(eqq.summary(eqq.quantize_tree(model, rules)))

# %% Inside jit and vmap
stacked = jax.jit(jax.vmap(lambda w: eqq.quantize(w, "int4", method=Norm())))(w.reshape(4, 64, 1024))
assert jnp.array_equal(stacked.dequantize().reshape(w.shape), q.dequantize())

# %% Every format, with zero points or without
methods = (eqq.AbsMax(), Norm(), eqq.MSE(), eqq.HQQ())
table = Table("format", *map(repr, methods), title="Mean absolute error, relative to AbsMax")
for format in (eqq.Int8(), eqq.Int4(), eqq.Int4(symmetric=False), eqq.Int2(), eqq.NF4(), eqq.MXFP4()):
    errors = [jnp.mean(jnp.abs(eqq.quantize(w, format, method=m) - w)) for m in methods]
    table.add_row(repr(format), *(f"{error / errors[0]:.1%}" for error in errors))
    assert errors[1] <= errors[0]
Console(width=120).print(table)


# %% A method that looks at the inputs of a weight: errors count by the mean square of the feature that they meet
class ByInputs(eqq.extend.AbstractMethod):
    """Takes the scale of least error at the outputs, as far as the mean squares of the inputs tell."""

    inputs: Any  # of all leaves, as `collect_stats` returns them; of one leaf, once `quantize_tree` has picked it

    def quantize_rows(
        self,
        rows: Float[Array, "*batch length"],
        format: eqq.extend.AbstractFormat,
        *,
        key: Any = None,
        chunk: int | None = None,
    ) -> eqq.extend.EncodedRows:
        scale, zero_point = eqq.extend.choose_by_blocks(eqq.AbsMax().choose_scales, rows, format)
        candidates = []
        for factor in (1, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5):
            encoded = eqq.extend.encode_rows(rows, factor * scale, zero_point, format)
            squares = (eqq.extend.decode_rows(encoded, format) - rows) ** 2 * self.inputs.second_moment
            # One factor for each row keeps this short. A row is one output, so outputs do not compete.
            candidates.append((jnp.sum(squares, axis=-1, keepdims=True), factor * scale))
        errors, scales = jax.tree_util.tree_map(lambda *x: jnp.stack(x), *candidates)
        best = jnp.take_along_axis(scales, jnp.argmin(errors, axis=0)[None], axis=0)[0]
        return eqq.extend.encode_rows(rows, best, zero_point, format, key=key, chunk=chunk)


# %% On a layer whose inputs differ in size
layer = eqx.nn.Linear(256, 64, key=jr.key(2))
data = jr.normal(jr.key(3), (512, 256)) * jnp.geomspace(0.01, 10, 256)[jr.permutation(jr.key(4), 256)]
stats = eqq.calibrate.collect_stats(layer, [data])
outputs = jax.vmap(layer)(data)
for method in (eqq.AbsMax(), eqq.MSE(), ByInputs(stats)):
    quantized = eqq.quantize_tree(layer, "int4", method=method)
    error = jnp.linalg.norm(jax.vmap(quantized)(data) - outputs) / jnp.linalg.norm(outputs)
    print(f"{type(method).__name__}: relative error of the outputs {error:.4f}")
