"""Names of formats."""

from .._errors import did_you_mean
from .base import AbstractFormat, FORMATS


def known_formats() -> dict[str, type[AbstractFormat]]:
    """Returns the classes of formats that have been defined, by their names."""
    return {cls.__name__: cls for cls in FORMATS.values()}


_OF_METHODS = "That names a method, not a format: write a format such as 'int4', and pass a method as `method`."
_REMEDIES = {
    "fp4": "For 4-bit floats write 'mxfp4' or 'nvfp4'; for normal floats 'nf4'.",
    "fp16": "float16 needs no quantization: cast with `astype`.",
    "bf16": "bfloat16 needs no quantization: cast with `astype`.",
    "float8": "For 8-bit floats write 'fp8'.",
    "4bit": "For four bits write 'nf4' or 'int4'.",
    "8bit": "For eight bits write 'int8' or 'fp8'.",
    **{
        name: f"For dynamic quantization write '{format}', and pass `activations='{activations}'` to `quantize_tree`."
        for names, format, activations in (
            (("int8dynamic", "w8a8"), "int8", "int8"),
            (("int4dynamic", "w4a8"), "int4", "int8"),
            (("fp8dynamic", "float8dynamic"), "fp8", "fp8"),
        )
        for name in names
    },
    **{
        f"{prefix}{bits}{suffix}": f"Weight-only quantization is the default: write 'int{bits}'."
        for bits in (4, 8)
        for prefix, suffix in (("int", "weightonly"), ("w", "a16"))
    },
    "int7": "For seven bits write 'int8', or 'int6'.",
    "int1": "For one bit write 'binary'.",
    **dict.fromkeys(("gptq", "awq", "hqq", "mse", "absmax"), _OF_METHODS),
    **{
        f"q{bits}k{size}": f"That names a mix of GGUF's formats for the layers of a model: write 'q{bits}_k'."
        for bits in (2, 3, 4, 5, 6)
        for size in ("s", "m", "l")
    },
    **{
        name: f"That names a mix of GGUF's formats for the layers of a model: write '{name[:3]}_s'."
        for name in ("iq2m", "iq3m", "iq3xs")
    },
    "tq10": "That is a packing of the values of 'tq2_0' in files.",
}


def as_format(format: AbstractFormat | str, argument: str = "format") -> AbstractFormat:
    """Returns the format of a lower-case name: `"nf4"`, or one with bits, `"trellis2"`.

    Returns a format unchanged.

    Errors name the `argument` that it was given as.
    """
    if isinstance(format, AbstractFormat):
        return format
    if isinstance(format, type) and issubclass(format, AbstractFormat):
        name = format.__name__
        raise TypeError(f"`{argument}` must be an instance. Got the class {name}. Write `{name}()`.")
    if not isinstance(format, str):
        raise TypeError(f"`{argument}` must be a format or the name of one. Got {format!r}. For instance 'int8'.")
    cls, fields = _find(format.lower())
    if cls is None:
        plain = format.lower().replace("-", "").replace("_", "")
        meant = f"Did you mean {plain!r}?" if _find(plain)[0] else did_you_mean(format.lower(), FORMATS)
        remedy = _REMEDIES.get(plain, meant)
        raise ValueError(f"`{argument}` must be one of {', '.join(sorted(FORMATS))}. Got {format!r}. {remedy}".rstrip())
    try:
        return cls(**fields)
    except TypeError:
        raise ValueError(
            f"`{argument}` {format!r} has no defaults, so its name is not enough. Got {format!r}. Construct it: "
            f"`{cls.__name__}(...)`{_names_by_bits(cls)}."
        ) from None


def _find(name: str) -> tuple[type[AbstractFormat] | None, dict[str, int]]:
    """Returns the class of a name, and the bits that it ends with: `"trellis2"`, `"mlx4"`."""
    if name in FORMATS or not name[-1:].isdecimal():
        return FORMATS.get(name), {}
    cls = FORMATS.get(name[:-1])
    return cls if cls is not None and "bits" in cls.__dataclass_fields__ else None, {"bits": int(name[-1])}


def _names_by_bits(cls: type[AbstractFormat]) -> str:
    name = cls.__name__.lower()
    return f", or name its bits: '{name}2'" if "bits" in cls.__dataclass_fields__ else ""
