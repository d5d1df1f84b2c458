"""Speculative decoding: a small model drafts tokens, and the large model checks all of them in one call.

The texts are as without a draft: the same tokens at temperature 0, and otherwise tokens of the same distribution
([Leviathan et al.](https://arxiv.org/abs/2211.17192)).
"""

from typing import Protocol

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PRNGKeyArray
from llama import Cache, Llama


NONE = -1  # in place of a token


class Choice(Protocol):
    """How tokens are chosen: `Sampling` in `generate.py`."""

    def likely(self, logits: Float[Array, "*batch vocabulary"]) -> Float[Array, "*batch vocabulary"]: ...
    def draw(self, logits: Float[Array, "*batch vocabulary"], key: PRNGKeyArray) -> Int[Array, " *batch"]: ...


def speculate(
    models: tuple[Llama, Llama],
    last: Int[Array, " batch"],
    caches: tuple[Cache, Cache],
    key: PRNGKeyArray,
    count: int,
    sampling: Choice,
) -> tuple[Int[Array, "batch new"], Int[Array, " batch"], tuple[Cache, Cache]]:
    """The next tokens of each row, one to `count + 1` of them and then `NONE`; the last of them, and the caches.

    `models`: the large one, and the one that drafts.
    """
    model, draft = models
    cache, draft_cache = caches
    drawn, check = jr.split(key)

    def propose(carry: tuple[Array, Cache], key: PRNGKeyArray) -> tuple[tuple[Array, Cache], tuple[Array, Array]]:
        token, draft_cache = carry
        logits, draft_cache = draft(token[:, None], draft_cache)
        guess = sampling.likely(logits[:, 0])
        token = sampling.draw(guess, key)
        return (token, draft_cache), (token, guess)

    # One step more than tokens, so that the cache has the last one too.
    (_, draft_cache), (drafted, guesses) = jax.lax.scan(propose, (last, draft_cache), jr.split(drawn, count + 1))
    drafted, guesses = jnp.moveaxis(drafted, 0, 1)[:, :-1], jnp.moveaxis(guesses, 0, 1)[:, :-1]
    logits, longer = model(jnp.concatenate([last[:, None], drafted], axis=1), cache)
    tokens = accept(drafted, guesses, sampling.likely(logits), check, sampling)
    made = jnp.sum(tokens != NONE, axis=1)
    last = jnp.take_along_axis(tokens, made[:, None] - 1, axis=1)[:, 0]
    length = cache.length + made
    return tokens, last, (longer.truncate(length), draft_cache.truncate(length))


def accept(
    drafted: Int[Array, "batch count"],
    guesses: Float[Array, "batch count vocabulary"],
    logits: Float[Array, "batch count_and_one vocabulary"],
    key: PRNGKeyArray,
    sampling: Choice,
) -> Int[Array, "batch count_and_one"]:
    """The drafted tokens before the first that is rejected, one token in its place or at the end, and then `NONE`."""
    accepting, replacing = jr.split(key)
    p, q = jax.nn.softmax(logits), jax.nn.softmax(guesses)
    of = lambda shares: jnp.take_along_axis(shares[:, : drafted.shape[1]], drafted[..., None], axis=-1)[..., 0]
    accepted = jr.uniform(accepting, drafted.shape) * of(q) < of(p)
    kept = jnp.sum(jnp.cumprod(accepted, axis=1), axis=1, keepdims=True)
    # Where the draft is too sure, tokens are accepted less often. What is missing is drawn from the rest.
    rest = jnp.maximum(p - jnp.pad(q, ((0, 0), (0, 1), (0, 0))), 0)
    rest = jnp.where(rest.sum(axis=-1, keepdims=True) > 0, rest, p)
    replaced = sampling.draw(jnp.take_along_axis(jnp.log(rest), kept[..., None], axis=1)[:, 0], replacing)
    places = jnp.arange(logits.shape[1])[None]
    tokens = jnp.where(places == kept, replaced[:, None], jnp.pad(drafted, ((0, 0), (0, 1))))
    return jnp.where(places <= kept, tokens, NONE)
