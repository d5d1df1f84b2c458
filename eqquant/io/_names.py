"""The names that families of models have in checkpoints, for [`eqquant.io.load_into`][].

Every mapping gives the same paths, so that a model loads from Hugging Face's files and from GGUF files:

    embedding.weight                                layers.{n}.mlp_norm.{p}
    layers.{n}.attention_norm.{p}                   layers.{n}.mlp.{gate,up,down}.{p}
    layers.{n}.attention.{q,k,v,output}.{p}         norm.{p}
    layers.{n}.attention.{q,k}_norm.weight          head.weight

A mapping is a dictionary of rules. `overrides` are rules that come first; `rename` changes paths.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .._docs import fill_doc
from .._errors import did_you_mean
from .._wrappers.pieces import take
from ._checkpoint import Checkpoint
from ._rules import Names, Target, To


Rules = dict[Any, Target]
Overrides = Mapping[Any, Target] | None

_EXPERTS = "layers.{n}.experts."
_ARGUMENTS = """
**Arguments:**

- `overrides`: rules that come first.
- `prefix`: what stands before all names but that of the head; it depends on the class that was saved.

**Returns:**

Rules for [`eqquant.io.load_into`][].
"""


@fill_doc(arguments=_ARGUMENTS)
def llama(overrides: Overrides = None, *, prefix: str = "model.") -> Rules:
    """Returns the names of Llama, Mistral, Qwen2, Qwen3 and the first Gemma, as Hugging Face stores them.

    !!! Example

        ```python
        model = eqq.io.load_into(skeleton, "qwen3", eqq.io.names.llama())
        # A model without a head of its own, whose file has one:
        model = eqq.io.load_into(skeleton, "llama", eqq.io.names.llama({"lm_head.weight": None}))
        # The other way round: one array in both places.
        both = eqq.io.To(("embedding.weight", "head.weight"), tied=True)
        model = eqq.io.load_into(skeleton, "llama", eqq.io.names.llama({"model.embed_tokens.weight": both}))
        ```

    {arguments}
    """
    layer = f"{prefix}layers.{{n}}."
    return _rules(
        overrides,
        {
            f"{prefix}embed_tokens.weight": "embedding.weight",
            f"{layer}self_attn.{{x:q|k|v}}_proj.{{p}}": "layers.{n}.attention.{x}.{p}",
            f"{layer}self_attn.o_proj.{{p}}": "layers.{n}.attention.output.{p}",
            f"{layer}self_attn.{{x:q|k}}_norm.weight": "layers.{n}.attention.{x}_norm.weight",
            f"{layer}mlp.{{x}}_proj.{{p}}": "layers.{n}.mlp.{x}.{p}",
            f"{layer}input_layernorm.weight": "layers.{n}.attention_norm.weight",
            f"{layer}post_attention_layernorm.weight": "layers.{n}.mlp_norm.weight",
            f"{prefix}norm.weight": "norm.weight",
            "lm_head.weight": "head.weight",
            "*.rotary_emb.inv_freq": None,
        },
    )


@fill_doc(arguments=_ARGUMENTS)
def gemma(overrides: Overrides = None, *, prefix: str = "model.") -> Rules:
    """Returns the names of Gemma 2 and 3.

    They have norms after attention and MLP too: `attention_post_norm` and `mlp_post_norm`. (The first Gemma has the
    names of `llama`.) Norms multiply by one plus the weight.

    {arguments}
    """
    norms = {
        f"{prefix}layers.{{n}}.post_attention_layernorm.weight": "layers.{n}.attention_post_norm.weight",
        f"{prefix}layers.{{n}}.pre_feedforward_layernorm.weight": "layers.{n}.mlp_norm.weight",
        f"{prefix}layers.{{n}}.post_feedforward_layernorm.weight": "layers.{n}.mlp_post_norm.weight",
    }
    return _rules(overrides, llama(norms, prefix=prefix))


@fill_doc(arguments=_ARGUMENTS)
def phi3(overrides: Overrides = None, *, prefix: str = "model.") -> Rules:
    """Returns the names of Phi-3 and 4.

    Their files hold `q`, `k` and `v` as one array, and `gate` and `up` too, which
    are divided here.

    {arguments}
    """
    layer, attention = f"{prefix}layers.{{n}}.", "layers.{n}.attention."
    fused: Rules = {
        f"{layer}self_attn.qkv_proj.{{p}}": tuple(f"{attention}{x}.{{p}}" for x in "qkv"),
        f"{layer}mlp.gate_up_proj.{{p}}": ("layers.{n}.mlp.gate.{p}", "layers.{n}.mlp.up.{p}"),
    }
    return _rules(overrides, llama(fused, prefix=prefix))


@fill_doc(arguments=_ARGUMENTS)
def mixtral(overrides: Overrides = None, *, prefix: str = "model.") -> Rules:
    """Returns the names of Mixtral.

    Its experts, one array each, become one: `layers.{n}.experts.up.weight`, with the
    experts along the first axis. The router is `layers.{n}.router.weight`.

    {arguments}
    """
    moe = f"{prefix}layers.{{n}}.block_sparse_moe."
    experts: Rules = {
        f"{moe}gate.weight": "layers.{n}.router.weight",
        f"{moe}experts.{{e}}.w1.weight": f"{_EXPERTS}gate.weight",
        f"{moe}experts.{{e}}.w2.weight": f"{_EXPERTS}down.weight",
        f"{moe}experts.{{e}}.w3.weight": f"{_EXPERTS}up.weight",
    }
    return _rules(overrides, llama(experts, prefix=prefix))


@fill_doc(arguments=_ARGUMENTS)
def qwen_moe(overrides: Overrides = None, *, prefix: str = "model.") -> Rules:
    """Returns the names of the mixtures of experts of Qwen2 and 3, with the paths of Mixtral.

    The expert that every token of Qwen2 has is `layers.{{n}}.shared`, its share `layers.{{n}}.shared_gate`.

    {arguments}
    """
    moe = f"{prefix}layers.{{n}}.mlp."
    experts: Rules = {
        f"{moe}gate.weight": "layers.{n}.router.weight",
        f"{moe}experts.{{e}}.{{x}}_proj.weight": f"{_EXPERTS}{{x}}.weight",
        f"{moe}shared_expert.{{x}}_proj.weight": "layers.{n}.shared.{x}.weight",
        f"{moe}shared_expert_gate.weight": "layers.{n}.shared_gate.weight",
    }
    return _rules(overrides, llama(experts, prefix=prefix))


@fill_doc(arguments=_ARGUMENTS)
def gpt2(overrides: Overrides = None, *, prefix: str = "") -> Rules:
    """Returns the names of GPT-2, whose weights are stored as `(in, out)`, and `q`, `k` and `v` as one.

    {arguments}
    """
    layer = f"{prefix}h.{{n}}."
    across = lambda *paths: To(paths, transpose=True)
    return _rules(
        overrides,
        {
            f"{prefix}wte.weight": "embedding.weight",
            f"{prefix}wpe.weight": "position.weight",
            f"{layer}ln_1.{{p}}": "layers.{n}.attention_norm.{p}",
            f"{layer}attn.c_attn.{{p}}": across(*(f"layers.{{n}}.attention.{x}.{{p}}" for x in "qkv")),
            f"{layer}attn.c_proj.{{p}}": across("layers.{n}.attention.output.{p}"),
            f"{layer}ln_2.{{p}}": "layers.{n}.mlp_norm.{p}",
            f"{layer}mlp.c_fc.{{p}}": across("layers.{n}.mlp.up.{p}"),
            f"{layer}mlp.c_proj.{{p}}": across("layers.{n}.mlp.down.{p}"),
            f"{prefix}ln_f.{{p}}": "norm.{p}",
            "lm_head.weight": "head.weight",
            "*.attn.bias": None,
            "*.attn.masked_bias": None,
        },
    )


@fill_doc(arguments=_ARGUMENTS)
def bert(overrides: Overrides = None, *, prefix: str = "") -> Rules:
    """Returns the names of BERT and its descendants, such as MiniLM. A norm follows what it is named after.

    The embeddings are `embeddings.{word,position,token_type}.weight` and `embeddings.norm.{p}`.

    {arguments}
    """
    layer = f"{prefix}encoder.layer.{{n}}."
    return _rules(
        overrides,
        {
            f"{prefix}embeddings.{{x}}_embeddings.weight": "embeddings.{x}.weight",
            f"{prefix}embeddings.LayerNorm.{{p}}": "embeddings.norm.{p}",
            **_encoder(layer, f"{layer}attention.self."),
            f"{layer}attention.output.LayerNorm.{{p}}": "layers.{n}.attention_norm.{p}",
            f"{layer}output.LayerNorm.{{p}}": "layers.{n}.mlp_norm.{p}",
            f"{prefix}pooler.dense.{{p}}": "pooler.{p}",
            "classifier.{p}": "head.{p}",
            "*position_ids": None,
        },
    )


@fill_doc(arguments=_ARGUMENTS)
def vit(overrides: Overrides = None, *, prefix: str = "vit.") -> Rules:
    """Returns the names of Vision Transformers. The embeddings are `cls`, `position` and `patch.{weight,bias}`.

    {arguments}
    """
    layer = f"{prefix}encoder.layer.{{n}}."
    return _rules(
        overrides,
        {
            f"{prefix}embeddings.cls_token": "cls",
            f"{prefix}embeddings.position_embeddings": "position",
            f"{prefix}embeddings.patch_embeddings.projection.{{p}}": "patch.{p}",
            **_encoder(layer, f"{layer}attention.attention."),
            f"{layer}layernorm_before.{{p}}": "layers.{n}.attention_norm.{p}",
            f"{layer}layernorm_after.{{p}}": "layers.{n}.mlp_norm.{p}",
            f"{prefix}layernorm.{{p}}": "norm.{p}",
            f"{prefix}pooler.dense.{{p}}": "pooler.{p}",
            "classifier.{p}": "head.{p}",
        },
    )


def _encoder(layer: str, attention: str) -> Rules:
    """What BERT and ViT share."""
    return {
        f"{attention}query.{{p}}": "layers.{n}.attention.q.{p}",
        f"{attention}key.{{p}}": "layers.{n}.attention.k.{p}",
        f"{attention}value.{{p}}": "layers.{n}.attention.v.{p}",
        f"{layer}attention.output.dense.{{p}}": "layers.{n}.attention.output.{p}",
        f"{layer}intermediate.dense.{{p}}": "layers.{n}.mlp.up.{p}",
        f"{layer}output.dense.{{p}}": "layers.{n}.mlp.down.{p}",
    }


# Architectures of GGUF whose rows of q and k llama.cpp stores in another order, and those whose norms it adds one to.
_PERMUTED = ("llama",)
_PLUS_ONE = ("gemma", "gemma2", "gemma3")


def gguf(checkpoint: Checkpoint, overrides: Overrides = None) -> Rules:
    """Returns the names of GGUF files, with the paths that the other mappings give to the same arrays.

    llama.cpp stores the rows of `q` and `k` of Llama and Mistral so that the two halves of each head alternate; here
    they are put back, packed. From the norms of Gemma it is the one that llama.cpp added that is subtracted.

    **Arguments:**

    - `checkpoint`: the opened file, whose metadata says the architecture and the number of heads.
    - `overrides`: rules that come first.

    **Returns:**

    Rules for [`eqquant.io.load_into`][].

    **Raises:**

    `ValueError` if the file is of Llama, and does not say the number of its heads.
    """
    architecture = checkpoint.metadata.get("general.architecture")
    blocks = "blk.{n}."
    norm: Callable[[str], Target] = lambda path: path
    if architecture in _PLUS_ONE:
        norm = lambda path: To(path, apply=minus_one)
    of_head: Callable[[str], Target] = lambda x: f"layers.{{n}}.attention.{x}.{{p}}"
    if architecture in _PERMUTED:
        heads = checkpoint.metadata.get(f"{architecture}.attention.head_count")
        heads_of = {"q": heads, "k": checkpoint.metadata.get(f"{architecture}.attention.head_count_kv", heads)}
        if not all(type(number) is int for number in heads_of.values()):
            raise ValueError(
                f"{checkpoint.path} must say how many heads it has, in `{architecture}.attention.head_count`. Got "
                f"{heads_of}. Write rules of your own, with `eqq.io.names.rotary_halves`."
            )
        of_head = lambda x: To(f"layers.{{n}}.attention.{x}.{{p}}", apply=rotary_halves(heads_of[x]))
    own: Rules = {}
    if architecture == "phi3":
        own[f"{blocks}ffn_up.{{p}}"] = ("layers.{n}.mlp.gate.{p}", "layers.{n}.mlp.up.{p}")
    elif architecture == "bert":
        own = {
            "token_embd.weight": "embeddings.word.weight",
            "token_types.weight": "embeddings.token_type.weight",
            "position_embd.weight": "embeddings.position.weight",
            f"{blocks}attn_output_norm.{{p}}": "layers.{n}.attention_norm.{p}",
            f"{blocks}layer_output_norm.{{p}}": "layers.{n}.mlp_norm.{p}",
        }
    rules: Rules = {
        "token_embd.weight": "embedding.weight",
        "token_embd_norm.{p}": "embeddings.norm.{p}",
        "position_embd.weight": "position.weight",
        f"{blocks}attn_norm.{{p}}": norm("layers.{n}.attention_norm.{p}"),
        f"{blocks}attn_q.{{p}}": of_head("q"),
        f"{blocks}attn_k.{{p}}": of_head("k"),
        f"{blocks}attn_v.{{p}}": "layers.{n}.attention.v.{p}",
        f"{blocks}attn_qkv.{{p}}": tuple(f"layers.{{n}}.attention.{x}.{{p}}" for x in "qkv"),
        f"{blocks}attn_output.{{p}}": "layers.{n}.attention.output.{p}",
        f"{blocks}attn_{{x:q|k}}_norm.weight": norm("layers.{n}.attention.{x}_norm.weight"),
        f"{blocks}ffn_norm.{{p}}": norm("layers.{n}.mlp_norm.{p}"),
        f"{blocks}ffn_{{x:gate|up|down}}.{{p}}": "layers.{n}.mlp.{x}.{p}",
        f"{blocks}ffn_gate_inp.weight": "layers.{n}.router.weight",
        f"{blocks}ffn_{{x:gate|up|down}}_exps.weight": f"{_EXPERTS}{{x}}.weight",
        f"{blocks}post_attention_norm.weight": norm("layers.{n}.attention_post_norm.weight"),
        f"{blocks}post_ffw_norm.weight": norm("layers.{n}.mlp_post_norm.weight"),
        "output_norm.{p}": norm("norm.{p}"),
        "output.weight": "head.weight",
        "rope_freqs.weight": None,
    }
    return _rules(overrides, _rules(own, rules))


def rotary_halves(heads: int) -> Callable[[Any], Any]:
    """Returns a function that undoes llama.cpp's order of the rows of `q` and `k`: a gather, of packed rows too.

    llama.cpp rotates neighbours, row `2 i` with `2 i + 1`; Hugging Face rotates the halves of a head, row `i` with
    `i + size / 2`.

    **Arguments:**

    - `heads`: the number of heads of this array; `k` may have fewer than `q`.

    **Returns:**

    A function for [`eqquant.io.To`][].
    """

    def undo(x: Any) -> Any:
        rows = x.shape[0]
        if heads < 1 or rows % (2 * heads):
            raise ValueError(f"{rows} rows are not {heads} heads of two halves")
        return take(x, np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1))

    undo.__name__ = f"rotary_halves({heads})"
    return undo


def minus_one(x: Any) -> Any:
    return x - 1


_FAMILIES: dict[str, tuple[Callable[..., Rules], str]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma"), (llama, "model.")),
    **dict.fromkeys(("gemma2", "gemma3_text"), (gemma, "model.")),
    "phi3": (phi3, "model."),
    "mixtral": (mixtral, "model."),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), (qwen_moe, "model.")),
    "gpt2": (gpt2, "transformer."),
    "bert": (bert, "bert."),
    "vit": (vit, "vit."),
}


def of(checkpoint: Any, overrides: Overrides = None) -> Names:
    """Returns the rules for a checkpoint, by what it says of itself.

    That is `model_type` in `config.json`, or the architecture of a GGUF file. Arrays of our own files, and of
    dictionaries, keep their names; unless a file was converted, and has the names of the family of its `config.json`.

    **Arguments:**

    - `checkpoint`: the result of [`eqquant.io.open`][].
    - `overrides`: rules that come first.

    **Returns:**

    Rules for [`eqquant.io.load_into`][].

    **Raises:**

    `ValueError` for a family without ready names.
    """
    if not isinstance(checkpoint, Checkpoint) or (checkpoint.dialect == "eqquant" and not _is_converted(checkpoint)):
        return _rules(overrides, {re.compile("(?P<path>.*)", re.DOTALL): "{path}"})
    if checkpoint.dialect == "gguf":
        return gguf(checkpoint, overrides)
    kind = checkpoint.config.get("model_type")
    if kind not in _FAMILIES:
        raise ValueError(
            f"`names` must be given for {checkpoint.path}. Its config.json has the `model_type` {kind!r}, and ready "
            f"names are for {', '.join(_FAMILIES)}. {did_you_mean(str(kind), _FAMILIES)}".rstrip()
        )
    family, prefix = _FAMILIES[kind]
    return family(overrides, prefix=prefix if any(name.startswith(prefix) for name in checkpoint) else "")


def _is_converted(checkpoint: Checkpoint) -> bool:
    """Whether a file of ours has the names of another library: those of the family of its `config.json`."""
    prefix = _FAMILIES.get(str(checkpoint.config.get("model_type")), (None, ""))[1]
    return prefix != "" and any(name.startswith(prefix) for name in checkpoint)


def rename(names: Mapping[Any, Target], changes: Mapping[str, str]) -> Rules:
    """Changes the paths of rules: replaces each text by another, in this order.

    !!! Example

        ```python
        names = eqq.io.names.rename(eqq.io.names.llama(), {"attention.{x}.": "attn.w{x}.", "embedding": "tokens"})
        stacked = eqq.io.names.rename(eqq.io.names.llama(), {"layers.{n}": "layers"})    # one stack, for `scan`
        ```

    **Arguments:**

    - `names`: rules.
    - `changes`: parts of paths, and what they become.

    **Returns:**

    New rules.

    **Raises:**

    `ValueError` if a text is in no path.
    """
    seen = set()

    def changed(path: str) -> str:
        for old, new in changes.items():
            if old in path:
                seen.add(old)
            path = path.replace(old, new)
        return path

    def one(target: Target) -> Target:
        if target is None or isinstance(target, str):
            return target if target is None else changed(target)
        if isinstance(target, To):
            path = changed(target.path) if isinstance(target.path, str) else tuple(map(changed, target.path))
            return To(path, target.transpose, target.axis, target.tied, target.apply, target.dequantize)
        return tuple(map(changed, target))

    renamed = {key: one(target) for key, target in names.items()}
    if absent := [old for old in changes if old not in seen]:
        paths = [path for target in names.values() for path in _paths(target)]
        raise ValueError(
            f"Each text of `changes` must be a part of a path. Got {absent[0]!r}, in none of {', '.join(paths[:10])}."
        )
    return renamed


def _paths(target: Target) -> tuple[str, ...]:
    return () if target is None else (target if isinstance(target, To) else To(target)).paths


def _rules(overrides: Overrides, rules: Mapping[Any, Target]) -> Rules:
    """Overrides come first, because the first rule that matches holds."""
    first = dict(overrides or {})
    return {**first, **{key: target for key, target in rules.items() if key not in first}}
