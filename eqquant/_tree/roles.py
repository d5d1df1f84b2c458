"""The role of an array that no product uses, by the layer that holds it or by its name.

`role_by_place` is certain: the class of a layer, or the name of a bias or a norm. `role_by_name` follows conventions,
so rules of the user and observed products override it.
"""

import re

import equinox as eqx

from .leaves import key_name, Leaf


def role_by_place(leaf: Leaf) -> str | None:
    """Returns the role of an array by its layer: state, bias, parameter of a norm; or `None`."""
    return _find_state(leaf) or elementwise_role(leaf)


def elementwise_role(leaf: Leaf) -> str | None:
    """Returns the role of an array that a layer adds or multiplies by elementwise, or `None`."""
    if _is_norm_parameter(leaf):
        return "a parameter of a normalization layer"
    return "a bias" if _is_bias(leaf) else None  # whatever its shape: biases of stacked layers have two dimensions


# Matched against the name of the array itself, in lower case, not of a list index: `pos_embed.weight` is a weight.
_ROLES = {
    "a position table": re.compile(
        r"(^|_)pos(ition(al)?)?_?(emb|enc)[a-z]*(_(?!proj|weight)\w+)?$"
        r"|^(abs_|rel_|learned_)?(pos|position)$|(^|_)pos(ition(al)?)?_(table|tokens?)$|^(pe|wpe)$|(^|_)rel_pos_[hwt]$"
        r"|(^|_)(freqs?|freqs_cis|cos|sin|rotary|rope)(_cached?)?$"
    ),
    "a learned token": re.compile(
        r"(^|_)(cls|class|reg|register|mask|dist|distill(ation)?|prompt|meta|mem|memory|sink|summary|pool|latent|null"
        r"|storage|start|sos|bos|eos|pad)_?(tokens?|emb(ed|eds|edding|eddings)?)$|^(cls|registers?)$"
    ),
    "a rate or a logarithm": re.compile(
        r"(^|_)logs?(_|$)|(^|_)(decays?|lambdas?|dt|rates?)(_(re|im|real|imag))?$"
        r"|^time_(decay|first|faaaa)$|^a_(real|imag)$|^ssm_[ad]$"
    ),
    "a factor or an offset of single values": re.compile(
        r"(^|_)(gammas?|betas?|alphas?|deltas?|gains?|scales?|shifts?|layer_?scale|ls)(_?\d+)?$"
    ),
    "state": re.compile(
        r"(^|_)(running|moving|ema|caches?|cached|buffers?)(_|$)"
        r"|(^|_)(ids|idx|index|indices|positions|masks?|tril|triu|steps?|counts?)$"
    ),
}
# Such a layer adds its array, unless its class says that it is an embedding: those are looked up, whatever they embed.
_POSITION_LAYER = re.compile(r"Pos(ition(al)?)?(Emb|Enc)[a-z]*(\d+D)?$")
_LOW_RANK = re.compile(r"^lora(_|$)|(^|_)lora_?(a|b|up|down)$")


def role_by_name(leaf: Leaf) -> str | None:
    """Returns the role of an array by its name, such as `pos_embed` or `A_log`, or `None`."""
    names = [key_name(key).lower() for key in leaf.keys]
    in_factors = "lora" in type(leaf.layer).__name__.lower()
    if any(_LOW_RANK.search(name) or (in_factors and name.strip("_") in ("a", "b")) for name in names):
        return "a low-rank factor, by its name"
    name = next((name for name in (leaf.name.lower(), *reversed(names)) if not name.isdigit()), "")
    if _POSITION_LAYER.search(type(leaf.layer).__name__) and not isinstance(leaf.layer, eqx.nn.Embedding):
        return "a position table, by the name of its layer"
    role = next((role for role, pattern in _ROLES.items() if pattern.search(name)), None)
    return None if role is None else f"{role}, by its name"


def _find_state(leaf: Leaf) -> str | None:
    """Returns the role of a leaf of state (of Equinox, optax, Flax, or a cache), or `None`."""
    holders = [
        node for node in leaf.nodes if isinstance(node, (eqx.nn.State, eqx.nn.StateIndex)) or _is_optax_state(node)
    ]
    holder = type(leaf.layer).__name__
    if holder.endswith("Cache") or holder == "BatchStat":
        holders.append(leaf.layer)
    return f"state, in a `{type(holders[0]).__name__}`" if holders else None


def _is_optax_state(node: object) -> bool:
    return type(node).__module__.split(".")[0] == "optax" and type(node).__name__.endswith("State")


_BIAS = re.compile(r"(^|_)bias")
_HOLDS_BIASES = re.compile(r"(^|_)bias(es)?(_?\d+)?$")
# `LayerNorm_0`, `input_layernorm`, `ln_f`, `norm_out`, `bn1`; but not `norm_proj`.
_NORM = re.compile(
    r"(norms?|(^|_)(ln|bn|gn))"
    r"(_?\d+|_(f|final|in|out|pre|post|before|after|attn|attention|self|cross|mlp|ffn|q|k|v))?$"
)
_NORM_PARAMETERS = {"scale", "weight", "bias", "offset", "gain", "gamma", "beta", "g", "b", "mean", "var"}
# These names mean a layer that normalizes a weight, or wraps another layer, so it holds real weights.
_NO_NORM = re.compile(r"(weight|spectral|pre|post|add)_?norms?(_?\d+)?$")


def _is_bias(leaf: Leaf) -> bool:
    held = any(_HOLDS_BIASES.search(name.lower()) for name, _ in leaf.ancestors())
    return _BIAS.search(leaf.name.lower()) is not None or held


def _is_norm_parameter(leaf: Leaf) -> bool:
    # By the class of the layer, or in a dictionary of parameters by the names of both. Flax calls its weights `kernel`.
    if leaf.name == "kernel":
        return False
    has_norm_name = leaf.name in _NORM_PARAMETERS
    return any(_is_norm_layer(node) or (has_norm_name and _is_norm_name(name)) for name, node in leaf.ancestors())


def _is_norm_layer(node: object) -> bool:
    name = type(node).__name__
    return name.endswith("Norm") and _NO_NORM.search(name.lower()) is None


def _is_norm_name(name: str) -> bool:
    return _NORM.search(name.lower()) is not None and _NO_NORM.search(name.lower()) is None
