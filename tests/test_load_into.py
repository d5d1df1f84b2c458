"""Arrays of a checkpoint into the leaves of a model: each value where it belongs, packed, or an error at once."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from safetensors.numpy import save_file

import eqquant as eqq
from eqquant._wrappers.concatenate import concatenate, split
from eqquant.io import names as ready, Target
from eqquant.io._rules import match_names

from .helpers import weights


D, HEADS, KV, FF, VOCAB, N = 64, 4, 2, 128, 32, 3


def zeros(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def linear(out, into, bias=False):
    return {"weight": zeros(out, into), **({"bias": zeros(out)} if bias else {})}


def llama_tree(mlp=("gate", "up", "down")):
    """A model by the paths of the ready names."""
    size = {"gate": (FF, D), "up": (FF, D), "down": (D, FF)}
    rows = D * KV // HEADS
    layer = lambda: {
        "attention_norm": {"weight": zeros(D)},
        "attention": {"q": linear(D, D), "k": linear(rows, D), "v": linear(rows, D), "output": linear(D, D)},
        "mlp_norm": {"weight": zeros(D)},
        "mlp": {name: linear(*size[name]) for name in mlp},
    }
    return {
        "embedding": {"weight": zeros(VOCAB, D)},
        "layers": [layer() for _ in range(N)],
        "norm": {"weight": zeros(D)},
        "head": {"weight": zeros(VOCAB, D)},
    }


def fill(struct, seed=0):
    """The tree with random values."""
    leaves, treedef = jax.tree_util.tree_flatten(struct)
    rng = np.random.default_rng(seed)
    return treedef.unflatten([jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in leaves])


def flat(tree):
    return {leaf.path: leaf.value for leaf in eqq._tree.leaves.named_leaves(tree)}


def hf_llama(tree):
    """The names of a Llama file, by hand."""
    layer = {
        "attention_norm.weight": "input_layernorm.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
        "attention.output.weight": "self_attn.o_proj.weight",
        **{f"attention.{x}.weight": f"self_attn.{x}_proj.weight" for x in "qkv"},
        **{f"mlp.{x}.weight": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    }
    top = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    out = {}
    for path, x in flat(tree).items():
        if match := re.fullmatch(r"layers\.(\d)\.(.*)", path):
            out[f"model.layers.{match[1]}.{layer[match[2]]}"] = x
        else:
            out[f"{top[path.removesuffix('.weight')]}.weight"] = x
    return out


@pytest.mark.long
def test_ready_names_of_llama_and_the_report():
    expected = fill(llama_tree())
    arrays = {**hf_llama(expected), "model.layers.0.self_attn.rotary_emb.inv_freq": jnp.ones(4)}
    loaded = eqq.io.load_into(llama_tree(), arrays, ready.llama())
    assert eqx.tree_equal(loaded, expected)
    plan = eqq.io.plan_load(llama_tree(), arrays, ready.llama())
    assert plan.problems == () and plan.left_out == ("model.layers.0.self_attn.rotary_emb.inv_freq",)
    row = next(row for row in plan.rows if row.path == "layers.1.attention.q.weight")
    assert row.sources == ("model.layers.1.self_attn.q_proj.weight",) and row.format is None
    assert "30 leaves from 30 arrays" in str(plan) and "1 left out" in str(plan)
    assert len(json.loads(plan.to_json())["rows"]) == 30


@pytest.mark.long
def test_quantized_weights_stay_packed_and_stack_for_scan():
    expected = eqq.quantize_tree(fill(llama_tree()), {"layers.*": "nf4", "*": None})
    arrays = hf_llama(expected)
    loaded = eqq.io.load_into(llama_tree(), arrays, ready.llama())
    assert eqx.tree_equal(loaded, expected)
    stacked = ready.rename(ready.llama(), {"layers.{n}": "layers"})
    one = jax.tree_util.tree_map(lambda x: zeros(N, *x.shape), llama_tree()["layers"][0])
    loaded = eqq.io.load_into({**llama_tree(), "layers": one}, arrays, stacked)
    is_quantized = eqq.is_quantized(loaded["layers"]["mlp"]["up"]["weight"])
    assert is_quantized and eqx.tree_equal(
        loaded["layers"], jax.tree_util.tree_map(lambda *xs: jnp.stack(xs), *expected["layers"])
    )


def test_the_plan_names_three_sources_of_a_stack():
    arrays = {"s": jnp.ones(()), "u": jnp.ones(2), **{f"v.{n}": jnp.ones(2) for n in range(3)}}
    arrays |= {f"w.{n}": eqq.quantize(jnp.full((2, 3), n + 1.0), "int8") for n in range(4)}
    model = {"s": zeros(), "u": zeros(1, 2), "v": zeros(3, 2), "w": zeros(4, 2, 3)}
    names = {"{x}.{n}": "{x}", "{x}": "{x}"}
    rows = [line.split("  ") for line in str(eqq.io.plan_load(model, arrays, names)).splitlines()]
    cells = {row[0]: row for row in ([cell.strip() for cell in row if cell.strip()] for row in rows) if row}
    assert cells["s"][1] == "scalar" and cells["v"][1:4] == ["3 x 2", "float32", "v.0, v.1, v.2"]
    assert cells["w"][2:4] == ["Int8()", "w.0, w.1, w.2 and 1 more"] and "4 leaves from 9 arrays" in cells
    loaded = eqq.io.load_into(model, arrays, names)
    np.testing.assert_allclose(loaded["w"].dequantize()[:, 1, 2], range(1, 5))
    assert {name: x.shape for name, x in loaded.items()} == {name: x.shape for name, x in model.items()}


def test_dequantize_casts_and_numpy():
    q = eqq.quantize(weights(jr.key(0), (8, 64), jnp.bfloat16), "int8")
    model = {"w": zeros(8, 64), "n": np.zeros(3, np.int64), "f": 2.5}
    arrays = {"a": q, "b": np.array([1, 2, 3])}
    names = {"a": "w", "b": "n"}
    loaded = eqq.io.load_into(model, arrays, names)
    assert loaded["w"].format == q.format and loaded["w"].dtype == jnp.float32 and loaded["f"] == 2.5
    assert isinstance(loaded["n"], np.ndarray) and loaded["n"].dtype == np.int64
    dense = eqq.io.load_into(model, arrays, names, dequantize=True)["w"]
    assert isinstance(dense, jax.Array) and dense.dtype == jnp.float32
    np.testing.assert_array_equal(dense, q.dequantize().astype(jnp.float32))
    assert "from bfloat16" in str(eqq.io.plan_load(model, arrays, names))


@pytest.mark.parametrize("format", ["nf4", "int4", "int8", eqq.NF4(double_quant=True), eqq.Int8("tensor"), "nvfp4"])
def test_concatenated_and_split_rows(format):
    key = jr.key(0)
    parts = [eqq.quantize(weights(jr.fold_in(key, n), (rows, 128)), format) for n, rows in enumerate((8, 4, 4))]
    arrays = {f"l.{n}.{x}.weight": q for n in range(2) for x, q in zip("qkv", parts, strict=True)}
    fused = {tuple(f"l.{{n}}.{x}.weight" for x in "qkv"): "layers.{n}.qkv.weight"}
    model = {"layers": [{"qkv": {"weight": zeros(16, 128)}} for _ in range(2)]}
    loaded = eqq.io.load_into(model, arrays, fused)["layers"][1]["qkv"]["weight"]
    whole = np.concatenate([np.asarray(q) for q in parts])
    assert eqq.is_quantized(loaded)
    np.testing.assert_array_equal(np.asarray(loaded), whole)
    x = weights(key, (3, 128))
    np.testing.assert_allclose(loaded @ x.T, whole @ x.T, rtol=1e-5, atol=1e-4)
    # And back.
    model = {x: {"weight": zeros(rows, 128)} for x, rows in zip("qkv", (8, 4, 4), strict=True)}
    back = eqq.io.load_into(model, {"w": loaded}, {"w": ("q.weight", "k.weight", "v.weight")})
    for x, q in zip("qkv", parts, strict=True):
        np.testing.assert_array_equal(np.asarray(back[x]["weight"]), np.asarray(q))


@pytest.mark.parametrize(
    "format", [eqq.NF4(), eqq.Int4(symmetric=False), eqq.NF4(double_quant=True), eqq.formats.MLX(4, 64), eqq.Int3()]
)
def test_concatenated_and_split_along_the_quantized_axis(format):
    unit = 64 * 256 if format.scale_format is not None else 512  # whole blocks of scales
    q = eqq.quantize(weights(jr.key(0), (3, 2 * unit + 96)), format)
    first, second = split(q, [unit, unit + 96], -1)
    np.testing.assert_array_equal(np.asarray(first), np.asarray(q)[:, :unit])
    np.testing.assert_array_equal(np.asarray(second), np.asarray(q)[:, unit:])
    assert eqx.tree_equal(concatenate([first, second], 1), q)
    with pytest.raises(ValueError, match="is no multiple"):
        split(q, [100, 2 * unit - 4], -1)
    with pytest.raises(ValueError, match="is no multiple"):
        concatenate([eqq.quantize(jnp.ones((3, 96)), format)] * 2, 1)


def test_transposing_relabels():
    q = eqq.quantize(weights(jr.key(0), (64, 24)), "nf4", axis=0)
    model = {"layer": {"weight": zeros(24, 64), "bias": zeros(24)}, "conv": zeros(5, 1, 1)}
    arrays = {"c.weight": q, "c.bias": jnp.arange(24.0), "conv": jnp.arange(5.0)}
    loaded = eqq.io.load_into(model, arrays, {"c.{p}": Target("layer.{p}", transpose=True), "conv": "conv"})
    w = loaded["layer"]["weight"]
    assert w.axis == -1 and w.codes is q.codes or np.array_equal(w.codes, q.codes)
    np.testing.assert_array_equal(np.asarray(w), np.asarray(q).T)
    assert loaded["conv"].shape == (5, 1, 1)


def test_gpt2_splits_and_transposes():
    size = {"attention.q": (D, D), "attention.k": (D, D), "attention.v": (D, D), "mlp.up": (4 * D, D)}
    rng = np.random.default_rng(0)
    dense = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in size.items()}
    arrays = {
        "h.0.attn.c_attn.weight": np.concatenate([dense[f"attention.{x}"] for x in "qkv"]).T,
        "h.0.attn.c_attn.bias": np.arange(3 * D, dtype=np.float32),
        "h.0.mlp.c_fc.weight": dense["mlp.up"].T,
        "h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32),
    }
    layer = {
        "attention": {x: linear(D, D, bias=True) for x in "qkv"},
        "mlp": {"up": linear(4 * D, D)},
    }
    loaded = eqq.io.load_into({"layers": [layer]}, arrays, ready.gpt2())
    for name, x in dense.items():
        first, second = name.split(".")
        np.testing.assert_array_equal(loaded["layers"][0][first][second]["weight"], x)
    np.testing.assert_array_equal(loaded["layers"][0]["attention"]["v"]["bias"], np.arange(2 * D, 3 * D))


def test_phi3_mixtral_and_tied():
    rng = np.random.default_rng(0)
    random = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    qkv, gate_up = eqq.quantize(random(D + D, D), "int4"), random(2 * FF, D)
    arrays = {
        "model.layers.0.self_attn.qkv_proj.weight": qkv,
        "model.layers.0.mlp.gate_up_proj.weight": gate_up,
        "model.embed_tokens.weight": random(VOCAB, D),
    }
    attention = {"q": linear(D, D), "k": linear(D // 2, D), "v": linear(D // 2, D)}
    layer = {"attention": attention, "mlp": {"gate": linear(FF, D), "up": linear(FF, D)}}
    model = {"layers": [layer], "embedding": linear(VOCAB, D), "head": linear(VOCAB, D)}
    tied = {"model.embed_tokens.weight": Target(("embedding.weight", "head.weight"), tied=True)}
    loaded = eqq.io.load_into(model, arrays, ready.phi3(tied))
    q = loaded["layers"][0]["attention"]["v"]["weight"]
    np.testing.assert_array_equal(np.asarray(q), np.asarray(qkv)[D + D // 2 :])
    np.testing.assert_array_equal(loaded["layers"][0]["mlp"]["up"]["weight"], gate_up[FF:])
    assert loaded["head"]["weight"] is loaded["embedding"]["weight"]

    experts = [eqq.quantize(random(FF, D), "nf4") for _ in range(11)]
    arrays = {f"model.layers.0.block_sparse_moe.experts.{e}.w3.weight": w for e, w in enumerate(experts)}
    model = {"layers": [{"experts": {"up": {"weight": zeros(11, FF, D)}}}]}
    loaded = eqq.io.load_into(model, arrays, ready.mixtral())["layers"][0]["experts"]["up"]["weight"]
    for e, w in enumerate(experts):  # by number: 10 after 9
        assert eqx.tree_equal(jax.tree_util.tree_map(lambda leaf, e=e: leaf[e], loaded), w)


def paths_by(names, *found):
    """The path, or paths, of each name, or `None`, and how its array changes."""
    matched = match_names(names, found)
    assert not matched.problems and not matched.unknown
    paths = {
        name: ("T " if recipe.to.transpose else "") + " ".join(recipe.paths) + " stacked" * bool(recipe.stacked)
        for recipe in matched.recipes
        for layer in recipe.sources
        for name in layer
    }
    return [paths.get(name) for name in found]


def test_names_of_families():
    """What families call their arrays, in the words of `transformers` and llama.cpp."""
    attention = [f"layers.7.attention.{x}.weight" for x in ("q", "k", "v", "output")]
    mlp, moe = ([f"layers.7.{part}.{x}.weight" for x in ("gate", "up", "down")] for part in ("mlp", "experts"))
    q_k_v_o = [f"model.layers.7.self_attn.{x}_proj.weight" for x in "qkvo"]
    gate_up_down = [f"model.layers.7.mlp.{x}_proj.weight" for x in ("gate", "up", "down")]
    norms = [f"model.layers.7.{x}_layernorm.weight" for x in ("input", "post_attention")]
    assert paths_by(ready.llama(), *q_k_v_o, *gate_up_down, *norms, "model.norm.weight", "lm_head.weight") == [
        *(*attention, *mlp, "layers.7.attention_norm.weight", "layers.7.mlp_norm.weight", "norm.weight", "head.weight")
    ]
    more = [f"model.layers.7.{x}_feedforward_layernorm.weight" for x in ("pre", "post")]
    assert paths_by(ready.gemma(), *norms, *more, q_k_v_o[3]) == [
        *("layers.7.attention_norm.weight", "layers.7.attention_post_norm.weight", "layers.7.mlp_norm.weight"),
        *("layers.7.mlp_post_norm.weight", attention[3]),
    ]
    fused = ("model.layers.7.self_attn.qkv_proj.weight", "model.layers.7.mlp.gate_up_proj.weight")
    assert paths_by(ready.phi3(), *fused, gate_up_down[2]) == [" ".join(attention[:3]), " ".join(mlp[:2]), mlp[2]]
    experts = [f"model.layers.7.block_sparse_moe.experts.0.w{n}.weight" for n in (1, 3, 2)]
    router = ("model.layers.7.block_sparse_moe.gate.weight", "layers.7.router.weight")
    stacked = [f"{path} stacked" for path in moe]
    assert paths_by(ready.mixtral(), router[0], *experts) == [router[1], *stacked]
    experts = [f"model.layers.7.mlp.experts.0.{x}_proj.weight" for x in ("gate", "up", "down")]
    shared = ("model.layers.7.mlp.shared_expert.up_proj.weight", "model.layers.7.mlp.shared_expert_gate.weight")
    assert paths_by(ready.qwen_moe(), "model.layers.7.mlp.gate.weight", *experts, *shared) == [
        *("layers.7.router.weight", *stacked, "layers.7.shared.up.weight", "layers.7.shared_gate.weight")
    ]
    inner = ("attn.c_attn.bias", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight", "ln_1.bias", "ln_2.bias")
    assert paths_by(ready.gpt2(), "wte.weight", "wpe.weight", "ln_f.bias", *(f"h.7.{x}" for x in inner)) == [
        *("embedding.weight", "position.weight", "norm.bias"),
        "T " + " ".join(f"layers.7.attention.{x}.bias" for x in "qkv"),
        *(f"T {attention[3]}", f"T {mlp[1]}", f"T {mlp[2]}", "layers.7.attention_norm.bias", "layers.7.mlp_norm.bias"),
    ]
    encoder = [f"encoder.layer.7.{x}.dense.weight" for x in ("attention.output", "intermediate", "output")]
    encoder_paths = [attention[3], mlp[1], mlp[2]]
    q_k_v = [f"encoder.layer.7.attention.self.{x}.weight" for x in ("query", "key", "value")]
    norms = [f"encoder.layer.7.{x}.LayerNorm.weight" for x in ("attention.output", "output")]
    both = ["layers.7.attention_norm.weight", "layers.7.mlp_norm.weight"]
    assert paths_by(ready.bert(), *q_k_v, *encoder, *norms) == [*attention[:3], *encoder_paths, *both]
    q_k_v = [f"vit.encoder.layer.7.attention.attention.{x}.weight" for x in ("query", "key", "value")]
    norms = [f"vit.encoder.layer.7.layernorm_{x}.weight" for x in ("before", "after")]
    encoder = [f"vit.{name}" for name in encoder]
    assert paths_by(ready.vit(), *q_k_v, *encoder, *norms, "classifier.bias") == [
        *(*attention[:3], *encoder_paths, *both, "head.bias")
    ]


def test_prefixes_and_names_of_gguf():
    golden = eqq.io.open(Path(__file__).parent / "golden" / "model.gguf")
    item = next(iter(golden.items_by_name.values()))
    for family, prefix, kinds in (
        (ready.llama, "model.", ("llama", "mistral", "qwen2", "qwen3", "gemma")),
        (ready.gemma, "model.", ("gemma2", "gemma3_text")),
        (ready.qwen_moe, "model.", ("qwen2_moe", "qwen3_moe")),
        *((ready.phi3, "model.", ("phi3",)), (ready.mixtral, "model.", ("mixtral",))),
        *((ready.gpt2, "transformer.", ("gpt2",)), (ready.bert, "bert.", ("bert",)), (ready.vit, "vit.", ("vit",))),
    ):
        for kind, before in ((kind, before) for kind in kinds for before in (prefix, "")):
            named = {"dialect": "safetensors", "config": {"model_type": kind}, "items_by_name": {f"{before}x": item}}
            found = ready.detect(dataclasses.replace(golden, **named))
            assert {str(k): str(v) for k, v in found.items()} == {
                str(k): str(v) for k, v in family(prefix=before).items()
            }
    names = lambda kind: ready.gguf(dataclasses.replace(golden, metadata={"general.architecture": kind}))
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    paths = [
        *("attention_norm", *(f"attention.{x}" for x in ("q", "k", "v", "output")), "mlp_norm"),
        *(f"mlp.{x}" for x in ("gate", "up", "down")),
    ]
    found = paths_by(names("qwen2"), *(f"blk.7.{part}.bias" for part in parts), "blk.7.ffn_gate_exps.weight")
    assert found == [*(f"layers.7.{path}.bias" for path in paths), "layers.7.experts.gate.weight"]
    parts, paths = (
        ("post_attention_norm", "ffn_norm", "post_ffw_norm"),
        ("attention_post_norm", "mlp_norm", "mlp_post_norm"),
    )
    found = paths_by(names("gemma2"), *(f"blk.7.{part}.weight" for part in parts))
    assert found == [f"layers.7.{path}.weight" for path in paths]
    assert paths_by(
        names("phi3"), "blk.7.ffn_up.weight", "token_embd.weight", "output.weight", "output_norm.weight"
    ) == [*("layers.7.mlp.gate.weight layers.7.mlp.up.weight", "embedding.weight", "head.weight", "norm.weight")]
    parts = ("token_embd", "token_types", "position_embd", "blk.7.attn_output_norm", "blk.7.layer_output_norm")
    assert paths_by(names("bert"), *(f"{part}.weight" for part in parts)) == [
        *(f"embeddings.{x}.weight" for x in ("word", "token_type", "position")),
        *("layers.7.attention_norm.weight", "layers.7.mlp_norm.weight"),
    ]


def test_parts_along_other_axes_and_in_stacks():
    """Parts of unequal lengths, along the second axis and of each layer of a stack."""
    rng = np.random.default_rng(0)
    w = [rng.standard_normal((4, 10)).astype(np.float32) for _ in range(2)]
    arrays = {"l.0.w": w[0], "l.1.w": w[1]}
    model = {"a": zeros(2, 4, 3), "b": zeros(2, 4, 7)}
    loaded = eqq.io.load_into(model, arrays, {"l.{n}.w": Target(("a", "b"), axis=1)})
    np.testing.assert_array_equal(loaded["a"], np.stack(w)[..., :3])
    np.testing.assert_array_equal(loaded["b"], np.stack(w)[..., 3:])
    parts = {"x": w[0][:, :3], "y": w[1]}
    for model, axis, apply in (
        ({"w": zeros(4, 13)}, 1, None),
        ({"w": zeros(8, 13)}, -1, lambda x: jnp.tile(x, (2, 1))),
    ):
        loaded = eqq.io.load_into(model, parts, {("y", "x"): Target("w", axis=axis, apply=apply)})
        expected = np.concatenate([w[1], w[0][:, :3]], 1)
        np.testing.assert_array_equal(loaded["w"], np.tile(expected, (len(model["w"]) // 4, 1)))


def test_gguf_rows_are_put_back():
    w = np.arange(HEADS * 16 * 64, dtype=np.float32).reshape(HEADS * 16, 64)
    # As llama.cpp's converter permutes them.
    permuted = w.reshape(HEADS, 2, 8, 64).swapaxes(1, 2).reshape(w.shape)
    undo = ready.rotary_halves(HEADS)
    np.testing.assert_array_equal(undo(jnp.asarray(permuted)), w)
    q, expected = eqq.quantize(permuted, "q8_0"), eqq.quantize(w, "q8_0")
    assert eqx.tree_equal(undo(q), expected)
    with pytest.raises(ValueError, match="64 rows are not 5 heads"):
        ready.rotary_halves(5)(q)


def test_names_of_a_checkpoint(tmp_path):
    model = fill({"w": zeros(4, 64)})
    eqq.save(tmp_path / "ours.safetensors", eqq.quantize_tree(model, "nf4"))
    loaded = eqq.io.load_into({"w": zeros(4, 64)}, tmp_path / "ours.safetensors")
    assert eqx.tree_equal(loaded, eqq.quantize_tree(model, "nf4"))
    arrays = {"layers.0.self_attn.q_proj.weight": np.ones((4, 64), np.float32)}
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "ours.safetensors").unlink()
    model = {"layers": [{"attention": {"q": linear(4, 64)}}]}
    np.testing.assert_array_equal(eqq.io.load_into(model, tmp_path)["layers"][0]["attention"]["q"]["weight"], 1)
    (tmp_path / "config.json").write_text('{"model_type": "qwen9"}')
    with pytest.raises(ValueError, match="has the `model_type` 'qwen9'.*Did you mean 'qwen"):
        eqq.io.load_into(model, tmp_path)


def test_names_of_gguf():
    checkpoint = eqq.io.open(Path(__file__).parent / "golden" / "model.gguf")
    metadata = lambda fields: {key.replace("__", "."): value for key, value in fields.items()}
    with_metadata = lambda **fields: dataclasses.replace(checkpoint, metadata=metadata(fields))
    with pytest.raises(ValueError, match="must say how many heads it has"):
        ready.detect(with_metadata(general__architecture="llama"))
    w = jnp.arange(64.0 * 8).reshape(64, 8)
    llama = ready.detect(
        with_metadata(general__architecture="llama", llama__attention__head_count=4, llama__attention__head_count_kv=2)
    )
    model = {"layers": [{"attention": {"q": linear(64, 8), "k": linear(64, 8), "v": linear(64, 8)}}]}
    loaded = eqq.io.load_into(model, {f"blk.0.attn_{x}.weight": w for x in "qkv"}, llama)["layers"][0]["attention"]
    for x, heads in (("q", 4), ("k", 2)):
        assert eqx.tree_equal(loaded[x]["weight"], ready.rotary_halves(heads)(w))
    assert eqx.tree_equal(loaded["v"]["weight"], w)
    qwen = ready.detect(with_metadata(general__architecture="qwen2"))
    loaded = eqq.io.load_into(model, {f"blk.0.attn_{x}.weight": w for x in "qkv"}, qwen)["layers"][0]["attention"]
    assert eqx.tree_equal(loaded["q"]["weight"], w)
    gemma = ready.detect(with_metadata(general__architecture="gemma2"))
    loaded = eqq.io.load_into({"norm": {"weight": zeros(3)}}, {"output_norm.weight": jnp.ones(3)}, gemma)
    np.testing.assert_array_equal(loaded["norm"]["weight"], 0)


@functools.cache
def arrays():
    return {"a": jnp.ones((4, 64)), "b": jnp.ones(3), "c": eqq.quantize(jnp.ones((4, 64)), "nf4")}


@pytest.mark.parametrize(
    "names, message",
    [
        ({"a": "x"}, r"y: float32\[3\] in the model, and no array for it"),
        ({"a": "x", "b": "y"}, r"c: float32\[4, 64\] in NF4.*, and no rule for it"),
        ({"a": "y", "b": None, "c": "x"}, r"y: float32\[3\] in the model; a: float32\[4, 64\]"),
        ({"a": "xx", "b": "y", "c": "x"}, r"xx: a, float32\[4, 64\], and no such array in the model. Did you mean 'x'"),
        ({"a": "x", "b": "y", "c": "x"}, "x: both a and c"),
        ({("a", "c"): "x", "b": "y"}, "some are quantized and others are not.*`dequantize=True`"),
        ({("a", "d"): "x", "b": "y", "c": None}, "a is there, and no array for 'd'"),
        ({"{z}": "x"}, "a: `z` is 'a', and 'x' lacks it"),
        ({"a": Target("x", apply=lambda w: w.nope), "b": "y", "c": None}, "x: .*nope"),
        ({"a": ("x", "y"), "b": None, "c": None}, "cannot be divided into 4 [+] 3"),
        (lambda name: {"a": "x", "b": "y"}.get(name, "z"), "z: c, .* no such array"),
    ],
)
def test_misfits_are_errors_before_reading(names, message):
    model = {"x": zeros(4, 64), "y": zeros(3)}
    with pytest.raises(ValueError, match=message) as error:
        eqq.io.load_into(model, arrays(), names)
    assert str(error.value).startswith("`names` must give every leaf of the model an array of `checkpoint`")
    plan = eqq.io.plan_load(model, arrays(), names)
    assert re.search(message, " ".join(plan.problems) + " `dequantize=True`") and "Problem" in str(plan)


def test_names_that_are_paths_already():
    with pytest.raises(ValueError, match="Got '[*]'.*write `names=lambda name: name`"):
        eqq.io.load_into(arrays(), arrays(), {"*": "*"})
    loaded = eqq.io.load_into(arrays(), arrays(), lambda name: name)
    np.testing.assert_array_equal(loaded["b"], arrays()["b"])


def test_complex_numbers_do_not_become_real():
    with pytest.raises(ValueError, match=r"z: float32\[2\] in the model; z: complex64\[2\]"):
        eqq.io.load_into({"z": zeros(2)}, {"z": np.ones(2, np.complex64)}, lambda name: name)


def test_parts_in_different_formats():
    arrays = {"a": eqq.quantize(jnp.ones((4, 64)), "nf4"), "b": eqq.quantize(jnp.ones((4, 64)), "int4")}
    model = {"x": zeros(8, 64)}
    with pytest.raises(ValueError, match=r"x: their formats differ: NF4.* and Int4.*`dequantize=True`"):
        eqq.io.load_into(model, arrays, {("a", "b"): "x"})
    np.testing.assert_allclose(eqq.io.load_into(model, arrays, {("a", "b"): Target("x", dequantize=True)})["x"], 1)


@pytest.mark.parametrize(
    "names, error, message",
    [
        ({3: "x"}, TypeError, "The keys of `names` must be names of a checkpoint.* Got 3|parameter 'names'"),
        ("a", TypeError, "`names` must be rules, as a mapping, or a function.* Got 'a'|parameter 'names'"),
        ({"a": 3}, TypeError, "must give 'a' the path of a leaf|parameter 'names'"),
        ({"a": "layers.{n}"}, ValueError, "Got no `{n}` there"),
        ({"{3x}": "x"}, ValueError, "must have groups such as"),
        ({"{n": "x"}, ValueError, "must have groups such as"),
        ({"{n:}": "x"}, ValueError, "choices of a group"),
        ({"{n}": "{n}}"}, ValueError, "paths of `names` must have groups such as"),
    ],
)
def test_rules_with_none(names, error, message):
    with pytest.raises(error, match=message):
        eqq.io.load_into({"x": zeros(4, 64)}, arrays(), names)


def test_rename_that_matches_nothing():
    with pytest.raises(ValueError, match="Got 'attn', in none of embedding.weight, "):
        ready.rename(ready.llama(), {"attn": "attention"})


def test_kept_leaves_are_not_loaded():
    model = {"x": zeros(3), "rope": jnp.arange(4.0)}
    loaded = eqq.io.load_into(model, {"b": jnp.ones(3)}, {"b": "x"}, keep=["rope"])
    np.testing.assert_array_equal(loaded["rope"], jnp.arange(4.0))
    with pytest.raises(ValueError, match="x: it keeps the value of the model, which has none"):
        eqq.io.load_into(model, {"b": jnp.ones(4)}, {"b": "rope"}, keep=["x"])
    with pytest.raises(ValueError, match="must match a leaf. Got 'ropes'"):
        eqq.io.load_into(model, {"b": jnp.ones(3)}, {"b": "x"}, keep=["ropes"])


def test_shardings():
    mesh = jax.make_mesh((len(jax.devices()),), ("d",))
    q = eqq.quantize(weights(jr.key(0), (8 * len(jax.devices()), 64)), "nf4")
    rules = {"*": NamedSharding(mesh, P("d"))}
    loaded = eqq.io.load_into({"w": zeros(*q.shape)}, {"a": q}, {"a": "w"}, shardings=rules)
    assert loaded["w"].sharding == NamedSharding(mesh, P("d", None))
    np.testing.assert_array_equal(np.asarray(loaded["w"]), np.asarray(q))


def test_unmatched_rules_are_reported():
    model, arrays = {"a": jnp.ones(3)}, {"x.a": jnp.zeros(3)}
    plan = eqq.io.plan_load(model, arrays, {"x.{p}": "{p}", "y.{p}": "b.{p}"})
    assert plan.idle == ("y.{p}",) and not plan.problems and "1 rules that match nothing: y.{p}" in str(plan)
    assert eqq.io.plan_load(model, arrays, lambda name: name[2:]).idle == ()
    with pytest.raises(ValueError, match="and no rule for it. No array matches z.a."):
        eqq.io.load_into(model, arrays, {"z.a": "a"})


@pytest.mark.parametrize("names", [{"x.{p": "p"}, {"x.p}": "p"}, {"x.{p-q}": "p"}, {"x.{p}": "{p"}, {"x.{}": "p"}])
def test_malformed_braces(names):
    with pytest.raises(ValueError, match="of `names` must have groups such as"):
        eqq.io.plan_load({"p": jnp.ones(3)}, {"x.p": jnp.ones(3)}, names)


def test_norms_and_heads_of_gguf_by_architecture(tmp_path):
    """llama.cpp adds one to the norms of Gemma, and reorders the heads of Llama; other families are as they are."""
    halves = [0, 2, 1, 3, 4, 6, 5, 7]  # of two heads, whose halves alternate in the file
    adds_one, reorders = {"gemma", "gemma2", "gemma3"}, {"llama"}
    arrays = {
        "blk.0.attn_norm.weight": np.arange(8.0),
        "blk.0.attn_q.weight": np.eye(8),
        "blk.0.attn_v.weight": np.eye(8),
    }
    arrays = {name: x.astype(np.float32) for name, x in arrays.items()}
    model = {
        "layers": [{"attention_norm": {"weight": zeros(8)}, "attention": {x: {"weight": zeros(8, 8)} for x in "qv"}}]
    }
    for name in (*adds_one, *reorders, "qwen2", "qwen3", "phi3", "gpt2", "mine"):
        metadata = {"general.architecture": name, f"{name}.attention.head_count": 2}
        eqq.io.write(tmp_path / f"{name}.gguf", arrays, "gguf", metadata=metadata)
        checkpoint = eqq.io.open(tmp_path / f"{name}.gguf")
        layer = eqq.io.load_into(model, checkpoint, ready.gguf(checkpoint))["layers"][0]
        np.testing.assert_array_equal(layer["attention_norm"]["weight"], np.arange(8.0) - (name in adds_one))
        order = halves if name in reorders else range(8)
        np.testing.assert_array_equal(layer["attention"]["q"]["weight"], np.eye(8)[list(order)])
        np.testing.assert_array_equal(layer["attention"]["v"]["weight"], np.eye(8))
