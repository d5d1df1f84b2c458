"""One array of a checkpoint, which may be stored in several tensors."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NoReturn

import jax
import jax.numpy as jnp

from ..._formats import Int2, Int3, Int4, Int5, Int6, Int8
from ..._formats.base import AbstractFormat
from .._entry import AnyArray, Entry
from .._files import Files
from .._memory import to_jax
from .._repack import repack, Unpacked
from .._tensors import DTYPES, SMALL_FLOATS, StoredTensor
from ._settings import find_settings, find_unknown


# The integer format of each width.
INTEGERS = {8: Int8, 6: Int6, 5: Int5, 4: Int4, 3: Int3, 2: Int2}
# Suffixes that libraries put beside `L.weight`: a tensor `L.<part>`. Beside an array of another name, such as
# `experts.up`, `weight_scale` stands for `experts.up_scale`. Tensors of activations, such as `input_scale`, are arrays
# of their own.
PARTS = tuple(
    """
    weight weight_scale weight_scale_inv weight_scales_inv weight.scale scale qscale_weight scale_weight weight_scale_2
    pre_quant_scale comfy_quant
    weight_packed weight_zero_point weight_g_idx weight_shape weight_shape_original weight_global_scale
    qweight qzeros scales g_idx biases
    weight.absmax weight.quant_map weight.nested_absmax weight.nested_quant_map SCB weight_format
    weight.quant_state.bitsandbytes__nf4 weight.quant_state.bitsandbytes__fp4
    weight_blocks weight_scales
    _weight_qdata _weight_scale _weight__scale_e4m3 _weight__per_tensor_scale _weight_zero_point
    _weight_act_pre_scale
    """.split()
)
Parts = dict[str, StoredTensor]


@dataclasses.dataclass(frozen=True, eq=False)
class Item:
    """An array of a checkpoint.

    - `entry`: its shape, dtype and format.
    - `stored_as`: its name in the file: a dtype, or the name of a layout.
    - `tensors`: the tensors that hold it. A reader gives the main one, which errors name; `read_items` adds its
        companions.
    - `load`: reads it, or its parts, which are repacked.
    - `problem`: why it cannot be read, if that is known. Then `load` raises.
    """

    entry: Entry
    stored_as: str
    tensors: tuple[StoredTensor, ...]
    load: Callable[[], AnyArray | Unpacked]
    problem: str | None = None

    def read(self) -> AnyArray:
        found = self.load()
        return repack(found, self.entry, self.tensors[0]) if isinstance(found, Unpacked) else found

    @property
    def struct(self) -> AnyArray | jax.ShapeDtypeStruct:
        """The array that `read` returns, without values."""
        if self.problem is not None or self.entry.kind == "key":  # neither has a dtype of NumPy's
            return jax.ShapeDtypeStruct(self.entry.shape, jnp.uint8)
        return self.entry.struct

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


def plain(t: StoredTensor) -> Item:
    """A dense array."""
    if t.dtype not in DTYPES:
        return unreadable_item(t, t.dtype, f"eqquant does not know the dtype {t.dtype[:40]!r}")
    dtype = DTYPES[t.dtype][1]
    if dtype is None:
        return unreadable_item(t, t.dtype, f"no library agrees about the order of packed {t.dtype}")
    return Item(Entry("array", dtype, t.shape), t.dtype, (t,), lambda: to_jax(t.array()))


def unreadable_item(t: StoredTensor, stored_as: str, problem: str, dtype: str | None = None) -> Item:
    """An array that this package cannot read, with the reason."""
    load = lambda: t.fail(f"{problem[0].upper()}{problem[1:]}.")
    return Item(Entry("array", dtype or t.dtype, t.shape), stored_as, (t,), load, problem)


def _damaged_item(tensors: tuple[StoredTensor, ...], error: str) -> Item:
    """An array whose tensors do not fit together.

    The checkpoint lists it, and reading it raises the error.
    """

    def load() -> NoReturn:
        raise ValueError(error)

    return Item(Entry("array", tensors[0].dtype, tensors[0].shape), tensors[0].dtype, tensors, load, error)


def weight(
    format: AbstractFormat, shape: tuple[int, ...], dtype: str, axes: tuple[int, ...] = (-1,), permuted: bool = False
) -> Entry:
    """Describes a quantized weight.

    `permuted`: whether its last axis is stored in another order.
    """
    return Entry("quantized", dtype, shape, format, axes, order=(-1, shape[-1:]) if permuted else None)


def find_weights(files: Files, *anchors: str) -> list[str]:
    """Returns the name of each weight that has one of these parts."""
    found: dict[str, None] = {}
    for anchor in anchors:
        rest = anchor.removeprefix("weight")
        end, weight = (rest, "") if rest != anchor else (f".{anchor}", ".weight")
        found |= {name.removesuffix(end) + weight: None for name in files.tensors if name.endswith(end)}
    return list(found)


def group(files: Files, weights: Iterable[str]) -> dict[str, Parts]:
    """Returns the tensors of each weight, by their names beside `weight`.

    They are those of `PARTS`, and all whose names begin with `L.weight`.
    """
    tensors, others = files.tensors, dict[str, dict[str, StoredTensor]]()
    for name, t in tensors.items():
        layer, found, rest = f".{name}".rpartition(".weight")
        if found and rest[:1] in (".", "_"):
            others.setdefault(f"{layer}.weight"[1:], {})[f"weight{rest}"] = t

    def parts(weight: str) -> Parts:
        layer = weight.removesuffix("weight") if f".{weight}".endswith(".weight") else None
        places = {part: weight + part.removeprefix("weight") for part in PARTS if part.startswith("weight")}
        if layer is not None:
            places |= {part: layer + part for part in PARTS if not part.startswith("weight")}
        return {part: tensors[name] for part, name in places.items() if name in tensors} | others.get(weight, {})

    return {weight: parts(weight) for weight in weights}


def take(parts: Parts, name: str, t: StoredTensor) -> StoredTensor:
    """Takes out a part that `t` must have beside it."""
    if name not in parts:
        t.fail(f"It must have a companion {name.rpartition('.')[2]!r}. Got none.")
    return parts.pop(name)


def read_items(
    files: Files,
    groups: Mapping[str, Parts] | Iterable[str],
    read: Callable[[str, Parts], Item],
    settings: Mapping[str, object] | None = None,
) -> dict[str, Item]:
    """Returns an item for each weight, and for every tensor that belongs to none.

    `groups`: the tensors of each weight, or the names of the weights.

    `read` takes out the parts that it uses, or whose values it checks. A part that is left is an error, as is an
    unknown one of the `settings` (by default those of `config.json`): both may change values.
    """
    unknown = find_unknown(find_settings(files) if settings is None else settings)
    groups = groups if isinstance(groups, Mapping) else group(files, groups)

    def item(name: str, parts: Parts) -> Item:
        left, tensors = dict(parts), parts.values()
        try:
            found = read(name, left)
            if unknown is not None and found.problem is None:
                found.tensors[0].fail(
                    f"eqquant does not know the setting {unknown[:80]!r} of quantization in the configuration, which "
                    "may change values. Remove it if it does not."
                )
            for t in left.values() if found.problem is None else ():
                t.fail(
                    f"It stands beside {name!r}, is no part of its layout, {found.stored_as}, and may change values. "
                    "Remove it if it does not."
                )
        except ValueError as e:
            return _damaged_item(tuple(tensors), str(e))
        first = found.tensors[0].name
        return dataclasses.replace(found, tensors=tuple(sorted(tensors, key=lambda t: t.name != first)))

    used = {t.name for parts in groups.values() for t in parts.values()}
    return {name: item(name, parts) for name, parts in groups.items()} | plain_arrays(files, used)


def plain_arrays(files: Files, used: Collection[str] = ()) -> dict[str, Item]:
    """Returns an item for every tensor but for the `used` ones.

    If `config.json` says that the checkpoint is quantized, a tensor of codes without a scale is an error.
    """
    settings = find_settings(files)
    method = str(settings.get("quant_method", "quantized"))[:40]
    problem = f"`config.json` says that the weights are {method}, and eqquant finds no scale for this one"
    return {
        name: unreadable_item(t, t.dtype, f"{problem}, {t.dtype}") if settings and _holds_codes(t) else plain(t)
        for name, t in files.tensors.items()
        if name not in used
    }


def _holds_codes(t: StoredTensor) -> bool:
    if t.dtype in SMALL_FLOATS:
        return bool(t.shape)
    return len(t.shape) > 1 and (t.dtype == "I8" or (t.dtype in ("U8", "I32", "U32") and t.name.endswith("weight")))


def as_format(t: StoredTensor, cls: Callable[..., AbstractFormat], *fields: object) -> AbstractFormat:
    """Makes the format of a weight.

    Raises an error that names `t` if no format has these fields.
    """
    try:
        return cls(*fields)
    except ValueError as e:
        t.fail(f"Got a layout for which eqquant has no format. {e}")
