"""Generates weights to test formats on: random ones from keys, and sequences that other languages can reproduce."""

from collections.abc import Iterator

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Float32, PRNGKeyArray


Real = float | int


def gaussian_weights(
    key: PRNGKeyArray, shape: tuple[int, ...], mean: Real = 0.0, std: Real = 1.0
) -> Float32[Array, "..."]:
    """Draws normally distributed values.

    !!! Example

        ```python
        w = eqq.analysis.gaussian_weights(jr.key(0), (256, 256))
        ```

    **Arguments:**

    - `key`: a key.
    - `shape`: the shape.
    - `mean`: their mean.
    - `std`: their standard deviation.

    **Returns:**

    A float32 array.
    """
    return mean + std * jr.normal(key, shape, jnp.float32)


def uniform_weights(
    key: PRNGKeyArray, shape: tuple[int, ...], low: Real = -1.0, high: Real = 1.0
) -> Float32[Array, "..."]:
    """Draws uniformly distributed values.

    !!! Example

        ```python
        w = eqq.analysis.uniform_weights(jr.key(0), (256, 256))
        ```

    **Arguments:**

    - `key`: a key.
    - `shape`: the shape.
    - `low`: the smallest value.
    - `high`: the largest value.

    **Returns:**

    A float32 array.
    """
    return jr.uniform(key, shape, jnp.float32, low, high)


def outlier_weights(
    key: PRNGKeyArray, shape: tuple[int, ...], rate: Real = 0.01, magnitude: Real = 10.0
) -> Float32[Array, "..."]:
    """Draws normally distributed values, and replaces a share of them by outliers of one magnitude and either sign.

    !!! Example

        ```python
        w = eqq.analysis.outlier_weights(jr.key(0), (256, 256), rate=0.001)
        ```

    **Arguments:**

    - `key`: a key.
    - `shape`: the shape.
    - `rate`: the probability of an outlier.
    - `magnitude`: the magnitude of an outlier.

    **Returns:**

    A float32 array.
    """
    values, places, signs = jr.split(key, 3)
    outlier = magnitude * jr.rademacher(signs, shape, jnp.float32)
    return jnp.where(jr.bernoulli(places, rate, shape), outlier, jr.normal(values, shape, jnp.float32))


def student_weights(key: PRNGKeyArray, shape: tuple[int, ...], degrees: Real = 3.0) -> Float32[Array, "..."]:
    """Draws values of Student's t distribution, with heavy tails like the weights of trained models.

    !!! Example

        ```python
        w = eqq.analysis.student_weights(jr.key(0), (256, 256))
        ```

    **Arguments:**

    - `key`: a key.
    - `shape`: the shape.
    - `degrees`: the degrees of freedom. Fewer give heavier tails; must be above 2, so that the variance is finite.

    **Returns:**

    A float32 array.

    **Raises:**

    `ValueError` if `degrees` is not above 2.
    """
    if not degrees > 2:
        raise ValueError(f"`degrees` must be above 2. Got {degrees}. With fewer the variance is infinite.")
    return jr.t(key, degrees, shape, jnp.float32)


def channel_weights(key: PRNGKeyArray, shape: tuple[int, int], spread: Real = 5.0) -> Float32[Array, "channels size"]:
    """Draws normally distributed channels, whose standard deviations grow evenly from 1 to almost `1 + spread`.

    !!! Example

        ```python
        w = eqq.analysis.channel_weights(jr.key(0), (16, 256))
        ```

    **Arguments:**

    - `key`: a key.
    - `shape`: the number of channels, and their length.
    - `spread`: the range of the standard deviations.

    **Returns:**

    A float32 array with a channel in each row.
    """
    std = 1 + spread * jnp.arange(shape[0], dtype=jnp.float32) / shape[0]
    return std[:, None] * jr.normal(key, shape, jnp.float32)


def lcg_gaussian(size: int, mean: Real = 0.0, std: Real = 1.0, *, seed: int) -> Float[np.ndarray, " size"]:
    r"""Generates normally distributed values that a few lines in any language reproduce, up to the rounding of `log`
    and `cos`.

    The state starts at `seed` and follows $s \leftarrow (1103515245\, s + 12345) \bmod 2^{31}$, with
    $u = s / 2^{31}$. Two draws give a value: $\sqrt{-2 \ln u_1} \cos 2 \pi u_2$, in float32.

    !!! Example

        ```python
        w = eqq.analysis.lcg_gaussian(1000, seed=42)
        ```

    **Arguments:**

    - `size`: the number of values.
    - `mean`: their mean.
    - `std`: their standard deviation.
    - `seed`: the first state.

    **Returns:**

    A float32 array.

    ??? cite

        [A Note on the Generation of Random Normal Deviates](https://doi.org/10.1214/aoms/1177706645)
    """
    u = _Lcg(seed).uniform(2 * size)
    radius = np.sqrt(-2 * np.log(np.maximum(u[0::2], np.float32(1e-10))))
    return np.float32(mean) + np.float32(std) * (radius * np.cos(np.float32(2 * np.pi) * u[1::2]))


def lcg_uniform(size: int, low: Real = -1.0, high: Real = 1.0, *, seed: int) -> Float[np.ndarray, " size"]:
    """Generates uniformly distributed values with the generator of [`eqquant.analysis.lcg_gaussian`][].

    !!! Example

        ```python
        w = eqq.analysis.lcg_uniform(1000, seed=43)
        ```

    **Arguments:**

    - `size`: the number of values.
    - `low`: the smallest value.
    - `high`: the largest value.
    - `seed`: the first state.

    **Returns:**

    A float32 array.
    """
    return np.float32(low) + _Lcg(seed).uniform(size) * np.float32(high - low)


def lcg_outliers(size: int, rate: Real = 0.01, magnitude: Real = 10.0, *, seed: int) -> Float[np.ndarray, " size"]:
    """Generates normal values with outliers, with the generator of [`eqquant.analysis.lcg_gaussian`][].

    A second sequence, from `seed + 12345` on, gives the index and the sign of each outlier: plus if the state is even.

    !!! Example

        ```python
        w = eqq.analysis.lcg_outliers(1000, seed=44)
        ```

    **Arguments:**

    - `size`: the number of values.
    - `rate`: the share of outliers.
    - `magnitude`: the magnitude of an outlier.
    - `seed`: the first state.

    **Returns:**

    A float32 array.
    """
    values, states = lcg_gaussian(size, seed=seed), _Lcg(seed + 12345)
    for _ in range(int(size * rate)):
        place = next(states) % size
        values[place] = magnitude if next(states) % 2 == 0 else -magnitude
    return values


def lcg_channels(channels: int, size: int, spread: Real = 5.0, *, seed: int) -> Float[np.ndarray, "channels size"]:
    """Generates channels of growing spread with the generator of [`eqquant.analysis.lcg_gaussian`][]. The states of
    a first sequence, from `seed` on, seed the channels.

    !!! Example

        ```python
        w = eqq.analysis.lcg_channels(16, 64, seed=45)
        ```

    **Arguments:**

    - `channels`: the number of channels.
    - `size`: their length.
    - `spread`: the range of the standard deviations, which grow evenly from 1 to almost `1 + spread`.
    - `seed`: the first state.

    **Returns:**

    A float32 array with a channel in each row.
    """
    seeds = _Lcg(seed)
    return np.stack([lcg_gaussian(size, 0.0, 1 + c / channels * spread, seed=next(seeds)) for c in range(channels)])


def lcg_student(size: int, degrees: int = 3, *, seed: int) -> Float[np.ndarray, " size"]:
    r"""Generates values of Student's t distribution with the generator of [`eqquant.analysis.lcg_gaussian`][].

    Generates `size` normal values $z$, then `size` more for each degree of freedom, $z_1$ to $z_d$, and returns
    $z / \sqrt{(z_1^2 + \ldots + z_d^2) / d}$.

    !!! Example

        ```python
        w = eqq.analysis.lcg_student(1000, seed=46)
        ```

    **Arguments:**

    - `size`: the number of values.
    - `degrees`: the degrees of freedom.
    - `seed`: the first state.

    **Returns:**

    A float32 array.
    """
    z = lcg_gaussian((1 + degrees) * size, seed=seed).reshape(1 + degrees, size)
    return z[0] / np.sqrt(np.mean(z[1:] ** 2, axis=0))


class _Lcg(Iterator[int]):
    """The states of a linear congruential generator."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def __next__(self) -> int:
        self.state = (1103515245 * self.state + 12345) % 2**31
        return self.state

    def uniform(self, size: int) -> Float[np.ndarray, " size"]:
        return np.array([next(self) for _ in range(size)]).astype(np.float32) / np.float32(2**31)
