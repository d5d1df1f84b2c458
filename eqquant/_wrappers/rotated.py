"""An array whose inputs are rotated first, so that none of them is large."""

import equinox as eqx
from jaxtyping import Array, Float

from .._numerics.hadamard import rotate
from .._types import PyTree
from .mapped import AbstractMappedArray


class RotatedArray(AbstractMappedArray):
    r"""An array $W = V R$ with an orthogonal $R$, stored as $V$. Products compute $V (R x)$.

    $R$ is a randomized Hadamard transform: random signs, then a matrix whose entries all have about the same magnitude.
    So an input or a weight that is far larger than others spreads over all of them. Computing $R x$ takes
    $O(K \log K)$ operations for $K$ inputs, in float32; and $O(K p)$ more for an odd prime factor $p$ of $K$ that is
    part of no Hadamard matrix. [`eqquant.transforms.rotate`][] makes it.

    Arrays with the same inputs and the same seed rotate them the same way, and XLA computes that once.

    !!! Example

        ```python
        w = RotatedArray.of(dense)
        y = w @ x                           # w.array @ (R @ x), which is dense @ x up to rounding
        ```

    **Arguments:**

    - `array`: $V$, quantized or not.
    - `seed`: the seed of the random signs. It is static, so the only leaves are the leaves of $V$.
    - `axis`: the axis of the inputs, -1 or -2.
    """

    array: PyTree
    seed: int = eqx.field(static=True, default=0)
    axis: int = eqx.field(static=True, default=-1)

    @classmethod
    def of(cls, w: Float[Array, "..."], seed: int = 0, axis: int = -1) -> "RotatedArray":
        """Rotates a dense array: `dequantize` returns it again, up to rounding.

        **Arguments:**

        - `w`: floats, of two or more dimensions.
        - `seed`, `axis`: as for the class.

        **Returns:**

        A `RotatedArray` of floats.
        """
        return cls(rotate(w, axis, seed), seed, axis)

    def map_inputs(self, x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
        return rotate(x, axis, self.seed)

    def map_back(self, x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
        return rotate(x, axis, self.seed, back=True)
