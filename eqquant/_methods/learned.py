"""Learned rounding: improves codes and scales of another method in turn, on the inputs."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, PRNGKeyArray, UInt8

from .._formats.base import AbstractFormat, spans_rows
from .._numerics.batching import Index
from .._numerics.blocks import block_length
from .._numerics.scale_bits import bits_to_scale, scale_to_bits
from .base import AbstractMethod
from .choose import Rows
from .gptq import GPTQ
from .gram import check_gram, damp, get_gram, HIGHEST, map_layers, WIDTH
from .grid import decode_by, encode_by, EncodedRows, Grid, load_grid
from .mse import MSE
from .statistics import Inputs


class LearnedRounding(AbstractMethod):
    r"""Improves the codes and scales of another method, until the error of the outputs,
    $\operatorname{tr}\, (W - \hat W)\, G\, (W - \hat W)^T$, stops falling. $G$ is the mean of $x x^T$ over the
    inputs of the weight.

    Takes one column after the other, and moves its codes to the best levels given all other columns. Then fits the
    scale of each block by least squares. So the error falls with every step. ([`eqquant.GPTQ`][] rounds each column
    once, before it knows how it will round the next ones.) Works with every format whose codes stand for one value.
    Scales do not change if the format quantizes them, or has one for each matrix.

    The error is measured with the damping, in each row. It is never larger than with `method`.

    !!! Example

        ```python
        stats = eqq.calibrate.collect_stats(model, batches, gram=True)
        model = eqq.quantize_tree(model, "int3", method=eqq.LearnedRounding(stats))
        ```

    ??? cite

        [QuantEase: Optimization-based Quantization for Language Models](https://arxiv.org/abs/2309.01885), which
        minimizes the error that
        [Up or Down? Adaptive Rounding for Post-Training Quantization](https://arxiv.org/abs/2004.10568) introduced
    """

    inputs: Inputs
    method: AbstractMethod
    rounds: int = eqx.field(static=True)
    damping: float = eqx.field(static=True)
    statistic: ClassVar[str | None] = "gram"
    vector_formats: ClassVar[tuple[type[AbstractFormat], ...]] = ()

    def __init__(
        self,
        inputs: Inputs = None,
        *,
        gram: Array | np.ndarray | None = None,
        method: AbstractMethod | None = None,
        rounds: int = 4,
        damping: float | int = 0.01,
    ) -> None:
        """**Arguments:**

        - `inputs`: the result of [`eqquant.calibrate.collect_stats`][] with `gram=True`; for one array, the statistics
            of its weight.
        - `gram`: in place of `inputs`, the mean of $x x^T$ for one array: `(*stack, features, features)`.
        - `method`: the method to start from, `eqq.GPTQ(method=eqq.MSE())` by default. If it needs inputs and has none,
            it takes these. A weight that is looked up is quantized as by `method`, unless the statistics were collected
            with `lookups=True`.
        - `rounds`: how often to go over all codes and all scales.
        - `damping`: a multiple of the mean of the diagonal, which is added to the diagonal of the Gram matrix.

        **Raises:**

        `ValueError` for other values, or with both `inputs` and `gram`. Quantizing raises `ValueError` if statistics
        are missing, not finite, or of another weight; the message names the leaf.
        """
        self.inputs = check_gram(inputs, gram, damping)
        if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
            raise ValueError(f"`rounds` must be a positive whole number. Got {rounds!r}.")
        self.method = GPTQ(method=MSE(), damping=damping) if method is None else method
        self.rounds, self.damping = rounds, float(damping)

    def quantize_rows(
        self, rows: Rows, format: AbstractFormat, *, key: PRNGKeyArray | None = None, chunk: int | None = None
    ) -> EncodedRows:
        if key is not None:
            raise ValueError("`key` must be None with LearnedRounding, which rounds to the best code. Got a key.")
        gram, method = get_gram(self.inputs), self.method
        if method.lacks_inputs():
            inputs = gram if method.statistic == "gram" else jnp.diagonal(gram, axis1=-2, axis2=-1)
            method = method.with_inputs(inputs)
        start = method.quantize_rows(rows, format, chunk=chunk)
        if rows.size == 0:  # nothing to move
            return start
        grid = load_grid(start.scale, start.zero_point, start.offset, format)
        prepare = lambda gram: damp(gram, self.damping)
        descend = lambda gram, columns, codes, grid: _descend(gram, columns, codes, grid, format, self.rounds)
        codes, scale = map_layers(prepare, descend, [gram], chunk, rows, start.codes, grid)
        scale_bits = scale_to_bits(scale, format.scale_dtype) if _fits(format) else start.scale
        return start._replace(codes=codes, scale=scale_bits)


def _fits(format: AbstractFormat) -> bool:
    """Whether the scale of each block can change alone."""
    return format.scale_format is None and not spans_rows(format)


def _descend(
    gram: Float32[Array, "length length"],
    columns: Float[Array, "length rows"],
    codes: UInt8[Array, "length rows"],
    grid: Grid,
    format: AbstractFormat,
    rounds: int,
) -> tuple[UInt8[Array, "length rows"], Float32[Array, "blocks rows"]]:
    """Returns codes and scales with a smaller error, or the given ones."""
    problem = _LeastSquares(gram, columns.astype(jnp.float32), format)
    start = codes, grid

    def improve(step: Index, state: tuple[Array, Grid]) -> tuple[Array, Grid]:
        codes, grid = state
        codes = problem.move_codes(codes, grid)
        if _fits(format):
            grid = jax.lax.cond(step < rounds, lambda: problem.fit_scales(codes, grid), lambda: grid)
        return codes, grid

    codes, grid = jax.lax.fori_loop(0, rounds + 1, improve, start)  # moves codes last, in the loop: it compiles once
    lower = problem.loss(codes, grid) < problem.loss(*start)  # never for a NaN
    return jnp.where(lower, codes, start[0]), jnp.where(lower, grid.stored_scale, start[1].stored_scale)


class _LeastSquares(eqx.Module):
    """The least squares problem of all rows.

    Arrays are transposed: `(length, rows)` and `(blocks, rows)`.
    """

    gram: Float32[Array, "length length"]
    wanted: Float32[Array, "length rows"]
    format: AbstractFormat

    @property
    def _size(self) -> int:
        return block_length(self.format.block_size, len(self.wanted))

    def _values(self, codes: Array, grid: Grid) -> Array:
        return decode_by(codes.T, jax.tree.map(jnp.transpose, grid), self.format).T

    def _slopes(self, codes: Array, grid: Grid) -> Array:
        """Returns half the derivatives of the error by each value."""
        return jnp.matmul(self.gram, self._values(codes, grid) - self.wanted, precision=HIGHEST)

    def loss(self, codes: Array, grid: Grid) -> Float32[Array, " rows"]:
        return jnp.sum((self._values(codes, grid) - self.wanted) * self._slopes(codes, grid), axis=0)

    def move_codes(self, codes: Array, grid: Grid) -> Array:
        """Moves the codes of one column after the other."""
        length, width = len(codes), min(WIDTH, len(codes))
        padded = -(-length // width) * width
        pad = lambda x: jnp.pad(x, [(0, padded - length)] + [(0, 0)] * (x.ndim - 1))
        gram = pad(pad(self.gram).T)
        block_index = jnp.arange(padded) // self._size

        def move_some(slopes: Array, x: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            first, codes, values = x
            reach = jax.lax.dynamic_slice_in_dim(gram, first, width, axis=1)
            within = jax.lax.dynamic_slice_in_dim(reach, first, width)
            start = jax.lax.dynamic_slice_in_dim(slopes, first, width)

            def move_one(n: Index, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
                slopes, codes, change = state
                curvature = within[n, n]
                levels = jax.tree.map(lambda x: x[block_index[first + n]][:, None], grid)
                best = values[n] - slopes[n] / jnp.where(curvature > 0, curvature, 1)
                code, _ = encode_by(best[:, None], levels, self.format)
                step = decode_by(code, levels, self.format)[:, 0] - values[n]
                step, moves = _falls(step, slopes[n], curvature)
                slopes = slopes + within[:, n][:, None] * step[None, :]
                codes = codes.at[n].set(jnp.where(moves, code[:, 0], codes[n]))
                return slopes, codes, change.at[n].set(step)

            _, codes, change = jax.lax.fori_loop(0, width, move_one, (start, codes, jnp.zeros_like(values)))
            return slopes + jnp.matmul(reach, change, precision=HIGHEST), codes

        in_parts = lambda x: pad(x).reshape(-1, width, x.shape[-1])
        starts = jnp.arange(0, padded, width)
        parts = starts, in_parts(codes), in_parts(self._values(codes, grid))
        _, found = jax.lax.scan(move_some, pad(self._slopes(codes, grid)), parts)
        return found.reshape(padded, -1)[:length]

    def fit_scales(self, codes: Array, grid: Grid) -> Grid:
        """Fits the scales of one block after the other."""
        size, (length, rows) = self._size, codes.shape
        blocks = len(grid.stored_scale)
        pad = lambda x: jnp.pad(x, [(0, blocks * size - length)] + [(0, 0)] * (x.ndim - 1))
        gram = pad(pad(self.gram).T)
        ones = jax.tree.map(jnp.ones_like, grid.stored_scale)
        levels = pad(self._values(codes, Grid(ones, ones, grid.zero_point)))

        def fit_one(slopes: Array, x: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            first, levels, old = x
            reach = jax.lax.dynamic_slice_in_dim(gram, first, size, axis=1)
            change = jnp.matmul(reach, levels, precision=HIGHEST)  # of slopes, for each unit of the scale
            own = lambda x: jax.lax.dynamic_slice_in_dim(x, first, size)
            slope, curvature = jnp.sum(levels * own(slopes), axis=0), jnp.sum(levels * own(change), axis=0)
            wanted = old - slope / jnp.where(curvature > 0, curvature, 1)
            dtype = self.format.scale_dtype
            new = bits_to_scale(scale_to_bits(wanted, dtype), dtype)
            usable = (new * jnp.sign(old) > 0) & jnp.isfinite(new)
            step, moves = _falls(jnp.where(usable, new - old, 0), slope, curvature)
            return slopes + change * step[None, :], jnp.where(moves, new, old)

        starts = jnp.arange(blocks) * size
        parts = starts, levels.reshape(blocks, size, rows), grid.stored_scale
        _, scale = jax.lax.scan(fit_one, pad(self._slopes(codes, grid)), parts)
        return grid._replace(scale=scale, stored_scale=scale)


def _falls(
    step: Float32[Array, " rows"], slope: Float32[Array, " rows"], curvature: Array
) -> tuple[Float32[Array, " rows"], Bool[Array, " rows"]]:
    """Returns steps of one variable, zero unless the error falls, and whether it does."""
    falls = step * (2 * slope + curvature * step) < 0
    return jnp.where(falls, step, 0), falls
