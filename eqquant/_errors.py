"""Error messages that suggest a fix: a similar name, or our word for another library's."""

import difflib
import functools as ft
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, ParamSpec, TypeVar


_P = ParamSpec("_P")
_R = TypeVar("_R")


# Remedies for callers of Python functions. The command line has its own.
REMEDIES = {
    "not finite": "Replace them, for instance with `jnp.nan_to_num`, or leave this array in float.",
    "does not fit": "Quantize the float array to a format that fits, or write `q.dequantize()`.",
    "act-order": "Write `w.dequantize()`, or quantize that.",
    "llama.cpp": "Correct it, or pass names and metadata of your own to `eqq.io.write`.",
}


class Message(str):
    """An error message whose remedy depends on how the library is called.

    - `problem`: the rule and the value that breaks it.
    - `remedy`: a key of `REMEDIES`.
    """

    problem: str
    remedy: str

    def __new__(cls, problem: str, remedy: str) -> "Message":
        self = super().__new__(cls, f"{problem} {REMEDIES[remedy]}")
        self.problem, self.remedy = problem, remedy
        return self

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return Message, (self.problem, self.remedy)


def name_type(x: Any) -> str:
    """Returns the name of the type of `x` with its article: "a list", "an Array"."""
    name = type(x).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "Did you mean ...?" with the nearest known name, or "" if none is near."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {matches[0]!r}?" if matches else ""


# What to write for names of other libraries that users try as `eqq.name`.
_LAYERS = "Layers keep their classes, and their weights are quantized: "
NAMES_ELSEWHERE = {
    **dict.fromkeys(("Linear4bit", "Params4bit"), f"{_LAYERS}`eqq.quantize_tree(model, 'nf4')`."),
    **dict.fromkeys(("Linear8bitLt", "QuantizedLinear", "QuantizedEmbedding"), f"{_LAYERS}`eqq.quantize_tree(model)`."),
    **dict.fromkeys(("QuantizedTensor", "QTensor", "QArray"), "It is called `eqq.QuantizedArray`."),
    **dict.fromkeys(("KVCache", "QuantizedKVCache"), "It is called `eqq.QuantizedCache`."),
    **dict.fromkeys(("fake_quant", "FakeQuantize"), "It is called `eqq.fake_quantize`."),
    **dict.fromkeys(("QuantizationConfig", "QuantizationRule"), "It is called `eqq.QuantConfig`."),
    **dict.fromkeys(("get_peft_model", "LoraConfig"), "Write `eqq.loraify(model, rank=8, key=key)`."),
    **dict.fromkeys(
        ("adam8bit", "Adam8bit", "adamw8bit", "AdamW8bit", "AdamW4bit"),
        "Write `eqq.quantize_state(optax.adamw(1e-3))`.",
    ),
    **dict.fromkeys(
        ("quantize_", "quantize_model", "quantize_params"),
        "Write `model = eqq.quantize_tree(model, 'int8')`, which returns a new model.",
    ),
    **dict.fromkeys(
        ("Int8WeightOnlyConfig", "Int4WeightOnlyConfig"),
        "A configuration is a format: `eqq.quantize_tree(model, eqq.Int8())`.",
    ),
    "Int8DynamicActivationInt8WeightConfig": "Write `eqq.quantize_tree(model, 'int8', activations='int8')`.",
    "BitsAndBytesConfig": "A configuration is a format: `eqq.NF4(double_quant=True)`.",
    "GPTQConfig": "Write `eqq.quantize_tree(model, 'int4', method=eqq.GPTQ(stats))`.",
}


def suggest_name(name: str, rooms: Iterable[ModuleType]) -> str:
    """Returns where a name that `eqquant` does not have is, or our name for it, or ""."""
    found = [room.__name__.replace("eqquant", "eqq") for room in rooms if name in dir(room) and name[0] != "_"]
    return f"It is `{found[0]}.{name}`." if found else NAMES_ELSEWHERE.get(name, "")


_SPELLINGS = {
    **dict.fromkeys(("bits", "num_bits", "nbits", "w_bit"), "bits"),
    **dict.fromkeys(("group_size", "block_size", "q_group_size"), "block_size"),
    **dict.fromkeys(("symmetric", "sym"), "symmetric"),
}


def suggest_format(given: Mapping[str, Any]) -> str:
    """Returns advice with the format that keywords of other libraries mean.

    `bits=4, group_size=64` is `eqq.Int4(block_size=64)`.
    """
    arguments = {_SPELLINGS[name]: value for name, value in given.items() if name in _SPELLINGS}
    bits = arguments.pop("bits", 4)
    if bits not in (2, 3, 4, 5, 6, 8):
        return "The format says that, and integers have 2, 3, 4, 5, 6 or 8 bits: write `eqq.Int4()`, for instance."
    if arguments.get("block_size") == -1:
        arguments["block_size"] = None
    fields = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    return f"The format says that: write `eqq.Int{bits}({fields})`."


def check_keywords(cls: type, given: Iterable[str]) -> None:
    """Raises for a keyword that a format does not take, and suggests our name for it."""
    parameters = inspect.signature(cls).parameters
    unknown = [name for name in given if name not in parameters]
    if unknown and not any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        our_name = _SPELLINGS.get(unknown[0])
        hint = f"It is called `{our_name}`." if our_name in parameters else did_you_mean(unknown[0], parameters)
        takes = f"It takes {', '.join(parameters) or 'no arguments'}."
        raise TypeError(f"`{cls.__name__}` has no argument `{unknown[0]}`. {hint or takes}")


FORMAT_KEYWORDS = {
    **dict.fromkeys(_SPELLINGS, suggest_format),
    **dict.fromkeys(("fmt", "mode", "qtype", "quant_type", "bnb_4bit_quant_type"), "It is called `format`."),
    **dict.fromkeys(
        ("double_quant", "compress_statistics", "bnb_4bit_use_double_quant"),
        "The format says that: write `eqq.NF4(double_quant=True)`.",
    ),
    "scale_dtype": "The format says that: write `eqq.Int4(scale_dtype='bfloat16')`.",
}


def suggest_keywords(
    **remedies: str | Callable[[Mapping[str, Any]], str],
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Returns a decorator: an unknown keyword raises a `TypeError` with a suggestion.

    `remedies` maps keywords of other libraries to the advice that the error gives, or to a function that makes it from
    all keywords. For any other keyword, the error lists all arguments and suggests the nearest.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        known = [name for name, p in inspect.signature(function).parameters.items() if p.kind != p.VAR_KEYWORD]

        @ft.wraps(function)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in kwargs:
                if name not in known:
                    remedy = remedies.get(name)
                    remedy = remedy(kwargs) if callable(remedy) else remedy
                    remedy = remedy or f"It takes {', '.join(known)}. {did_you_mean(name, known)}".rstrip()
                    raise TypeError(f"`{function.__name__}` has no argument `{name}`. {remedy}")
            return function(*args, **kwargs)

        return wrapper

    return decorate
