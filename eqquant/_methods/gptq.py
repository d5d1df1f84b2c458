"""GPTQ: rounds one column at a time, and corrects its error in what follows."""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, PRNGKeyArray, UInt8

from .._formats.base import AbstractFormat, AbstractSequenceFormat, Scales
from .._numerics.batching import Index, report_row
from .._numerics.blocks import block_length, dequantize_blocks, divide
from .absmax import AbsMax
from .base import AbstractMethod, AbstractScaleMethod
from .choose import Rows, ZeroPoints
from .gram import check_gram, get_gram, get_output_gram, HIGHEST, map_layers, WIDTH
from .grid import decode_by, encode_by, EncodedRows, Grid, store
from .statistics import Inputs


# How many rows are rounded together, where later rows make up for the errors of earlier ones.
ROWS = 32
# The damping of `output_gram`. Large: the Kronecker product of two Gram matrices only approximates the Hessian.
OUTPUT_DAMPING = 1.0


class GPTQ(AbstractMethod):
    r"""Chooses codes by the Gram matrix of the inputs, for a small error of the outputs.

    The error is $\operatorname{tr}\, (W - \hat W)\, G\, (W - \hat W)^T$, where $G$ is the mean of $x x^T$ over the
    inputs of the weight.

    Rounds one column after the other, and changes the columns still to come so that they make up for its error.
    `method` chooses the scales from the original weight, so columns may come in any order, and the array needs no
    `g_idx`. Works with every format whose codes stand for one value, and with [`eqquant.formats.Trellis`][]: there
    columns keep their order, and each path of the search makes up for its own errors.

    With the gradients of [`eqquant.calibrate.collect_stats`][] the error is that of the outputs of the model, about
    $\operatorname{tr}\, H (W - \hat W)\, G\, (W - \hat W)^T$, where $H$ is the `output_gram`. Then later rows make
    up for the errors of earlier ones too, as in YAQA.

    Columns whose input is always zero are rounded to the nearest code; in a trellis they count least. If the Gram
    matrix is singular even with its damping, the damping grows tenfold until it is not.

    !!! Example

        ```python
        stats = eqq.calibrate.collect_stats(model, batches, gram=True)
        model = eqq.quantize_tree(model, "int4", method=eqq.GPTQ(stats))
        q = eqq.quantize(w, "int4", method=eqq.GPTQ(gram=x.T @ x / len(x)))
        ```

    ??? cite

        [GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers](https://arxiv.org/abs/2210.17323)

        Gradients: [Model-Preserving Adaptive Rounding](https://arxiv.org/abs/2505.22988) (YAQA)
    """

    inputs: Inputs
    damping: float = eqx.field(static=True)
    order: str | None = eqx.field(static=True)
    method: AbstractScaleMethod
    statistic: ClassVar[str | None] = "gram"
    vector_formats: ClassVar[tuple[type[AbstractFormat], ...]] = (AbstractSequenceFormat,)

    def __init__(
        self,
        inputs: Inputs = None,
        *,
        gram: Array | np.ndarray | None = None,
        damping: float | int = 0.01,
        order: str | None = "activations",
        method: AbstractMethod | None = None,
    ) -> None:
        """**Arguments:**

        - `inputs`: the result of [`eqquant.calibrate.collect_stats`][] with `gram=True`; for one array, the statistics
            of its weight. A leaf that is looked up, such as an embedding, is quantized by `method` alone, unless they
            were collected with `lookups=True`.
        - `gram`: in place of `inputs`, the mean of $x x^T$ for one array: `(*stack, features, features)`. Any multiple
            of it gives the same codes.
        - `damping`: a multiple of the mean of the diagonal, which is added to the diagonal.
        - `order`: `"activations"` rounds columns with large inputs first, while most others can still make up for their
            errors; `None` rounds them in the order of the weight, as a trellis always is.
        - `method`: the method that chooses scales and zero points; [`eqquant.AbsMax`][] by default. For
            [`eqquant.MSE`][] the squared error of a column counts by the mean square of its input.

        **Raises:**

        `ValueError` for other values, or with both `inputs` and `gram`. Quantizing raises `ValueError` if statistics
        are missing, not finite, or of another weight; the message names the leaf.
        """
        self.inputs = check_gram(inputs, gram, damping)
        if order not in ("activations", None):
            raise ValueError(f'`order` must be "activations" or None. Got {order!r}.')
        method = AbsMax() if method is None else method
        if not isinstance(method, AbstractScaleMethod):
            raise TypeError(
                f"`method` of GPTQ must choose scales alone, such as `eqq.MSE()`. Got {method!r}: GPTQ finds the codes."
            )
        self.damping, self.order, self.method = float(damping), order, method

    def quantize_rows(
        self, rows: Rows, format: AbstractFormat, *, key: PRNGKeyArray | None = None, chunk: int | None = None
    ) -> EncodedRows:
        if key is not None:
            raise ValueError("`key` must be None with GPTQ, which rounds to the nearest code. Got a key.")
        if rows.shape[-1] == 0:  # no column to round
            return self.method.quantize_rows(rows, format, chunk=chunk)
        gram, outputs = get_gram(self.inputs), get_output_gram(self.inputs)
        grams = [gram] if outputs is None else [gram, outputs]
        scale, zero_point = self._choose_scales(rows, grams, format, chunk)
        scale_bits, offset_bits, grid = store(rows, scale, zero_point, format, chunk)
        order = None if isinstance(format, AbstractSequenceFormat) else self.order
        factorize = lambda gram: _factorize(gram, self.damping, order)
        if outputs is None:
            find = lambda factor, columns, grid: _find_codes(factor, columns, grid, format)
            codes = map_layers(factorize, find, grams, chunk, rows, grid)
        else:
            both = lambda gram, outputs: (factorize(gram), _factorize(outputs, OUTPUT_DAMPING, None))
            find = lambda factors, columns, grid: _find_by_rows(factors, columns, grid, format)
            codes = map_layers(both, find, grams, None, rows, grid)
        return EncodedRows(codes, scale_bits, grid.zero_point, offset_bits)

    def _choose_scales(
        self, rows: Rows, grams: Sequence[Array], format: AbstractFormat, chunk: int | None
    ) -> tuple[Scales, ZeroPoints]:
        method, gram = self.method, grams[0]
        if method.choose_weighted is not None and method.inputs is None:
            method = method.with_inputs(jnp.diagonal(gram, axis1=-2, axis2=-1))
        scale, zero_point = method.choose_for_rows(rows, format, chunk=chunk)
        # Under `jit` nothing has checked that the Gram matrices are finite. If they are not, scales become NaN.
        nan = sum((jnp.sum(x * 0, axis=(-2, -1)) for x in grams), jnp.zeros(()))
        return scale + nan.reshape(*nan.shape, *[1] * (scale.ndim - nan.ndim)), zero_point


class _Factor(NamedTuple):
    """The factor `U` of an inverse Gram matrix.

    Row `i` of `U` says how the following columns make up for an error of column `i`.

    - `order`: the columns of the weight in the order in which they are rounded, which is that of the columns of `U`.
    - `live`: which columns have inputs, in the order of the weight.
    """

    upper: Float32[Array, "length length"]
    order: Int[Array, " length"]
    live: Bool[Array, " length"]


def _factorize(gram: Float32[Array, "length length"], damping: float | int, order: str | None) -> _Factor:
    """Returns `U`, upper triangular with $U^T U = G^{-1}$, where `G` is the damped Gram matrix."""
    length = gram.shape[-1]
    diagonal = jnp.diagonal(gram)
    live = diagonal > 0
    mean = jnp.sum(diagonal) / jnp.maximum(jnp.sum(live.astype(jnp.float32)), 1)
    gram = gram / jnp.where(mean > 0, mean, 1)
    gram = jnp.where(live[:, None] & live[None, :], gram, 0) + jnp.diag(jnp.where(live, 0.0, 1.0))
    columns = jnp.arange(length)
    if order == "activations":
        columns = jnp.argsort(-jnp.diagonal(gram), stable=True)
        gram = gram[columns][:, columns]
    eye = jnp.eye(length, dtype=jnp.float32)

    def invert(damping: Array) -> Array:
        # The Cholesky factor of the reversed matrix, reversed, is upper triangular, and its inverse is `U`: no inverse
        # of `G` is needed.
        reverse = jnp.linalg.cholesky((gram + damping * eye)[::-1, ::-1])[::-1, ::-1]
        return jax.scipy.linalg.solve_triangular(reverse, eye, lower=False)

    def grow(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tries, damping, _ = state
        return tries + 1, jnp.maximum(10 * damping, 1e-6), invert(damping)

    singular = lambda state: (state[0] < 10) & ~jnp.isfinite(state[2]).all()
    start = (jnp.asarray(0, jnp.int32), jnp.asarray(damping, jnp.float32), jnp.full_like(eye, jnp.nan))
    return _Factor(jax.lax.while_loop(singular, grow, start)[2], columns, live)


def _find_by_rows(
    factors: tuple[_Factor, _Factor],
    columns: Float[Array, "length rows"],
    grid: Grid,
    format: AbstractFormat,
) -> UInt8[Array, "codes rows"]:
    """Returns the codes of all rows, `ROWS` at a time: later rows make up for their errors.

    `errors` are those of the rows so far, as in `_find_scalar_codes`.
    """
    (inputs, outputs), count = factors, columns.shape[-1]
    padding = -count % ROWS
    pad = lambda x: jnp.pad(x, ((0, 0), (0, padding)))
    columns, grid = pad(columns.astype(jnp.float32)), jax.tree.map(pad, grid)
    upper = _pad_with_identity(outputs.upper, padding)

    def find_some(errors: Array, first: Index) -> tuple[Array, Array]:
        report_row(first, count)
        part = lambda x: jax.lax.dynamic_slice_in_dim(x, first, ROWS, axis=1)
        above, levels = part(upper), jax.tree.map(part, grid)
        corrected = part(columns) - jnp.matmul(errors, above, precision=HIGHEST)
        codes = _find_codes(inputs, corrected, levels, format)
        error = corrected - _decode(codes, len(columns), levels, format)
        error = jnp.where(jnp.isfinite(error), error, 0)  # a row that is not finite makes no other row NaN
        within = jax.lax.dynamic_slice_in_dim(above, first, ROWS)
        own = jax.scipy.linalg.solve_triangular(within.T, error.T, lower=True).T
        return jax.lax.dynamic_update_slice_in_dim(errors, own, first, axis=1), codes

    starts = jnp.arange((count + padding) // ROWS) * ROWS
    _, codes = jax.lax.scan(find_some, jnp.zeros_like(columns), starts)
    return jnp.moveaxis(codes, 0, 1).reshape(codes.shape[1], -1)[:, :count]


def _pad_with_identity(upper: Float32[Array, "length length"], padding: int) -> Float32[Array, "padded padded"]:
    """Returns a factor with `padding` more columns, which depend on no other."""
    length = len(upper) + padding
    return jnp.pad(upper, (0, padding)) + jnp.diag((jnp.arange(length) >= length - padding).astype(jnp.float32))


def _decode(
    codes: UInt8[Array, "codes rows"], length: int, grid: Grid, format: AbstractFormat
) -> Float32[Array, "length rows"]:
    """Returns the values of codes, packed ones for a sequence format."""
    grid = jax.tree.map(lambda x: x.T, grid)
    if not isinstance(format, AbstractSequenceFormat):
        return decode_by(codes.T, grid, format).T
    return dequantize_blocks(format.decode_row(codes.T, length), grid.stored_scale, None, None, format.block_size).T


def _find_codes(
    factor: _Factor, columns: Float[Array, "length rows"], grid: Grid, format: AbstractFormat
) -> UInt8[Array, "codes rows"]:
    """Returns the codes of rows, each row alone; packed for a sequence format."""
    if isinstance(format, AbstractSequenceFormat):
        return _find_sequences(factor, columns, grid, format)
    return _find_scalar_codes(factor, columns, grid, format)


def _find_scalar_codes(
    factor: _Factor,
    columns: Float[Array, "length rows"],
    grid: Grid,
    format: AbstractFormat,
) -> UInt8[Array, "length rows"]:
    """Returns the codes of values, found column by column in the order of the factor.

    `errors[i]` is the error of column `i` divided by `U[i, i]`, or zero until that column is rounded. So `U.T @ errors`
    is what to subtract from the columns to come.
    """
    (upper, order, _), length = factor, len(columns)
    width = min(WIDTH, length)
    steps = -(-length // width)
    padding = steps * width - length
    size = block_length(format.block_size, length)
    # Columns of padding are zeros, and no other column depends on them.
    columns = jnp.pad(columns.astype(jnp.float32)[order], ((0, padding), (0, 0)))
    block_index = jnp.pad(order // size, (0, padding))
    upper = _pad_with_identity(upper, padding)

    def round_columns(errors: Array, first: Array) -> tuple[Array, Array]:
        above = jax.lax.dynamic_slice_in_dim(upper, first, width, axis=1)
        change = jnp.matmul(above.T, errors, precision=HIGHEST)
        corrected = jax.lax.dynamic_slice_in_dim(columns, first, width) - change
        within = jax.lax.dynamic_slice_in_dim(above, first, width)
        blocks = jax.lax.dynamic_slice_in_dim(block_index, first, width)

        def round_one(n: Index, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            corrected, codes, errors = state
            levels = jax.tree.map(lambda x: x[blocks[n]][:, None], grid)
            value = corrected[n][:, None]
            code, _ = encode_by(value, levels, format)
            rounded = decode_by(code, levels, format)
            error = (value - rounded)[:, 0] / within[n, n]
            corrected = corrected - within[n][:, None] * error[None, :]
            return corrected, codes.at[n].set(code[:, 0]), errors.at[n].set(error)

        state = (corrected, jnp.zeros(corrected.shape, jnp.uint8), jnp.zeros_like(corrected))
        _, codes, own = jax.lax.fori_loop(0, width, round_one, state)
        return jax.lax.dynamic_update_slice_in_dim(errors, own, first, axis=0), codes

    _, codes = jax.lax.scan(round_columns, jnp.zeros_like(columns), jnp.arange(steps) * width)
    codes = codes.reshape(steps * width, -1)[:length]
    return jnp.zeros_like(codes).at[order].set(codes)


def _find_sequences(
    factor: _Factor,
    columns: Float[Array, "length rows"],
    grid: Grid,
    format: AbstractSequenceFormat,
) -> UInt8[Array, "bytes rows"]:
    """Returns packed codes, found segment by segment in the order of the weight.

    The search makes up for errors within a segment. `errors` are as in `_find_scalar_codes`.
    """
    (upper, _, live), columns = factor, columns.astype(jnp.float32)
    length, segment = len(columns), format.segment
    size = block_length(format.block_size, length)

    def encode_columns(errors: Array, first: Index, count: int) -> tuple[Array, Array]:
        above = jax.lax.dynamic_slice_in_dim(upper, first, count, axis=1)
        change = jnp.matmul(above.T, errors, precision=HIGHEST)
        corrected = jax.lax.dynamic_slice_in_dim(columns, first, count) - change
        within = jax.lax.dynamic_slice_in_dim(above, first, count)
        diagonal = jnp.diagonal(within)
        scale = grid.stored_scale[first // size]
        units = divide(corrected, jnp.broadcast_to(scale[None, :], corrected.shape))
        # `U[i, i] ** -2` is the cost of an error of column `i` after all that later columns make up for.
        weights = jnp.square(jnp.min(diagonal) / diagonal)
        is_live = jax.lax.dynamic_slice_in_dim(live, first, count)
        least = jnp.min(weights, where=is_live, initial=1.0)  # a column without inputs counts no more than any other
        weights = jnp.broadcast_to(jnp.where(is_live, weights, least)[None, :], units.T.shape)
        packed = format.encode_row(units.T, weights, jnp.triu(within, 1) / diagonal[:, None])
        rounded = format.decode_row(packed, count).T * scale[None, :]
        own = jax.scipy.linalg.solve_triangular(within.T, corrected - rounded, lower=True)
        return jax.lax.dynamic_update_slice_in_dim(errors, own, first, axis=0), packed.T

    count, rest = divmod(length, segment)
    errors, codes = jnp.zeros_like(columns), []
    if count > 0:
        starts = jnp.arange(count) * segment
        errors, whole = jax.lax.scan(lambda errors, first: encode_columns(errors, first, segment), errors, starts)
        codes.append(whole.reshape(-1, columns.shape[1]))
    if rest > 0:
        codes.append(encode_columns(errors, count * segment, rest)[1])
    return jnp.concatenate(codes)
