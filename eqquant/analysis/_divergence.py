"""Compares the outputs of two models on the same batch."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from rich.table import Table

from .._report import Report, report_table
from .._tree.batches import as_apply
from .._types import PyTree
from ._error import measure_error
from ._plots import Axes, draw_histogram
from ._sensitivity import check_batch


@dataclasses.dataclass(frozen=True, repr=False)
class DivergenceReport(Report):
    """The difference between the outputs of a quantized model and of the float model.

    `kl` is the mean Kullback-Leibler divergence of the softmax of the outputs, in nats; `top1` the share of outputs
    with the largest entry at the same index; `cosine` the mean cosine similarity. `kls` and `cosines` hold the values
    of each output vector.
    """

    outputs: int
    kl: float
    kl_worst: float
    top1: float
    cosine: float
    cosine_worst: float
    relative_l2: float
    kls: np.ndarray = dataclasses.field(repr=False, compare=False)
    cosines: np.ndarray = dataclasses.field(repr=False, compare=False)

    def __rich__(self) -> Table:
        table = report_table("outputs", "mean", "worst")
        table.add_row("KL divergence, nats", f"{self.kl:.4e}", f"{self.kl_worst:.4e}")
        table.add_row("cosine", f"{self.cosine:.6f}", f"{self.cosine_worst:.6f}")
        table.add_row("same largest entry", f"{self.top1:.2%}", "")
        table.add_row("relative error (L2)", f"{self.relative_l2:.4f}", "")
        table.add_section()
        table.add_row("how many", f"{self.outputs:,}", "")
        return table

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plots the histogram of the cosines, with a line at the mean. Returns Matplotlib's axes."""
        title = f"How alike the outputs are: {self.outputs:,} of them"
        labels = (title, "outputs", "mean", "cosine with the output of the float model")
        return draw_histogram(ax, self.cosines, np.array([self.cosine]), labels)


def output_divergence(
    model: PyTree, quantized: PyTree, batch: PyTree, *, apply: Callable[[PyTree, PyTree], Array] | None = None
) -> DivergenceReport:
    """Returns the divergence between the outputs of two models on one batch.

    !!! Example

        ```python
        report = eqq.analysis.output_divergence(model, eqq.quantize_tree(model, "nf4"), x)
        report.kl, report.top1, report.cosine
        ```

    **Arguments:**

    - `model`: the float model.
    - `quantized`: the model to compare with it.
    - `batch`: the inputs: any pytree of arrays, with examples along the first axis.
    - `apply`: a function `(model, batch) -> array`, whose last axis holds logits or features. It runs under
        `equinox.filter_jit`. By default, `jax.vmap(model)(batch)`.

    **Returns:**

    A report, which prints as a table. It has

    - `kl`, `kl_worst`: the mean and the largest Kullback-Leibler divergence of the softmax of the outputs, in nats.
    - `top1`: the share of outputs whose largest entry is at the same index, from 0 to 1.
    - `cosine`, `cosine_worst`: the mean and the smallest cosine of the outputs.
    - `relative_l2`: the norm of the difference over the norm of the outputs.
    - `outputs`: the number of output vectors; `kls`, `cosines`: the values of each, float64 `(outputs,)`.
    - `.plot(ax=None)`: draws the histogram of the cosines; returns Matplotlib's axes.
    - `.to_dict()`, `.to_json(indent=None)`: the numbers as plain Python, and as JSON.

    **Raises:**

    `ValueError` if the batch is empty, or if the outputs are scalars, differ in shape or are not finite.
    """
    check_batch(batch)
    run = eqx.filter_jit(as_apply(apply))
    expected, actual = run(model, batch), run(quantized, batch)
    if expected.ndim == 0 or expected.shape != actual.shape or expected.size == 0:
        raise ValueError(
            "`apply` must return arrays of one shape, whose last axis holds logits or features. Got shapes "
            f"{expected.shape} and {actual.shape}."
        )
    for name, y in (("model", expected), ("quantized", actual)):
        if not jnp.isfinite(y).all():
            raise ValueError(
                f"The outputs must be finite. Got {int((~jnp.isfinite(y)).sum())} of `{name}` that are not."
            )
    kls, cosines, same = (np.asarray(a, np.float64) for a in _compare_outputs(expected, actual))
    return DivergenceReport(
        outputs=kls.size,
        kl=float(kls.mean()),
        kl_worst=float(kls.max()),
        top1=float(same.mean()),
        cosine=float(cosines.mean()),
        cosine_worst=float(cosines.min()),
        relative_l2=measure_error(np.asarray(expected), np.asarray(actual), ("`model`", "`quantized`")).relative_l2,
        kls=kls,
        cosines=cosines,
    )


@jax.jit
def _compare_outputs(
    expected: Float[Array, "*batch features"], actual: Float[Array, "*batch features"]
) -> tuple[Float[Array, " outputs"], Float[Array, " outputs"], Array]:
    a, b = (y.reshape(-1, y.shape[-1]).astype(jnp.float32) for y in (expected, actual))
    log_p, log_q = jax.nn.log_softmax(a), jax.nn.log_softmax(b)
    # The divergence is not negative, but rounding errors may make it so.
    kl = jnp.maximum(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1), 0)
    # Normalize first, so that no square overflows or underflows. The cosine of two zero vectors is defined as 1.
    a, b = (y / jnp.where((m := jnp.abs(y).max(axis=-1, keepdims=True)) > 0, m, 1) for y in (a, b))
    norms = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    both_zero = (~(a.any(axis=-1) | b.any(axis=-1))).astype(jnp.float32)
    cosine = jnp.where(norms > 0, jnp.sum(a * b, axis=-1) / jnp.where(norms > 0, norms, 1), both_zero)
    return kl, cosine, jnp.argmax(log_p, axis=-1) == jnp.argmax(log_q, axis=-1)
