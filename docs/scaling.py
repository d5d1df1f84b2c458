"""Computes the memory and traffic of sharded models: prints the tables of `sharding.md`, and checks their formulas.

Bytes are those of `eqq.tree_nbytes`, divided by `eqq.tree_shardings`; nothing is allocated. `--check` and `--write` are
those of `format_table.py`. The script compiles small programs for eight virtual devices; the bytes that they hold and
move must equal the formulas. `--tpu` compiles them for a slice of a TPU instead, which needs no TPU, but

    pip install "libtpu==0.0.42.*"  # the version that `jax[tpu]` names
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v5litepod-8 TPU_WORKER_HOSTNAMES=localhost \\
        TPU_WORKER_ID=0 python docs/scaling.py --tpu v5e:2x4
"""

import os


os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import argparse
import math
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import optax
from format_table import markdown, update_pages
from jax.experimental import mesh_utils, topologies
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, Float, PyTree

import eqquant as eqq


class Shape(NamedTuple):
    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int


# The Llama 3 Herd of Models, table 3.
MODELS = (
    Shape("8B", 32, 4096, 32, 8, 14336, 128256),
    Shape("70B", 80, 8192, 64, 8, 28672, 128256),
    Shape("405B", 126, 16384, 128, 8, 53248, 128256),
)
FORMATS: dict[str, eqq.extend.AbstractFormat | None] = {
    "bf16": None,
    "int8": eqq.Int8(),
    "NF4": eqq.NF4(double_quant=True),
}


abstract_mesh = lambda data, model: AbstractMesh((data, model), ("data", "model"))


#
# Models, as shapes
#


def transformer(shape: Shape, format: eqq.extend.AbstractFormat | None, dtype: Any = jnp.bfloat16) -> PyTree:
    """The weights, with all layers stacked. What is not a weight of a layer stays in `dtype`."""
    _, n, width, heads, kv_heads, ffn, vocabulary = shape
    kv = width // heads * kv_heads
    of = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    layers = {"q": of(n, width, width), "k": of(n, kv, width), "v": of(n, kv, width), "o": of(n, width, width)}
    layers |= {"gate": of(n, ffn, width), "up": of(n, ffn, width), "down": of(n, width, ffn)}
    layers |= {"attention_norm": of(n, width), "ffn_norm": of(n, width)}
    model = {"embedding": of(vocabulary, width), "layers": layers, "norm": of(width), "head": of(vocabulary, width)}
    return model if format is None else eqq.quantize_tree(model, {"*norm": None, "layers.*": format})


COLUMN, ROW, TABLE = ("q", "k", "v", "gate", "up"), ("o", "down"), ("embedding", "head")
# By which mesh axes outputs and inputs, the last two axes of a weight, are divided: tensor parallel along "model", and
# fully sharded along "data". Where there is a choice it is outputs, because blocks run along inputs.
LAYOUT: dict[str, tuple[Any, Any]] = dict.fromkeys(COLUMN, (("model", "data"), None))
LAYOUT |= dict.fromkeys(ROW, ("data", "model")) | dict.fromkeys(TABLE, ("model", "data"))


def shardings(tree: PyTree, mesh: Any) -> PyTree:
    """The sharding of each array of a model, of its low-rank factors, or of optimizer state that is like it."""

    def spec(path: str, leaf: Any) -> NamedSharding:
        names = path.split(".")
        factor = names[-1] if names[-1] in ("a", "b", "base") else None
        outputs, inputs = LAYOUT.get(names[-2 if factor else -1], (None, None))
        last = {"a": (None, inputs), "b": (outputs, None)}.get(factor or "", (outputs, inputs))
        entries = (*[None] * (leaf.ndim - 2), *last) if leaf.ndim > 1 else ()
        named = NamedSharding(mesh, P(*entries))
        if "mu" in names or "nu" in names:
            # As `quantize_state` does: whole along an axis whose parts would end within a block.
            try:
                eqq.tree_shardings(leaf, named)
            except ValueError:
                named = NamedSharding(mesh, P(*entries[:-1]))
        return named

    return eqq.tree_shardings(tree, spec)


def per_device(tree: PyTree, mesh: Any) -> int:
    """The bytes that each device holds of a tree."""
    pairs = zip(jtu.tree_leaves(tree), jtu.tree_leaves(shardings(tree, mesh)), strict=True)
    return sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in pairs)


def without_data(entry: Any) -> Any:
    """An entry of a spec, once what "data" divides is gathered."""
    names = entry if isinstance(entry, tuple) else (entry,)
    return tuple(name for name in names if name not in ("data", None)) or None


def gathered(tree: PyTree, mesh: Any) -> int:
    """The bytes that all-gathers along "data" leave on each device."""
    total = 0
    for x, s in zip(jtu.tree_leaves(tree), jtu.tree_leaves(shardings(tree, mesh)), strict=True):
        rest = NamedSharding(mesh, P(*map(without_data, s.spec)))
        whole, part = (math.prod(s.shard_shape(x.shape)) for s in (rest, s))
        total += whole * x.dtype.itemsize if whole != part else 0
    return total


def size(nbytes: float) -> str:
    """In GB of 10^9 bytes, in three digits."""
    gb = nbytes / 1e9
    return f"{gb:,.{max(2 - math.floor(math.log10(gb)), 0)}f}"


#
# The tables
#


def lora_state(model: PyTree) -> PyTree:
    """Low-rank factors for every quantized weight, and the state of Adam for them."""
    lora = eqq.loraify(model, rank=16, key=jr.key(0))
    factors = eqx.filter(lora, eqq.trainable_mask(lora), is_leaf=eqq.is_quantized)
    return factors, optax.adam(1e-4).init(factors)


def memory() -> str:
    """GB per device: tensor parallel over eight devices, and fully sharded over the rest."""
    adam, rows = optax.adam(1e-4), []
    for shape in MODELS:
        trees = [transformer(shape, format) for format in FORMATS.values()]
        exact, low = (jax.eval_shape(eqq.float_masters(o).init, trees[-1]) for o in (adam, eqq.quantize_state(adam)))
        trees += [exact.masters, exact.inner_state, low.inner_state, eqx.filter_eval_shape(lora_state, trees[-1])]
        for n in (1, 8, 64):
            held = [per_device(tree, abstract_mesh(max(n // 8, 1), min(n, 8))) for tree in trees]
            rows.append((shape.name, str(n), *map(size, held)))
    header = (*(f"{name}:" for name in FORMATS), "Masters:", "Adam:", "8-bit Adam:", "LoRA and its Adam:")
    return markdown(("Model", "Devices:", *header), rows)


def one_layer(shape: Shape) -> list[PyTree]:
    return [transformer(shape._replace(layers=1), format)["layers"] for format in FORMATS.values()]


def traffic() -> str:
    """MB that each of 64 devices receives per layer and step, fully sharded."""
    rows = []
    for shape in MODELS:
        gathers = [2 * 63 / 64 * gathered(layer, abstract_mesh(64, 1)) for layer in one_layer(shape)]
        gradients = gathers[0] / 2  # one value in bf16 for each weight, once
        rows.append((shape.name, *(f"{nbytes / 1e6:,.0f}" for nbytes in (*gathers, gradients))))
    header = (*(f"Gathers, {name}:" for name in FORMATS), "Gradients:")
    return markdown(("Model", *header), rows)


def tensor_parallel() -> str:
    """MB that each of 8 devices receives per layer and step, and where fully sharded weights cost the same."""
    tokens = 4096
    rows = []
    for shape in MODELS:
        # Four all-reduces of bf16, each of which every value takes part in twice; the share of a device cancels out.
        per_token = 4 * 2 * shape.width * 2
        even = (f"{2 * gathered(layer, abstract_mesh(8, 1)) / per_token:,.0f}" for layer in one_layer(shape))
        rows.append((shape.name, f"{7 / 8 * tokens * per_token / 1e6:,.0f}", *even))
    return markdown(("Model", f"All-reduces, {tokens} tokens:", *(f"Even, {name}:" for name in FORMATS)), rows)


#
# The check: what compilers make of it
#


SMALL = Shape("small", 1, 1024, 16, 8, 2048, 0)
BATCH, SEQUENCE = 8, 64
KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
MESHES = {"tensor parallel": (1, 8), "fully sharded": (8, 1), "both": (2, 4)}
Product = Callable[[Array, Any, str], Array]
# The last one says first that the packed weight is not divided along "data" any more.
gather = lambda w, name: w.with_sharding(P(*map(without_data, LAYOUT[name])))
PRODUCTS: dict[str, Product] = {
    "`x @ w.T`, bf16": lambda x, w, name: x @ w.T,
    "`x @ q.T`": lambda x, w, name: x @ w.T,
    "`x @ q.with_sharding(...).T`": lambda x, w, name: x @ gather(w, name).T,
}


def block(layer: PyTree, x: Float[Array, "batch sequence width"], on: Callable[..., Any], product: Product) -> Array:
    """One layer of a transformer, without positions. `on` says what the last axis of activations is divided by."""
    norm = lambda x, w: on(x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5) * w, None)
    to = lambda x, name: product(x, layer[name], name)
    heads = lambda x: x.reshape(*x.shape[:2], -1, SMALL.width // SMALL.heads)
    h = norm(x, layer["attention_norm"])
    attended = jax.nn.dot_product_attention(*(heads(on(to(h, name), "model")) for name in "qkv"), is_causal=True)
    x = x + on(to(attended.reshape(x.shape), "o"), None)
    h = norm(x, layer["ffn_norm"])
    return x + on(to(jax.nn.silu(on(to(h, "gate"), "model")) * on(to(h, "up"), "model"), "down"), None)


def compare(
    mesh: Mesh, format: eqq.extend.AbstractFormat | None, dtype: Any, product: Product
) -> tuple[list[str], bool]:
    """Bytes of arguments and of collectives on each device, by formula and as compiled; and whether they are equal."""
    small = transformer(SMALL, format, dtype)["layers"]
    layer = jtu.tree_map(lambda w: jax.ShapeDtypeStruct(w.shape[1:], w.dtype), small)
    activations = BATCH // mesh.shape["data"] * SEQUENCE * SMALL.width * jnp.dtype(dtype).itemsize
    arguments = per_device(layer, mesh) + activations
    moved = {"all-gather": gathered(layer, mesh), "all-reduce": 2 * activations * (mesh.shape["model"] > 1)}

    on = lambda x, last: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", None, last)))
    placed = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    layer = jtu.tree_map(placed, layer, shardings(layer, mesh))
    x = placed(jax.ShapeDtypeStruct((BATCH, SEQUENCE, SMALL.width), dtype), NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        try:
            compiled = jax.jit(lambda layer, x: on(block(layer, x, on, product), None)).lower(layer, x).compile()
        except jax.errors.JaxRuntimeError as e:
            return ["", "", "", f"does not compile: {str(e).splitlines()[0]}"], False
    found: dict[str, int] = {}
    # A TPU may work at one transfer in several places. They have its channel.
    pattern = rf"= (\S.*?) ({KINDS})(?:-start)?\(.*?channel_id=(\d+)"
    for shapes, kind, _ in {m[3]: m.groups() for m in re.finditer(pattern, compiled.as_text() or "")}.values():
        for name, bits, dims in re.findall(r"\b([a-z]+(\d+))\[([\d,]*)\]", shapes):
            nbytes = int(bits) // 8 * math.prod(int(d) for d in dims.split(",") if d)
            found[f"{kind} {name}"] = found.get(f"{kind} {name}", 0) + nbytes
    got = compiled.memory_analysis().argument_size_in_bytes
    listed = lambda nbytes: "; ".join(f"{kind} {n:,}" for kind, n in sorted(nbytes.items()) if n)
    equal = sum(found.values()) == sum(moved.values()) and arguments <= got <= 1.01 * arguments  # with padding
    return [f"{arguments:,}", f"{got:,}", listed(moved), listed(found)], equal


CHECKED = ("Bytes of arguments:", "compiled:", "Bytes of collectives", "compiled")


def check() -> str:
    """Eight virtual CPU devices, in float32: XLA computes bfloat16 in float32 there."""
    rows = []
    for title, lengths in MESHES.items():
        mesh = jax.make_mesh(lengths, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
        for name, format in FORMATS.items():
            cells, equal = compare(mesh, format, jnp.float32, PRODUCTS["`x @ q.T`"])
            if not equal or cells[0] != cells[1]:
                raise AssertionError(f"{title}, {name}: what is compiled is not what the formulas say. Got {cells}.")
            rows.append((title, "float32" if format is None else name, *cells))
    return markdown(("Layout", "Weights", *CHECKED), rows)


def check_tpu(topology: str) -> str:
    """The same, compiled for a slice of a TPU, in bfloat16 and NF4, with products written in several ways."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    rows = []
    for title, lengths in MESHES.items():
        mesh = Mesh(mesh_utils.create_device_mesh(lengths, devices), ("data", "model"))
        for way, product in PRODUCTS.items():
            cells, equal = compare(mesh, FORMATS["bf16" if "bf16" in way else "NF4"], jnp.bfloat16, product)
            rows.append((title, way, *cells, "yes" if equal else "no"))
    return markdown(("Layout", "Product", *CHECKED, "As the formulas say"), rows)


#
# The page
#


TABLES = (memory, traffic, tensor_parallel)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if the page differs")
    parser.add_argument("--write", action="store_true", help="bring the page up to date")
    parser.add_argument("--tpu", metavar="TOPOLOGY", help="compile for eight devices of a TPU, and nothing else")
    args = parser.parse_args()
    pages = {f"scaling-{table.__name__.replace('_', '-')}": ("sharding.md", table) for table in TABLES}
    if args.tpu is not None:
        print(check_tpu(args.tpu))
        return 0
    if args.check:
        print(check(), end="\n\n")
    return update_pages(pages, check=args.check, write=args.write, script="scaling.py")


if __name__ == "__main__":
    sys.exit(main())
