"""Generate text with a language model of the Llama family, from the packed weights of any checkpoint.

python generate.py MODEL "Once upon a time"            # a .gguf file alone, or a Hugging Face folder
python generate.py MODEL --chat                        # a chat in the terminal
python generate.py MODEL "One" "Two" --temperature 0.8 --top-p 0.95 --seed 1
python generate.py MODEL "Once upon a time" --format nf4
python generate.py MODEL "Once upon a time" --format nf4 --cache int8
python generate.py MODEL "Once upon a time" --fast     # packed weights times int8 activations: less exact
python generate.py MODEL "Once upon a time" --mesh 2   # each of two devices holds half of every weight
python generate.py MODEL "Once upon a time" --draft SMALL_MODEL  # speculative decoding
python generate.py --random 300m --format nf4          # random weights: for timing
"""

import argparse
import contextlib
import dataclasses
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from chat import Conversation, talk
from command import add_formats, check_memory, make_parser, peak_memory, run_program, show_size
from configuration import from_json, stop_tokens
from draft import NONE, speculate
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray
from llama import Cache, joined, layers_are_alike, Llama, load, on_mesh, with_activations
from tokenization import open_text, Text

import eqquant as eqq


SHORT = 1024  # tokens, with which copies of the cache cost little
PADDING = 64  # prompts are padded to a multiple of this many tokens, and each such length is compiled once


def _padded(length: int) -> int:
    return -(-length // PADDING) * PADDING


#
# Tokens to tokens
#


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the likeliest at temperature 0, or else at random among the likely ones.

    - `top_k`: among this many; 0 for all.
    - `top_p`: among the likeliest that together have this probability.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"`--temperature` must be a number from 0 on. Got {self.temperature}.")
        if self.top_k < 0:
            raise ValueError(f"`--top-k` must be at least 0, which takes all tokens. Got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`--top-p` must be above 0, and at most 1, which takes all tokens. Got {self.top_p}.")

    def __call__(self, logits: Float[Array, "*batch vocabulary"], key: PRNGKeyArray) -> Int[Array, " *batch"]:
        return self.draw(self.likely(logits) if self.temperature else logits, key)

    def draw(self, logits: Float[Array, "*batch vocabulary"], key: PRNGKeyArray) -> Int[Array, " *batch"]:
        if self.temperature:
            return jr.categorical(key, logits, axis=-1)
        # XLA's argmax takes five times as long on a CPU. NaN is the largest in both.
        best = ~(logits < jnp.max(logits, axis=-1, keepdims=True))
        return jnp.min(jnp.where(best, jnp.arange(logits.shape[-1]), logits.shape[-1]), axis=-1)

    def likely(self, logits: Float[Array, "*batch vocabulary"]) -> Float[Array, "*batch vocabulary"]:
        """The logits by which a token is drawn: -inf for tokens that are never chosen."""
        if self.temperature == 0:
            return jnp.log(jax.nn.one_hot(self.draw(logits, jr.key(0)), logits.shape[-1]))
        logits = logits / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            least = jax.lax.top_k(logits, self.top_k)[0][..., -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p < 1:
            ordered = -jnp.sort(-logits, axis=-1)
            shares = jax.nn.softmax(ordered, axis=-1)
            # Keep a token if the tokens before it sum to less than `top_p`: the first is always kept.
            kept = jnp.sum(jnp.cumsum(shares, axis=-1) - shares < self.top_p, axis=-1, keepdims=True)
            logits = jnp.where(logits < jnp.take_along_axis(ordered, kept - 1, axis=-1), -jnp.inf, logits)
        return logits


class State(eqx.Module):
    """The new tokens of a call, and what the next call takes: the last of them, the caches and the random key.

    With a draft rows have several tokens each, and then `NONE`. There is a cache for each model.
    """

    tokens: Int[Array, "batch new"]
    last: Int[Array, " batch"]
    caches: tuple[Cache, ...]
    key: PRNGKeyArray


class Generator:
    """A model, its context, and its two compiled functions: one reads a padded prompt, the other makes `steps` steps.

    With `draft`, a smaller model of the same vocabulary, the other function checks `drafted` tokens of it instead.
    `turns`: whether calls go on `after` earlier ones. Otherwise layers with a window hold no more than that.

    A call with hundreds of arrays takes the host a millisecond or two. So each call makes several steps, and the next
    call is started before their tokens are read.
    """

    def __init__(
        self,
        model: Llama,
        context: int,
        sampling: Sampling,
        cache: str | None = None,
        mesh: Mesh | None = None,
        steps: int = 4,
        draft: Llama | None = None,
        drafted: int = 4,
        turns: bool = False,
    ) -> None:
        models = (model,) if draft is None else (model, draft)
        most = min(each.config.positions for each in models)
        if not 0 < context <= most:
            raise ValueError(
                f"The context must be at least 1 token, and at most {most:,} tokens, for which the model was made. Got "
                f"{context:,}."
            )
        if len(vocabularies := {each.config.vocabulary for each in models}) > 1:
            raise ValueError(
                f"`--draft` must have the vocabulary of the model. Got {min(vocabularies):,} and "
                f"{max(vocabularies):,} tokens. Take a smaller model of the same family."
            )
        if drafted < 1:
            raise ValueError(f"`--drafted` must be at least 1. Got {drafted}.")
        if steps < 1:
            raise ValueError(f"`--steps` must be at least 1. Got {steps}.")
        self.config, self.context, self.steps = model.config, context, steps
        self.least = steps if draft is None else 1  # tokens of a call
        self.made: list[int] = []
        new, places = (steps, context) if draft is None else (drafted + 1, context + drafted + 1)

        def empty(model: Llama, batch: int) -> Cache:
            # A conversation takes back the tokens of two calls at most, unless it drops turns.
            ahead = 2 * new if turns else 0 if draft is None else new
            layout = {"stacked": not isinstance(model.layers, list), "ahead": ahead}
            return Cache.empty(model.config, batch, places, model.norm.weight.dtype, format=cache, **layout)

        self.empty = lambda batch: tuple(empty(each, batch) for each in models)
        self.mesh = mesh
        self.state: State | None = None
        # A list of arrays, because at each call JAX would take a tree of hundreds of modules apart in Python.
        arrays, static = eqx.partition(models, eqx.is_array)
        self.arrays, treedef = jtu.tree_flatten(arrays)
        whole = lambda arrays: eqx.combine(jtu.tree_unflatten(treedef, arrays), static)

        def read(
            arrays: list[Array], ids: Array, lengths: Array, caches: tuple[Cache, ...], key: PRNGKeyArray
        ) -> State:
            models, (key, now) = whole(arrays), jr.split(key)
            (x, *_), caches = zip(*(each.hidden(ids, c, lengths) for each, c in zip(models, caches)), strict=True)
            last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
            token = sampling(models[0].logits(last)[:, 0], now)
            return State(token[:, None], token, caches, key)

        def check(arrays: list[Array], last: Array, caches: tuple[Cache, ...], key: PRNGKeyArray) -> State:
            key, now = jr.split(key)
            tokens, last, caches = speculate(whole(arrays), last, caches, now, drafted, sampling)
            return State(tokens, last, caches, key)

        def step(arrays: list[Array], last: Array, caches: tuple[Cache, ...], key: PRNGKeyArray) -> State:
            def one_step(carry: tuple[Array, Cache, PRNGKeyArray], _: None) -> tuple[tuple[Array, Cache, Array], Array]:
                last, cache, key = carry
                key, now = jr.split(key)
                logits, cache = whole(arrays)[0](last[:, None], cache)
                token = sampling(logits[:, 0], now)
                return (token, cache, key), token

            (last, cache, key), tokens = jax.lax.scan(one_step, (last, *caches, key), None, length=steps)
            return State(tokens.T, last, (cache,), key)

        # Donated: the new cache takes the memory of the old one.
        self._read = jax.jit(read, donate_argnums=3)
        self._step = jax.jit(step if draft is None else check, donate_argnums=2)

    def start(self, prompts: Sequence[Sequence[int]], seed: int, after: int = 0) -> State:
        """Reads the prompts, and chooses the first token of each.

        `after`: how many tokens of the last call, prompts and new ones, come before them. The cache still holds these.
        """
        length = min(_padded(max(map(len, prompts))), self.context)
        ids = np.zeros((len(prompts), length), np.int32)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: len(prompt)] = prompt
        if after and self.state is not None:
            caches, self.state = tuple(cache.truncate(after) for cache in self.state.caches), None  # donated
        else:
            self.state = None  # so that its memory is free
            caches = self.empty(len(prompts))
            caches = caches if self.mesh is None else tuple(cache.on_mesh(self.mesh) for cache in caches)
        lengths = jnp.array([len(prompt) for prompt in prompts], jnp.int32)
        return self._read(self.arrays, jnp.asarray(ids), lengths, caches, jr.key(seed))

    def kept(self, after: int) -> int:
        """How many of the first tokens of the last call need not be read again: all, or none."""
        return after if self.state is not None and all(c.holds(after) for c in self.state.caches) else 0

    def step(self, state: State) -> State:
        """Starts to compute the next tokens of each row, and does not wait for them.

        Donates the cache: of the old state only the tokens may be read afterwards.
        """
        return self._step(self.arrays, state.last, state.caches, state.key)

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        *,
        stop: frozenset[int] = frozenset(),
        seed: int = 0,
        after: int = 0,
    ) -> Iterator[list[int | None]]:
        """Yields the next token of each prompt, or `None` if it has stopped.

        Ends after `tokens`, or when all have stopped. `after`: see `start`.
        """
        self._check(prompts, tokens + after)
        self.state = state = self.start(prompts, seed, after)
        stopped = np.zeros(len(prompts), bool)

        def tokens_of(now: np.ndarray) -> list[int | None]:
            np.logical_or(stopped, np.isin(now, list(stop)), out=stopped)
            return [None if ended else int(token) for token, ended in zip(now, stopped, strict=True)]

        yield tokens_of(np.asarray(state.last))  # before the steps are compiled
        if tokens == 1 or stopped.all():
            return
        self.state, left = self.step(state), tokens - 1
        waiting, self.made = [deque[int]() for _ in prompts], []
        while left:
            new = self.state.tokens
            if left > self.least:
                self.state = self.step(self.state)  # computes while the new tokens are read
            for queue, row in zip(waiting, np.asarray(new), strict=True):
                queue.extend(row[row != NONE].tolist())
            # Rows with fewer tokens than others hold these up.
            ready = min(len(queue) for queue, ended in zip(waiting, stopped, strict=True) if not ended)
            self.made.append(ready)
            ready = min(ready, left)
            left -= ready
            for _ in range(ready):
                yield tokens_of(np.array([queue.popleft() if queue else 0 for queue in waiting]))
                if stopped.all():
                    return

    def cache_nbytes(self, batch: int) -> int:
        return eqq.tree_nbytes(eqx.filter_eval_shape(self.empty, batch))

    def _check(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        if not prompts or not all(prompts):
            raise ValueError("A prompt must have a token at least. Got none.")
        if not all(0 <= token < self.config.vocabulary for prompt in prompts for token in prompt):
            raise ValueError(
                f"Tokens must be below {self.config.vocabulary:,}, the vocabulary. Got {max(map(max, prompts))}."
            )
        longest = max(map(len, prompts))
        if tokens < 1 or longest + tokens > self.context:
            raise ValueError(
                f"The cache has {self.context:,} places, and must have room for the prompt and at least one new token. "
                f"Got {longest:,} + {tokens:,}. Change `--context` or `--tokens`."
            )


#
# The command
#


_SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "model_type": "llama"}
RANDOM: dict[str, dict[str, Any]] = {
    "tiny": _SIZES | {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    "300m": _SIZES
    | {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 18}
    | {"num_attention_heads": 16, "num_key_value_heads": 8},
    "1b": _SIZES
    | {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24}
    | {"num_attention_heads": 32, "num_key_value_heads": 32},
}


def random_model(name: str, dtype: str = "float32", stacked: bool = False, vocabulary: int | None = None) -> Llama:
    config = RANDOM[name] if vocabulary is None else {**RANDOM[name], "vocab_size": vocabulary}
    return Llama(from_json(config, head=True), dtype, stacked=stacked, key=jr.key(0))


def _mesh(devices: int) -> Mesh | None:
    """A mesh of so many devices; a CPU becomes as many as are needed."""
    if devices == 1:
        return None
    with contextlib.suppress(RuntimeError):  # JAX has counted its devices already
        jax.config.update("jax_num_cpu_devices", devices)
    if not 1 < devices <= jax.device_count():
        raise ValueError(f"`--mesh` must be at most {jax.device_count()}, the number of devices. Got {devices}.")
    return Mesh(np.array(jax.devices()[:devices]), ("model",))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add_formats(parser)
    add("prompts", nargs="*", help="texts, or with --ids numbers such as '1 15 27'")
    add("--ids", action="store_true", help="prompts and texts are numbers of tokens")
    add("--chat", action="store_true", help="a conversation: prompts are questions; without any, asks in the terminal")
    add("--system", help="what the model is told before a conversation; by default what its chat template says")
    add("--tokens", type=int, help="how many to generate at most (default 64, and 512 for an answer of --chat)")
    add("--context", type=int, help="places in the cache; by default as many as needed, and 4096 for --chat")
    add("--draft", help="a smaller model of the same vocabulary: it guesses tokens, which the model checks together")
    add("--drafted", type=int, default=4, help="how many tokens --draft guesses at a time (default 4)")
    add("--steps", type=int, default=4, help="how many tokens are computed at a time (default 4); not with --draft")
    add("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    add("--top-k", type=int, default=0, help="chooses among so many; 0 for all")
    add("--top-p", type=float, default=1.0, help="chooses among the likeliest that have this probability together")
    add("--stop", type=int, nargs="*", help="tokens that end a text; by default the tokens of the model")
    add("--seed", type=int, default=0)
    add("--fast", action="store_true", help="as --activations int8, which cost 0.0003 nats a token where we measured")
    add("--mesh", type=int, default=1, help="divides weights and cache among so many devices")
    scan = (
        "stacks the layers, which compiles faster; the default for short texts where they are packed alike: floats and "
        "long texts run slower on a CPU"
    )
    add("--scan", action=argparse.BooleanOptionalAction, help=scan)
    add("--random", choices=RANDOM, help="random weights instead of a model; then prompts are numbers")
    run_program(parser, arguments, run, smoke)


def _quantized(model: Llama, options: argparse.Namespace) -> Llama:
    if options.format:
        model = eqq.quantize_tree(model, options.format)
    if activations := options.activations or ("int8" if options.fast else None):
        if not any(map(eqq.is_quantized, jtu.tree_leaves(model, is_leaf=eqq.is_quantized))):
            raise ValueError("`--activations` and `--fast` are for packed weights. Got floats. Set `--format` too.")
        model = with_activations(model, activations)
    return model


def run(options: argparse.Namespace) -> list[list[int]]:
    """Loads, generates and prints."""
    began = time.perf_counter()
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    mesh = _mesh(options.mesh)
    # A scan copies the cache of each layer for every token.
    short = not options.chat and max(options.context or 0, options.tokens or 0) <= SHORT
    scans = lambda checkpoint: mesh is None and short and layers_are_alike(checkpoint, packed=options.format is None)
    given = list(options.prompts)
    if options.random:
        given = [options.model, *given] if options.model else ["1"]
        model, stop = random_model(options.random, options.dtype, bool(options.scan)), frozenset()
        text = Text()
    elif options.model is None:
        raise ValueError("MODEL must be a folder or a .gguf file. Got none. Or set `--random tiny`.")
    else:
        checkpoint = eqq.io.open(options.model)
        stacked = scans(checkpoint) if options.scan is None else options.scan
        model, stop = load(checkpoint, options.dtype, stacked=stacked), stop_tokens(checkpoint)
        text = Text() if options.ids else open_text(checkpoint, model.config.vocabulary, options.tokenizer)
    draft = None
    if options.draft:
        if mesh is not None or (options.random and options.draft not in RANDOM):
            wanted = "left out with `--mesh`" if mesh is not None else f"one of {', '.join(RANDOM)} with `--random`"
            raise ValueError(f"`--draft` must be {wanted}. Got {options.draft}.")
        if options.random:
            draft = random_model(options.draft, options.dtype)
        else:
            small = eqq.io.open(options.draft)
            draft = load(small, options.dtype, stacked=scans(small))
        draft = joined(_quantized(draft, options))
    model = _quantized(model, options)
    # Rows of joined weights belong to different heads, so they cannot be divided by heads.
    model = joined(model) if mesh is None else on_mesh(model, mesh)
    stop = stop if options.stop is None else frozenset(options.stop)
    tokens = options.tokens if options.tokens is not None else 512 if options.chat else 64
    prompts = [] if options.chat else [text.encode(prompt) for prompt in given]
    needed = 4096 if options.chat else max(map(len, prompts), default=0) + tokens
    fits = min(needed, model.config.positions) if options.chat else needed
    fits = max(fits, min(_padded(fits), model.config.positions))
    context = fits if options.context is None else options.context
    generate = Generator(
        model, context, sampling, options.cache, mesh, options.steps, draft, options.drafted, options.chat
    )
    check_memory("The cache", generate.cache_nbytes(len(prompts) or 1), "Set `--cache`, or a smaller `--context`.")
    if options.chat:
        conversation = Conversation(generate, text, stop, tokens, options.system, options.seed)
        talk(conversation, given)
        return [conversation.ids]
    loaded = time.perf_counter()

    texts, times, alone, shown = [list(prompt) for prompt in prompts], [], len(prompts) == 1, ""
    for new in generate(prompts, tokens, stop=stop, seed=options.seed):
        times.append(time.perf_counter())
        for ids, token in zip(texts, new, strict=True):
            ids += () if token is None else (token,)
        if alone:  # several cannot be printed as they come
            so_far = text.decode(texts[0])
            # Bytes that are no whole character yet wait for the next token.
            if not so_far.endswith("\ufffd"):
                print(so_far.removeprefix(shown), end="", flush=True)
                shown = so_far
    print(text.decode(texts[0]).removeprefix(shown) if alone else "\n---\n".join(map(text.decode, texts)))

    # The first token came with the prompt, and the step was compiled for the next ones. Those of a call come together.
    made, speed = generate.made, "-"
    if len(made) > 2:
        speed = f"{len(prompts) * sum(made[2:]) / (times[1 + sum(made[:-1])] - times[1 + made[0]]):.1f}"
    if draft is not None and made:
        # Of bytes that are read for a token, which take the time where there are few rows.
        gain = np.mean(made) / (1 + (options.drafted + 1) * eqq.tree_nbytes(draft) / eqq.tree_nbytes(model))
        accepted = f"{np.mean(made):.2f} tokens a call, {np.mean(made) - 1:.2f} of {options.drafted} drafted"
        speed = f"{accepted}: {gain:.2f} of the speed without, by bytes; {speed}"
    print(
        f"[{speed} tokens/s; first token after {times[0] - loaded:.1f} s; loaded in "
        f"{loaded - began:.1f} s; weights {show_size(eqq.tree_nbytes(model))}, cache of {context:,} tokens "
        f"{show_size(generate.cache_nbytes(len(prompts)))}{peak_memory()}]",
        file=sys.stderr,
    )
    return texts


def smoke() -> None:
    """Everything, on a tiny random model."""
    from export import write_tiny_gguf

    model, both = random_model("tiny"), [[5, 6, 7], [8, 9, 10, 11, 12]]

    def texts(model: Llama, prompts: list[list[int]], cache: str | None = None, **sampling: float) -> list[list[Any]]:
        generate = Generator(model, 32, Sampling(**sampling), cache)
        return [list(ids) for ids in zip(*generate(prompts, 8), strict=True)]

    # A batch gives the same texts as its prompts alone, and a scan as the unrolled layers.
    expected = texts(model, both)
    assert expected == texts(model, both[:1]) + texts(model, both[1:])
    assert expected == texts(random_model("tiny", stacked=True), both)
    assert expected == texts(model, both, temperature=0.5, top_k=1) == texts(model, both, temperature=0.5, top_p=1e-6)
    # So do joined products, and rows of a quantized cache.
    packed = eqq.quantize_tree(model, "int8")
    assert texts(packed, both) == texts(joined(packed), both)
    packed = eqq.quantize_tree(model, "int8", activations="int8")
    assert texts(packed, both) == texts(joined(packed), both)
    assert texts(model, both, "int8") == texts(model, both[:1], "int8") + texts(model, both[1:], "int8")
    main(["--random", "tiny", "--format", "nf4", "--tokens", "8", "--temperature", "0.8", "--top-p", "0.9", "5 6 7"])
    main(["--random", "tiny", "--format", "int4", "--fast", "--scan", "--tokens", "8", "5 6 7", "8 9 10 11 12"])
    main(["--random", "tiny", "--draft", "tiny", "--temperature", "1", "--tokens", "8", "5 6 7", "8 9"])
    main(["--random", "tiny", "--cache", "int4", "--tokens", "8", "5 6 7", "8 9 10 11 12"])
    # A GGUF file alone is enough for a conversation.
    with tempfile.TemporaryDirectory() as folder:
        path = str(write_tiny_gguf(Path(folder) / "model.gguf"))
        main([path, "--chat", "--context", "128", "--tokens", "8", "Hi", "Who?"])


if __name__ == "__main__":
    main()
