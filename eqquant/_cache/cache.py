"""`QuantizedCache`: the keys and values of attention, quantized as they come."""

import dataclasses
import functools as ft
import math

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, ArrayLike, DTypeLike, Float, Int, Int32, Integer

from .._array.array import is_quantized, QuantizedArray
from .._formats.base import AbstractFormat, check_no_tiles, segment_length
from .._formats.names import as_format
from .._mesh import full_spec, place
from .._numerics import hadamard
from .._numerics.batching import vmap_leading
from .attention import attend_by_xla, bind_attention, EMPTY_POSITION, nan_without_room
from .write import (
    append_to_window,
    MaybeQuantized,
    quantized_zeros,
    read_window,
    slice_tokens,
    write_rows,
    write_tokens,
)


_INT32 = np.iinfo(np.int32)
_SEED = 0  # of the rotation of each head


class QuantizedCache(eqx.Module):
    """The keys and values of all tokens so far, in a few bits each: a KV cache.

    New tokens do not change the codes of old ones.

    !!! Example

        ```python
        cache = eqq.QuantizedCache.empty((heads, context, size), "int8")

        @eqx.filter_jit(donate="all")
        def step(cache, q, k, v):                     # each (heads, new tokens, size)
            positions = cache.length + jnp.arange(q.shape[1])
            cache = cache.append(k, v)
            return cache.attend(q, positions), cache
        ```

    `attend` reads packed keys and values, and makes no dense copy. `scores` and `weighted_values` are its two products,
    for other masks. `append` writes at a traced position, so the cache can be a carry of `scan`, maps under `vmap`, and
    with donation is updated in place. Leading axes of the shape are batch axes: each row of the batch has its own
    length.

    Scales are per token and head. With `per_channel`, scales of keys are per channel of a head, in groups of tokens,
    because in many models a few channels of the keys are much larger than the others. Then tokens wait in a float
    window until their group is full, as in [KIVI](https://arxiv.org/abs/2402.02750).

    With `rotate`, a Hadamard transform spreads large channels over the head, of keys and of values. Queries are rotated
    too, and results back, so attention is the same but for rounding: four bits then need no float window.

    - `keys`, `values`: [`eqquant.QuantizedArray`][]s, or floats, both of shape `(*batch, heads, context, size)`.
    - `recent`: the keys and the values of the tokens from `length // window * window` on, floats of shape
        `(*batch, heads, window, size)`; `None` without a window. The context is a multiple of `window`.
    - `length`: how many tokens each row of the batch holds: int32 `(*batch,)`. Change it by `truncate`, which changes
        `recent` with it.
    - `start`: of a ring, the position of the earliest token that each row holds after the sinks: int32 `(*batch,)`.
        `None` if all tokens are held.
    - `sinks`: how many of the first tokens a ring keeps.
    - `rotated`: whether `keys`, `values` and `recent` hold rotated heads.

    Methods raise a `ValueError` if the fields have other shapes or dtypes. Values are not checked.
    """

    keys: Float[MaybeQuantized, "*batch heads context size"]
    values: Float[MaybeQuantized, "*batch heads context size"]
    recent: tuple[Float[Array, "*batch heads window size"], Float[Array, "*batch heads window size"]] | None
    length: Int[Array, "*batch"]
    start: Int[Array, "*batch"] | None = None
    sinks: int = eqx.field(static=True, default=0)
    rotated: bool = eqx.field(static=True, default=False)

    @staticmethod
    def empty(
        shape: tuple[int, ...],
        keys: AbstractFormat | str | None,
        values: AbstractFormat | str | None = None,
        *,
        rotate: bool = False,
        ring: int | None = None,
        sinks: int = 0,
        per_channel: bool = False,
        window: int | None = None,
        dtype: DTypeLike = jnp.float32,
    ) -> "QuantizedCache":
        """Makes a cache without tokens.

        **Arguments:**

        - `shape`: `(*batch, heads, context, size)`: heads of keys, the most tokens, and channels of each head.
        - `keys`: the format of the keys, or its name; `None` for floats.
        - `values`: the format of the values; by default the format of the keys.
        - `rotate`: whether heads are rotated by a Hadamard transform. For four bits and fewer.
        - `ring`: how many of the newest tokens are kept, for layers with a sliding window; where the context is longer,
            new tokens take the places of the oldest, and the text may be of any length.
        - `sinks`: how many of the first tokens a ring keeps besides, which every token sees.
        - `per_channel`: whether scales of keys are per channel in groups of tokens, instead of per token. For four bits
            and fewer. The groups are the blocks of the format.
        - `window`: how many tokens are quantized together. Until the window is full they are floats, so the newest 0 to
            `window - 1` tokens are floats. `0`, the default, quantizes each token at once. With `per_channel` the
            default is the fewest tokens that can be packed, 128 for four bits; and floats alone, where that takes more
            memory than they do. The context is rounded up to whole windows.
        - `dtype`: the dtype of floats, and of dequantized keys and values.

        **Returns:**

        A `QuantizedCache`.

        **Raises:**

        `ValueError` if the shape has fewer than three axes, if the window does not hold whole blocks of the keys, if a
        format has no blocks of tokens, or for a ring with a float window. `TypeError` if a size is no whole number, a
        format no format, or `dtype` not of floats.
        """
        shape = _check_shape(shape)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"`dtype` must be of floats. Got {jnp.dtype(dtype)}. `keys` and `values` are the formats.")
        key_format = None if keys is None else check_no_tiles(as_format(keys, "keys"), "keys")
        value_format = key_format if values is None else check_no_tiles(as_format(values, "values"), "values")
        for name, number in (("window", window), ("ring", ring), ("sinks", sinks)):
            if number is not None and not _is_integer(number):
                raise TypeError(f"`{name}` must be a whole number. Got {number!r}.")
        if sinks < 0 or (ring is None and sinks) or (ring is not None and ring < 1):
            raise ValueError(f"`ring` must be at least 1, and `sinks` of a ring at least 0. Got {ring} and {sinks}.")
        if ring is not None and (per_channel or window):
            raise ValueError(
                "`ring` must quantize each token at once. Got `per_channel` or a `window`, whose tokens share scales. "
                "Set `rotate=True` instead."
            )
        if per_channel:
            least = _min_window(key_format)
            if window is None:
                make = ft.partial(QuantizedCache.empty, shape, dtype=dtype)
                quantized = ft.partial(make, keys, values, rotate=rotate, per_channel=True, window=least)
                return min(quantized, ft.partial(make, None), key=lambda make: jax.eval_shape(make).nbytes)()
            if window < 1 or window % least:
                raise ValueError(f"`window` must be a multiple of {least}, for {key_format} per channel. Got {window}.")
        window = window or 0
        if window < 0:
            raise ValueError(f"`window` must not be negative. Got {window}.")
        *batch, heads, context, size = shape
        context = -(-context // window) * window if window else context
        start = None
        if ring is not None and ring + sinks < context:
            context, start = ring + sinks, jnp.zeros(tuple(batch), jnp.int32)
        # Fields do not share arrays, because no memory may be donated twice.
        zeros = lambda format, axis=-1: quantized_zeros((*batch, heads, context, size), dtype, format, axis)
        new_window = lambda: jnp.zeros((*batch, heads, window, size), dtype)
        return QuantizedCache(
            zeros(key_format, -2 if per_channel else -1),
            zeros(value_format),
            (new_window(), new_window()) if window else None,
            jnp.zeros(tuple(batch), jnp.int32),
            start,
            int(sinks),
            bool(rotate),
        )

    @property
    def context(self) -> int:
        """How many tokens fit, or how many a ring holds."""
        return self.values.shape[-2]

    @property
    def ring(self) -> int:
        """How many of the newest tokens are held; 0 if all are."""
        return 0 if self.start is None else self.context - self.sinks

    @property
    def window(self) -> int:
        """How many tokens are quantized together; 0 if each is quantized at once."""
        return 0 if self.recent is None else self.recent[0].shape[-2]

    @property
    def nbytes(self) -> int:
        """The stored bytes."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jtu.tree_leaves(self))

    @property
    def positions(self) -> Int[Array, "*batch 1 places"]:
        """The position in the text of each place of `scores`; for empty places the largest integer.

        The axis of length one is for queries: `cache.positions <= at[..., None]` is the causal mask of tokens at
        positions `at`.
        """
        packed, length = self._arange(self.context), self.length[..., None]
        if self.start is not None:
            at = _positions_in_ring(self, packed)
            held = (at < length) & ((packed < self.sinks) | (at >= jnp.maximum(self.start, self.sinks)[..., None]))
            return jnp.where(held, at, EMPTY_POSITION)[..., None, :]
        if not self.window:
            return jnp.where(packed < length, packed, EMPTY_POSITION)[..., None, :]
        whole = length // self.window * self.window
        newest = whole + self._arange(self.window)
        places = [
            jnp.where(packed < whole, packed, EMPTY_POSITION),
            jnp.where(newest < length, newest, EMPTY_POSITION),
        ]
        return jnp.concatenate(places, axis=-1)[..., None, :]

    def append(
        self,
        keys: Float[Array, "*batch heads new size"],
        values: Float[Array, "*batch heads new size"],
        count: Int[Array, "*batch"] | int | None = None,
    ) -> "QuantizedCache":
        """Adds the keys and values of new tokens.

        **Arguments:**

        - `keys`, `values`: floats.
        - `count`: how many of the new tokens are text; the rest is padding, which is never seen. By default all.

        **Returns:**

        The cache with `length + count` tokens.

        **Raises:**

        `ValueError` for other shapes, and, outside `jit`, for another `count` or if there is no room; a ring always has
        room. Inside `jit` lengths are not known, and tokens without room are dropped: attention of such a row is NaN.
        """
        self._check_fields()
        expected = (*self.values.shape[:-2], keys.shape[-2], self.values.shape[-1])
        if keys.shape != expected or values.shape != expected:
            raise ValueError(
                f"`keys` and `values` must be (*batch, heads, new, size), here {expected}. Got {keys.shape} and "
                f"{values.shape}."
            )
        new = keys.shape[-2]
        if count is not None:
            keys, values, count = _mask_padding(keys, values, count)
        added = jnp.asarray(new if count is None else count, jnp.int32)
        length = self.length + jnp.broadcast_to(added, self.length.shape)
        keys, values = self._rotate(keys), self._rotate(values)
        unknown = isinstance(length, jax.core.Tracer)
        if self.start is None and not unknown and (most := int(jnp.max(length))) > self.context:
            raise ValueError(f"The cache has room for {self.context} tokens. Got {most}.")
        if self.recent is None:
            at, start = self.length[..., None] + self._arange(new), self.start
            if start is not None:
                start = jnp.maximum(start, length - self.ring)
                oldest = jnp.maximum(length - self.ring, self.sinks)[..., None]
                kept = (at < length[..., None]) & ((at < self.sinks) | (at >= oldest))
                # Others beyond the end, where nothing is written.
                at = jnp.where(kept, _places_in_ring(self, at), self.context + self._arange(new))
            write = lambda old, x: write_tokens(old, x, at)
            return dataclasses.replace(
                self, keys=write(self.keys, keys), values=write(self.values, values), length=length, start=start
            )
        # Arrange the tokens of the unfinished window and the new tokens in whole windows.
        window = self.window
        windows = -(-(window - 1 + new) // window)
        before = self.length // window
        within = self.length % window
        # One window is enough. Old tokens may stay in it, which `positions` masks.
        if windows == 1:
            append = lambda old, x: write_rows(old, x.astype(old.dtype), within[..., None])
        else:
            append = lambda old, x: append_to_window(old, x, within, windows * window)
        tokens = append(self.recent[0], keys), append(self.recent[1], values)
        at = before[..., None] * window + self._arange(windows * window)
        # Most steps fill no window. Then they write zeros, which a later step overwrites.
        filled = length // window > before
        write = lambda old, x: write_tokens(old, x, at, jnp.any(filled), window)
        start = (length // window - before) * window
        recent = tokens
        if windows > 1:
            recent = slice_tokens(tokens[0], start, window), slice_tokens(tokens[1], start, window)
        return dataclasses.replace(
            self, keys=write(self.keys, tokens[0]), values=write(self.values, tokens[1]), recent=recent, length=length
        )

    def truncate(self, length: Int[Array, "*batch"] | int) -> "QuantizedCache":
        """Keeps the first tokens of each row, such as those that speculative decoding accepts.

        The tokens that stay are read as before. With a float window, cutting into a window that was already quantized
        loads it back dequantized: its rounding error stays, and it is quantized again when full. Tokens that a ring has
        lost do not come back: it holds as many more than a sliding window sees as may be taken back.

        !!! Example

            ```python
            cache = cache.truncate(cache.length - rejected)   # rejected: integers `(*batch,)`
            ```

        **Arguments:**

        - `length`: how many tokens to keep: an integer, or integers `(*batch,)`. Shorter rows stay as they are.

        **Returns:**

        The cache with at most `length` tokens in each row.

        **Raises:**

        `TypeError` if `length` is not of integers. `ValueError` for another shape, and, outside `jit`, if it is
        negative, or if a ring holds none of the tokens at the end. Inside `jit` a negative length is 0, and attention
        to tokens that a ring has lost is NaN.
        """
        self._check_fields()
        length = jnp.asarray(length)
        if not jnp.issubdtype(length.dtype, jnp.integer):
            raise TypeError(f"`length` must be whole numbers. Got {length.dtype}.")
        if length.ndim and length.shape != self.length.shape:
            raise ValueError(
                f"`length` must be one number, or one for each row of {self.length.shape}. Got {length.shape}."
            )
        if not isinstance(length, jax.core.Tracer) and jnp.any(length < 0):
            raise ValueError(f"`length` must not be negative. Got {length}.")
        length = jnp.clip(jnp.broadcast_to(_as_int32(length), self.length.shape), 0, self.length)
        if self.start is not None:
            lost = (length > self.sinks) & (length <= self.start)
            if not isinstance(lost, jax.core.Tracer) and jnp.any(lost):
                raise ValueError(
                    f"`length` must leave tokens that the ring of {self.ring} still holds, from {self.start} on. Got "
                    f"{length}. Make `ring` larger by as many tokens as are taken back, or read the text again."
                )
            return dataclasses.replace(self, length=length, start=jnp.minimum(self.start, length))
        if self.recent is None:
            return dataclasses.replace(self, length=length)
        window = self.window
        start = length // window * window
        is_earlier = (start < self.length // window * window)[..., None, None, None]

        def refill(recent: Array, packed: MaybeQuantized) -> Array:
            tokens = read_window(packed, start, window).astype(recent.dtype)
            return jnp.where(jnp.broadcast_to(is_earlier, recent.shape), tokens, recent)

        recent = refill(self.recent[0], self.keys), refill(self.recent[1], self.values)
        return dataclasses.replace(self, recent=recent, length=length)

    def _check_fields(self) -> None:
        """Raises unless the fields fit each other, since `eqx.tree_at` may replace each alone."""
        shape, window = self.values.shape, self.window
        floats = [("keys", self.keys, shape), ("values", self.values, shape)]
        floats += [(f"recent[{n}]", x, (*shape[:-2], window, shape[-1])) for n, x in enumerate(self.recent or ())]
        counts = [("length", self.length, shape[:-3])]
        counts += [] if self.start is None else [("start", self.start, shape[:-3])]
        for name, x, expected in [*floats, *counts]:
            kind = jnp.floating if name not in ("length", "start") else jnp.integer
            if x.shape != expected or not jnp.issubdtype(x.dtype, kind):
                kinds = "floats" if kind is jnp.floating else "integers"
                raise ValueError(
                    f"`{name}` must be {kinds} of shape {expected}, in a cache whose `values` have shape {shape}. "
                    f"Got {x.dtype} of shape {x.shape}."
                )
        axes = [x.axis if isinstance(x, QuantizedArray) else -1 for x in (self.keys, self.values)]
        if axes not in ([-1, -1], [-2, -1]):
            raise ValueError(f"`keys` must have `axis=-1` or -2, and `values` -1. Got {axes[0]} and {axes[1]}.")
        group = _min_window(self.keys.format) if axes[0] == -2 and isinstance(self.keys, QuantizedArray) else 1
        if (self.recent is not None or group > 1) and (not window or window % group or self.context % window):
            raise ValueError(
                f"`recent` must hold a multiple of {group} tokens, and the context, {self.context}, must be a multiple "
                f"of that window. Got a window of {window}."
            )

    def _arange(self, n: int) -> Int[Array, "*ones n"]:
        return jnp.arange(n, dtype=jnp.int32).reshape(*[1] * self.length.ndim, n)

    def scores(
        self, queries: Float[Array, "*batch heads rows size"], dtype: DTypeLike | None = None
    ) -> Float[Array, "*batch heads rows places"]:
        """Multiplies queries by the keys of every place, empty ones too (see `positions`).

        **Arguments:**

        - `queries`: for each head of keys, a row for each new token; if several heads share keys, rows of them all.
        - `dtype`: of the products; by default that of the queries.

        **Returns:**

        The products, neither scaled nor masked.

        **Raises:**

        `ValueError` for other shapes.
        """
        self._check_rows(queries, "queries", "size", self.values.shape[-1])
        dtype = queries.dtype if dtype is None else dtype
        queries = self._rotate(queries)
        old = _multiply(queries, self.keys, dtype)
        if self.recent is None:
            return old
        return jnp.concatenate([old, _multiply(queries, self.recent[0], dtype)], axis=-1)

    def weighted_values(
        self, probabilities: Float[Array, "*batch heads rows places"]
    ) -> Float[Array, "*batch heads rows size"]:
        """Sums the values of all places, weighted by probabilities.

        **Arguments:**

        - `probabilities`: such as a masked softmax of `scores`: zero for hidden tokens.

        **Returns:**

        For each row, one vector; NaN where the cache has more tokens than fit.

        **Raises:**

        `ValueError` for other shapes.
        """
        self._check_rows(probabilities, "probabilities", "places", self.context + self.window)
        y = probabilities[..., : self.context] @ self.values.astype(probabilities.dtype)
        if self.recent is not None:
            y = y + probabilities[..., self.context :] @ self.recent[1].astype(probabilities.dtype)
        y = self._rotate(y, back=True)
        return nan_without_room(self, y) if self.start is None else y

    def attend(
        self,
        queries: Float[Array, "*batch query_heads new size"],
        positions: Integer[Array, "*batch new"],
        *,
        scale: float | None = None,
        sliding_window: Integer[Array, ""] | int | None = None,
        soft_cap: float | None = None,
    ) -> Float[Array, "*batch query_heads new size"]:
        """Computes causal attention of new tokens to the cached ones.

        Append the keys and values of the new tokens first; to a ring, several at a time by `append_and_attend`. On CPU,
        native code reads only the places that queries see, for caches without a float window. In a ring it reads them
        for the newest token, if that sees the whole ring.

        **Arguments:**

        - `queries`: floats. With n times the heads of the cache, queries 0 to n - 1 use head 0, and so on.
        - `positions`: the position of each new token in its text: `length` *before* `append`, and on. A token sees
            cached tokens at positions up to and including its own.
        - `scale`: of the scores; by default `1 / sqrt(size)`. Multiply queries by a traced one instead.
        - `sliding_window`: how many tokens a token sees, its own included; `None` or 0 for all, or as many as the
            `ring`. May be traced. Tokens before it stay in the cache, unless it is a ring.
        - `soft_cap`: bounds scores by `soft_cap * tanh(score / soft_cap)`, as Gemma 2 does.

        **Returns:**

        One vector for each query, of the dtype of `queries`; zeros for a token that sees none, NaN in rows with
        more tokens than fit, and NaN for a token that sees one that a ring has lost. Ignore those of padding.

        **Raises:**

        `ValueError` for other shapes, a negative window, or a cap out of range, and, outside `jit`, for a token that
        sees one that a ring has lost. `TypeError` for other dtypes, and for a `scale` or `soft_cap` that is traced.
        """
        self._check_fields()
        *front, heads, _, size = self.values.shape
        given = queries.shape[-3] if queries.ndim == self.values.ndim else 0
        if queries.shape != (*front, given, queries.shape[-2], size) or given < 1 or given % heads:
            here = ", ".join(map(str, (*front, f"a multiple of {heads}", "new", size)))
            raise ValueError(f"`queries` must be (*batch, query_heads, new, size), here ({here}). Got {queries.shape}.")
        if not jnp.issubdtype(queries.dtype, jnp.floating):
            raise TypeError(f"`queries` must be floats. Got {queries.dtype}.")
        new, positions = queries.shape[-2], jnp.asarray(positions)
        if not jnp.issubdtype(positions.dtype, jnp.integer):
            raise TypeError(f"`positions` must be integers. Got {positions.dtype}.")
        if positions.shape != (*front, new):
            raise ValueError(f"`positions` must be (*batch, new), here {(*front, new)}. Got {positions.shape}.")
        for name, number in (("scale", scale), ("soft_cap", soft_cap)):
            if isinstance(number, jax.core.Tracer):
                raise TypeError(f"`{name}` must be a number when the program is traced. Got a traced {number.aval}.")
        if soft_cap is not None and not 1e-30 < soft_cap < 1e30:
            raise ValueError(f"`soft_cap` must be between 1e-30 and 1e30, or None for no cap. Got {soft_cap}.")
        window = 0 if sliding_window is None else sliding_window
        if not isinstance(window, jax.core.Tracer):
            window = np.asarray(window)
        if not jnp.issubdtype(window.dtype, jnp.integer) or window.ndim:
            raise TypeError(f"`sliding_window` must be a whole number, or None for all. Got {sliding_window!r}.")
        if isinstance(window, np.ndarray) and window < 0:
            raise ValueError(f"`sliding_window` must be positive, or 0 or None for all. Got {sliding_window}.")
        if not new:
            return queries
        rows = queries.reshape(*front, heads, given // heads * new, size)
        at, width = _as_int32(positions), jnp.broadcast_to(_as_int32(window), self.length.shape)
        factor = 1 / math.sqrt(size) if scale is None else float(scale)
        sees_all = isinstance(window, np.ndarray) and not window  # and sinks are no exception
        compute = bind_attention if self.recent is None and (sees_all or not self.sinks) else attend_by_xla
        held = dataclasses.replace(self, rotated=False)  # of rotated heads, for rotated queries
        lost, start = None, self.start
        if start is not None:
            # Beyond the newest token there is nothing to see.
            at, width = jnp.minimum(at, self.length[..., None] - 1), jnp.where(width > 0, width, self.ring)
            lost = self._find_lost(at, width, start)
            compute = attend_by_xla
            if new == 1 and isinstance(window, np.ndarray) and not 0 < window < self.ring:
                # The newest token sees each place that holds a token, in whatever order.
                length = jnp.minimum(self.length, self.context)
                is_newest = at == self.length[..., None] - 1
                at = jnp.where((self.length > self.context)[..., None] & is_newest, self.context - 1, at)
                held = dataclasses.replace(held, length=length, start=None, sinks=0)
                compute, width = bind_attention, jnp.zeros_like(width)
        y = compute(self._rotate(rows), at, width, held, factor, float(soft_cap or 0))
        y = self._rotate(y, back=True).reshape(queries.shape)
        if lost is not None:
            # Computed, since `jax_debug_nans` stops at a constant NaN.
            y = y + jnp.sqrt(-lost.astype(y.dtype))[..., None, :, None]
        return y

    def append_and_attend(
        self,
        queries: Float[Array, "*batch query_heads new size"],
        keys: Float[Array, "*batch heads new size"],
        values: Float[Array, "*batch heads new size"],
        count: Int[Array, "*batch"] | int | None = None,
        *,
        scale: float | None = None,
        sliding_window: Integer[Array, ""] | int | None = None,
        soft_cap: float | None = None,
    ) -> tuple[Float[Array, "*batch query_heads new size"], "QuantizedCache"]:
        """Adds new tokens, and computes their causal attention.

        As `append` and then `attend`. But to a ring several tokens may be added at a time: those at the end take the
        places of tokens that those at the beginning still see.

        **Arguments:**

        - `queries`, `scale`, `sliding_window`, `soft_cap`: as for `attend`.
        - `keys`, `values`, `count`: as for `append`.

        **Returns:**

        One vector for each query, and the cache with the new tokens.

        **Raises:**

        As `append` and `attend`.
        """
        new = keys.shape[-2]
        cache = wide = self.append(keys, values, count)
        if self.start is not None:
            window = 0 if sliding_window is None else sliding_window
            window = window if isinstance(window, jax.core.Tracer) else int(window)
            if isinstance(window, jax.core.Tracer) or not 0 < window <= self.ring - new + 1:
                wide = self._widened(new - 1).append(keys, values, count) if new > 1 else cache
                sliding_window = jnp.where(window > 0, window, self.ring) if new > 1 else sliding_window
        positions = jnp.broadcast_to(self.length[..., None] + self._arange(new), (*self.length.shape, new))
        return wide.attend(queries, positions, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap), cache

    def _widened(self, more: int) -> "QuantizedCache":
        """Returns the same tokens in a longer ring."""
        places = self._arange(self.context + more)
        at = _positions_in_ring(self, places, more)
        old = jnp.clip(_places_in_ring(self, at), 0, self.context - 1)
        take = lambda leaf: vmap_leading(lambda leaf, at: leaf[..., at, :], self.length.ndim)(leaf, old)
        return dataclasses.replace(self, keys=jtu.tree_map(take, self.keys), values=jtu.tree_map(take, self.values))

    def _find_lost(
        self, at: Int32[Array, "*batch new"], width: Int32[Array, "*batch"], start: Int[Array, "*batch"]
    ) -> Array:
        """Returns which tokens see one that the ring has lost. Raises outside `jit`."""
        first = jnp.maximum(at - width[..., None] + 1, self.sinks)
        lost = (first < start[..., None]) & (first <= at)
        if not isinstance(lost, jax.core.Tracer) and jnp.any(lost):
            raise ValueError(
                f"`positions` must see only tokens that the ring of {self.ring} still holds, from {start} on. Got "
                f"some that see tokens from {int(jnp.min(first))} on. Add several tokens by `append_and_attend`, and "
                "make `ring` larger by as many tokens as are taken back."
            )
        return lost

    def _rotate(self, x: Float[Array, "*rows size"], *, back: bool = False) -> Float[Array, "*rows size"]:
        return hadamard.rotate(x, -1, _SEED, back=back) if self.rotated else x

    def _check_rows(self, x: Array, name: str, last: str, length: int) -> None:
        """Raises unless the last axis has this length, and batch axes and heads broadcast."""
        self._check_fields()
        front = self.values.shape[:-2]
        try:
            jnp.broadcast_shapes(x.shape[:-2], front)
            fits = x.shape[-1:] == (length,)
        except ValueError:
            fits = False
        if not fits:
            here = ", ".join(map(str, (*front, "rows", length)))
            remedy = ""
            if x.ndim == self.values.ndim and (*x.shape[:-3], x.shape[-1]) == (*front[:-1], length):
                shared, rest = divmod(x.shape[-3], front[-1])
                shape = (*front, shared * x.shape[-2], length)
                remedy = "" if rest else f" Heads that share keys are rows of one: write `{name}.reshape{shape}`."
            raise ValueError(f"`{name}` must be (*batch, heads, rows, {last}), here ({here}). Got {x.shape}.{remedy}")

    def with_sharding(self, sharding: NamedSharding) -> "QuantizedCache":
        """Moves the cache to a mesh; under `jit`, constrains it.

        **Arguments:**

        - `sharding`: of the axes `(*batch, heads, context, size)`, of which the last two must stay whole, such as
            `NamedSharding(mesh, PartitionSpec("data", "model"))`.

        **Returns:**

        The same cache, with that sharding.

        **Raises:**

        `ValueError` if the spec does not fit.
        """
        named = full_spec(sharding, self.values.ndim)
        *batch, _, tokens, size = named.spec
        if tokens is not None or size is not None:
            raise ValueError(f"`sharding` must divide batch and heads only. Got {sharding.spec}.")
        put = lambda x: x.with_sharding(named) if is_quantized(x) else place(x, named)
        recent = None if self.recent is None else (put(self.recent[0]), put(self.recent[1]))
        rows = NamedSharding(named.mesh, jax.sharding.PartitionSpec(*batch))
        start = None if self.start is None else place(self.start, rows)
        fields = {"keys": put(self.keys), "values": put(self.values), "recent": recent, "start": start}
        return dataclasses.replace(self, length=place(self.length, rows), **fields)


def _positions_in_ring(cache: QuantizedCache, places: Array, more: int = 0) -> Array:
    """Returns the latest position of each place, in a ring of `more` places more.

    Of a place that no token took yet it is negative, or that of a sink.
    """
    ring = cache.ring + more
    turns = (cache.length[..., None] - 1 - places) // ring
    return jnp.where(places < cache.sinks, places, places + turns * ring)


def _places_in_ring(cache: QuantizedCache, positions: Array) -> Array:
    return jnp.where(positions < cache.sinks, positions, cache.sinks + (positions - cache.sinks) % cache.ring)


def _as_int32(x: Integer[Array | np.ndarray, "*shape"]) -> Int32[Array, "*shape"]:
    """Converts integers, and clips those out of range."""
    limits = np.iinfo(x.dtype)
    if limits.max > _INT32.max:
        x = x.clip(max(limits.min, _INT32.min), _INT32.max)
    return jnp.asarray(x.astype(jnp.int32))


def _is_integer(x: object) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def _check_shape(shape: object) -> tuple[int, ...]:
    expected = "`shape` must be (*batch, heads, context, size), whole numbers of at least one."
    if not isinstance(shape, tuple | list) or not all(map(_is_integer, shape)):
        raise TypeError(f"{expected} Got {shape!r}.")
    if len(shape) < 3 or min(shape) < 1:
        raise ValueError(f"{expected} Got {tuple(shape)}.")
    return tuple(map(int, shape))


def _mask_padding(keys: Array, values: Array, count: ArrayLike) -> tuple[Array, Array, Array]:
    """Returns keys and values with zeros for padding, which may be NaN, and a checked `count`."""
    new, count = keys.shape[-2], jnp.asarray(count)
    if not jnp.issubdtype(count.dtype, jnp.integer):
        raise TypeError(f"`count` must be whole numbers. Got {count.dtype}.")
    if count.ndim and count.shape != keys.shape[:-3]:
        raise ValueError(f"`count` must be one number, or one for each row of {keys.shape[:-3]}. Got {count.shape}.")
    if not isinstance(count, jax.core.Tracer) and (jnp.any(count < 0) or jnp.any(count > new)):
        raise ValueError(f"`count` must be at least 0 and at most the {new} new tokens. Got {count}.")
    count = jnp.clip(count, 0, new).astype(jnp.int32)
    text = jnp.arange(new, dtype=jnp.int32).reshape(*[1] * count.ndim, new) < count[..., None]
    text = text.reshape(*count.shape, 1, new, 1) if count.ndim else text.reshape(new, 1)
    zeroed = lambda x: jnp.where(jnp.broadcast_to(text, x.shape), x, jnp.zeros_like(x))
    return zeroed(keys), zeroed(values), count


def _min_window(format: AbstractFormat | None) -> int:
    """Returns the smallest window of `per_channel`: tokens that share a scale and bytes."""
    block = None if format is None else format.block_size
    if not isinstance(block, int) or format is None or format.scale_format is not None:
        raise ValueError(
            f"`keys` must be a format with blocks, whose scales are not quantized, for `per_channel`. Got {format!r}. "
            'For instance "int4", or `eqq.Int8(block_size=64)`.'
        )
    return math.lcm(block, segment_length(format))


def _multiply(queries: Array, keys: MaybeQuantized, dtype: DTypeLike) -> Array:
    if isinstance(keys, QuantizedArray):
        return queries.astype(dtype) @ keys.astype(dtype).mT
    if keys.dtype != queries.dtype:
        return _multiply(queries.astype(dtype), keys.astype(dtype), dtype)
    multiply = ft.partial(jnp.matmul, preferred_element_type=dtype)
    # XLA for CPU copies a transposed right operand: better a few queries than all keys.
    few = queries.shape[-2] < queries.shape[-1]
    return multiply(keys, queries.mT).mT if few else multiply(queries, keys.mT)
