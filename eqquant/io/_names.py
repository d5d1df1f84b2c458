"""The names that families of models have in checkpoints, for [`eqquant.io.load_into`][].

Every mapping gives the same paths, so that a model loads from Hugging Face's files and from GGUF files:

    embedding.weight                                layers.{n}.mlp_norm.{p}
    layers.{n}.attention_norm.{p}                   layers.{n}.mlp.{gate,up,down}.{p}
    layers.{n}.attention.{q,k,v,output}.{p}         norm.{p}
    layers.{n}.attention.{q,k}_norm.weight          head.weight

A mapping is a dictionary of rules. `overrides` are rules that come first; `rename` changes paths.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping

import numpy as np

from .._errors import did_you_mean
from .._types import PyTree
from .._wrappers.concatenate import take
from ._checkpoint import Checkpoint
from ._llama_cpp import ROTATES_NEIGHBORS
from ._name_tables import BERT, ENCODER, GEMMA, GGUF, GGUF_OWN, GPT2, LLAMA, MIXTRAL, PHI3, QWEN_MOE, VIT
from ._rules import LeafTarget, NameRules, RuleKey, Target


NameTable = dict[RuleKey, LeafTarget]
Overrides = Mapping[str, LeafTarget] | Mapping[RuleKey, LeafTarget] | None


def llama(overrides: Overrides = None, *, prefix: str = "model.") -> NameTable:
    """Returns the names of Llama, Mistral, Qwen2, Qwen3 and the first Gemma.

    Hugging Face stores them under these names.

    !!! Example

        ```python
        model = eqq.io.load_into(skeleton, "qwen3", eqq.io.names.llama())
        # A model without a head of its own, whose file has one:
        model = eqq.io.load_into(skeleton, "llama", eqq.io.names.llama({"lm_head.weight": None}))
        # The other way round: one array in both places.
        both = eqq.io.Target(("embedding.weight", "head.weight"), tied=True)
        model = eqq.io.load_into(skeleton, "llama", eqq.io.names.llama({"model.embed_tokens.weight": both}))
        ```

    **Arguments:**

    - `overrides`: rules that come first.
    - `prefix`: the prefix of all names but the head; it depends on the class that was saved.

    **Returns:**

    Rules for [`eqquant.io.load_into`][].
    """
    return _merge(overrides, prefix, LLAMA)


def gemma(overrides: Overrides = None, *, prefix: str = "model.") -> NameTable:
    """Returns the names of Gemma 2 and 3.

    They have norms after attention and MLP too: `attention_post_norm` and `mlp_post_norm`. (The first Gemma has the
    names of `llama`.) Norms multiply by one plus the weight.

    !!! Example

        ```python
        model = eqq.io.load_into(skeleton, "gemma", eqq.io.names.gemma())
        ```

    **Arguments:**

    - `overrides`: rules that come first.
    - `prefix`: the prefix of all names but the head; it depends on the class that was saved.

    **Returns:**

    Rules for [`eqquant.io.load_into`][].
    """
    return _merge(overrides, prefix, GEMMA, LLAMA)


def phi3(overrides: Overrides = None, *, prefix: str = "model.") -> NameTable:
    """Returns the names of Phi-3 and 4.

    Their files hold `q`, `k` and `v` as one array, and `gate` and `up` too, which
    are divided here.

    !!! Example

        ```python
        model = eqq.io.load_into(skeleton, "phi3", eqq.io.names.phi3())
        ```

    **Arguments:**

    - `overrides`: rules that come first.
    - `prefix`: the prefix of all names but the head; it depends on the class that was saved.

    **Returns:**

    Rules for [`eqquant.io.load_into`][].
    """
    return _merge(overrides, prefix, PHI3, LLAMA)


def mixtral(overrides: Overrides = None, *, prefix: str = "model.") -> NameTable:
    """Returns the names of Mixtral.

    Its experts, one array each, become one: `layers.{n}.experts.up.weight`, with the
    experts along the first axis. The router is `layers.{n}.router.weight`.

    !!! Example

        ```python
        model = eqq.io.load_into(skeleton, "mixtral", eqq.io.names.mixtral())
        ```

    **Arguments:**

    - `overrides`: rules that come first.
    - `prefix`: the prefix of all names but the head; it depends on the class that was saved.

    **Returns:**

    Rules for [`eqquant.io.load_into`][].
    """
    return _merge(overrides, prefix, MIXTRAL, LLAMA)


def qwen_moe(overrides: Overrides = None, *, prefix: str = "model.") -> NameTable:
    """Returns the names of the mixtures of experts of Qwen2 and 3, with the paths of Mixtral.

    The expert that every token of Qwen2 has is `layers.{n}.shared`, its share `layers.{n}.shared_gate`.

    !!! Example

        ```python
        model = eqq.io.load_into(skeleton, "qwen_moe", eqq.io.names.qwen_moe())
        ```

    **Arguments:**

    - `overrides`: rules that come first.
    - `prefix`: the prefix of all names but the head; it depends on the class that was saved.

    **Returns:**

    Rules for [`eqquant.io.load_into`][].
    """
    return _merge(overrides, prefix, QWEN_MOE, LLAMA)


def gpt2(overrides: Overrides = None, *, prefix: str = "") -> NameTable:
    """Returns the names of GPT-2.

    Its weights are stored as `(in, out)`, and `q`, `k` and `v` as one.

    !!! Example

        ```python
        model = eqq.io.load_into(skeleton, "gpt2", eqq.io.names.gpt2())
        ```

    **Arguments:**

    - `overrides`: rules that come first.
    - `prefix`: the prefix of all names but the head; it depends on the class that was saved.

    **Returns:**

    Rules for [`eqquant.io.load_into`][].
    """
    return _merge(overrides, prefix, GPT2)


def bert(overrides: Overrides = None, *, prefix: str = "") -> NameTable:
    """Returns the names of BERT and its descendants, such as MiniLM.

    A norm follows its namesake.

    The embeddings are `embeddings.{word,position,token_type}.weight` and `embeddings.norm.{p}`.

    !!! Example

        ```python
        model = eqq.io.load_into(skeleton, "bert", eqq.io.names.bert())
        ```

    **Arguments:**

    - `overrides`: rules that come first.
    - `prefix`: the prefix of all names but the head; it depends on the class that was saved.

    **Returns:**

    Rules for [`eqquant.io.load_into`][].
    """
    return _merge(overrides, prefix, BERT, ENCODER)


def vit(overrides: Overrides = None, *, prefix: str = "vit.") -> NameTable:
    """Returns the names of Vision Transformers.

    The embeddings are `cls`, `position` and `patch.{weight,bias}`.

    !!! Example

        ```python
        model = eqq.io.load_into(skeleton, "vit", eqq.io.names.vit())
        ```

    **Arguments:**

    - `overrides`: rules that come first.
    - `prefix`: the prefix of all names but the head; it depends on the class that was saved.

    **Returns:**

    Rules for [`eqquant.io.load_into`][].
    """
    return _merge(overrides, prefix, VIT, ENCODER)


# Architectures of GGUF whose norms llama.cpp adds one to.
_PLUS_ONE = ("gemma", "gemma2", "gemma3")


def gguf(checkpoint: Checkpoint, overrides: Overrides = None) -> NameTable:
    """Returns the names of GGUF files, with the paths of the other families.

    llama.cpp stores the rows of `q` and `k` of Llama and Mistral so that the two halves of each head alternate; here
    they are put back, packed. llama.cpp adds one to the norms of Gemma, which is subtracted.

    !!! Example

        ```python
        checkpoint = eqq.io.open("model.gguf")
        model = eqq.io.load_into(skeleton, checkpoint, eqq.io.names.gguf(checkpoint))
        ```

    **Arguments:**

    - `checkpoint`: the opened file, whose metadata says the architecture and the number of heads.
    - `overrides`: rules that come first.

    **Returns:**

    Rules for [`eqquant.io.load_into`][].

    **Raises:**

    `ValueError` if the file is of Llama, and does not say the number of its heads.
    """
    architecture = str(checkpoint.metadata.get("general.architecture"))
    rules: NameTable = {**GGUF_OWN.get(architecture, {})}
    if architecture in ROTATES_NEIGHBORS:
        heads = checkpoint.metadata.get(f"{architecture}.attention.head_count")
        counts = {"q": heads, "k": checkpoint.metadata.get(f"{architecture}.attention.head_count_kv", heads)}
        for x, count in counts.items():
            if type(count) is not int:
                raise ValueError(
                    f"{checkpoint.path} must say how many heads it has, in `{architecture}.attention.head_count`. Got "
                    f"{counts}. Write rules of your own, with `eqq.io.names.rotary_halves`."
                )
            rules[f"blk.{{n}}.attn_{x}.{{p}}"] = Target(f"layers.{{n}}.attention.{x}.{{p}}", apply=rotary_halves(count))
    if architecture in _PLUS_ONE:
        norms = {name: path for name, path in GGUF.items() if "norm" in name and name != "token_embd_norm.{p}"}
        rules |= {name: Target(path, apply=minus_one) for name, path in norms.items() if isinstance(path, str)}
    return _merge(overrides, "", rules, GGUF)


def rotary_halves(heads: int) -> Callable[[PyTree], PyTree]:
    """Returns a function that undoes llama.cpp's order of the rows of `q` and `k`.

    It gathers rows, packed ones too.

    llama.cpp rotates neighbors, row `2 i` with `2 i + 1`; Hugging Face rotates the halves of a head, row `i` with
    `i + size / 2`.

    !!! Example

        ```python
        rule = eqq.io.Target("layers.{n}.attention.q.weight", apply=eqq.io.names.rotary_halves(heads=32))
        ```

    **Arguments:**

    - `heads`: the number of heads of this array; `k` may have fewer than `q`.

    **Returns:**

    A function for [`eqquant.io.Target`][].
    """

    def undo(x: PyTree) -> PyTree:
        rows = x.shape[0]
        if heads < 1 or rows % (2 * heads):
            raise ValueError(f"{rows} rows are not {heads} heads of two halves")
        return take(x, np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1))

    undo.__name__ = f"rotary_halves({heads})"
    return undo


def minus_one(x: PyTree) -> PyTree:
    return x - 1


_FAMILIES: dict[str, tuple[Callable[..., NameTable], str]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma"), (llama, "model.")),
    **dict.fromkeys(("gemma2", "gemma3_text"), (gemma, "model.")),
    "phi3": (phi3, "model."),
    "mixtral": (mixtral, "model."),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), (qwen_moe, "model.")),
    "gpt2": (gpt2, "transformer."),
    "bert": (bert, "bert."),
    "vit": (vit, "vit."),
}


def detect(checkpoint: object, overrides: Overrides = None) -> NameRules:
    """Returns the rules for a checkpoint, from its metadata and its configuration.

    That is `model_type` in `config.json`, or the architecture of a GGUF file. Arrays of our own files, and of
    dictionaries, keep their names; unless a file was converted, and has the names of the family of its `config.json`.

    !!! Example

        ```python
        model = eqq.io.load_into(skeleton, checkpoint, eqq.io.names.detect(checkpoint))
        ```

    **Arguments:**

    - `checkpoint`: the result of [`eqquant.io.open`][].
    - `overrides`: rules that come first.

    **Returns:**

    Rules for [`eqquant.io.load_into`][].

    **Raises:**

    `ValueError` for a family without ready names.
    """
    if not isinstance(checkpoint, Checkpoint) or (checkpoint.dialect == "eqquant" and not _find_prefix(checkpoint)):
        return _merge(overrides, "", {re.compile("(?P<path>.*)", re.DOTALL): "{path}"})
    if checkpoint.dialect == "gguf":
        return gguf(checkpoint, overrides)
    kind = checkpoint.config.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILIES:
        raise ValueError(
            f"`names` must be given for {checkpoint.path}. Its config.json has the `model_type` {kind!r}, and ready "
            f"names are for {', '.join(_FAMILIES)}. {did_you_mean(str(kind), _FAMILIES)}".rstrip()
        )
    return _FAMILIES[kind][0](overrides, prefix=_find_prefix(checkpoint))


def _find_prefix(checkpoint: Checkpoint) -> str:
    """Returns the prefix of names in the family of a `config.json`, or "" if no array has it."""
    prefix = _FAMILIES.get(str(checkpoint.config.get("model_type")), (None, ""))[1]
    return prefix if any(name.startswith(prefix) for name in checkpoint) else ""


def rename(names: Mapping[str, LeafTarget] | Mapping[RuleKey, LeafTarget], changes: Mapping[str, str]) -> NameTable:
    """Changes the paths of rules: replaces each text by another, in this order.

    !!! Example

        ```python
        names = eqq.io.names.rename(eqq.io.names.llama(), {"attention.{x}.": "attn.w{x}.", "embedding": "tokens"})
        stacked = eqq.io.names.rename(eqq.io.names.llama(), {"layers.{n}": "layers"})    # one stack, for `scan`
        ```

    **Arguments:**

    - `names`: rules.
    - `changes`: parts of paths, and their replacements.

    **Returns:**

    New rules.

    **Raises:**

    `ValueError` if a text is in no path.
    """
    seen, paths = set(), []

    def change(path: str) -> str:
        paths.append(path)
        for old, new in changes.items():
            seen.update([old] if old in path else ())
            path = path.replace(old, new)
        return path

    def one(target: LeafTarget) -> LeafTarget:
        if target is None:
            return None
        to = target if isinstance(target, Target) else Target(target)
        path = change(to.path) if isinstance(to.path, str) else tuple(map(change, to.path))
        return dataclasses.replace(to, path=path) if isinstance(target, Target) else path

    renamed = {key: one(target) for key, target in names.items()}
    if absent := [old for old in changes if old not in seen]:
        raise ValueError(
            f"Each text of `changes` must be a part of a path. Got {absent[0]!r}, in none of {', '.join(paths[:10])}."
        )
    return renamed


def _merge(overrides: Overrides, prefix: str, *tables: Mapping[str, LeafTarget] | NameTable) -> NameTable:
    """Joins tables: of two rules with one name the first holds.

    A prefix stands before all names but the head.
    """
    rules: NameTable = dict(overrides.items() if overrides else ())
    for table in tables:
        for name, target in table.items():
            if isinstance(name, str) and not name.startswith(("lm_head.", "classifier.", "*")):
                name = prefix + name
            rules.setdefault(name, target)
    return rules
