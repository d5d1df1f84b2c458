"""The measures of language models in the examples, against their definitions."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq

from .helpers import import_example


pytest.importorskip("tokenizers")


pytestmark = pytest.mark.usefixtures("rank_promotion")


@pytest.fixture(scope="module")
def evaluation():
    return import_example("llama", "evaluate")


@pytest.fixture(scope="module")
def model():
    return import_example("llama", "generate").random_model("tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model):
    """The model as a folder, with a tokenizer whose tokens are letters, the first of them at the beginning."""
    from tokenizers import decoders, models, pre_tokenizers, processors, Regex, Tokenizer

    export, generate = import_example("llama", "export"), import_example("llama", "generate")
    tokenizer = Tokenizer(models.WordLevel({chr(32 + n): n for n in range(96)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="~ $A", special_tokens=[("~", 94)])
    folder = tmp_path_factory.mktemp("model")
    export.write_folder(folder, model, generate.RANDOM["tiny"], tokenizer)
    (folder / "text.txt").write_text("".join(map(chr, jr.randint(jr.key(0), (90,), 33, 126))) + "\n")
    return folder


def expected_losses(model, chunks):
    """Of the second half of each chunk, one token after another."""
    llama, out = import_example("llama", "llama"), []
    for chunk in chunks:
        logits, _ = model(jnp.asarray(chunk)[None], llama.Cache.empty(model.config, 1, len(chunk)))
        log_p = np.asarray(jax.nn.log_softmax(logits[0]), np.float64)
        out.append([log_p[n] for n in range(len(chunk) // 2, len(chunk) - 1)])
    return np.array(out)


@pytest.mark.long
def test_measures_are_those_of_their_definitions(evaluation, model, folder, capsys):
    packed = eqq.quantize_tree(model, "int4")
    path, reference = folder / "packed.safetensors", str(folder / "model.safetensors")
    arguments = [str(folder / "model.safetensors"), str(folder / "text.txt"), "--context", "16", "--format", "int4"]
    evaluation.main([*arguments, "--reference", reference, "--batch", "2", "--json"])
    figures = json.loads(capsys.readouterr().out)
    text = (folder / "text.txt").read_text()
    # 90 letters and the beginning are five chunks, of which each begins with the beginning.
    ids = np.array([94, *(ord(c) - 32 for c in text[:-1])])[:80].reshape(5, 16)
    ids[:, 0] = 94
    p, q = expected_losses(model, ids), expected_losses(packed, ids)
    following = ids[:, 9:]
    losses = -np.take_along_axis(q, following[..., None], -1)[..., 0]
    kl = np.sum(np.exp(p) * (p - q), axis=-1)
    assert losses.shape == (5, 7)
    wanted = {
        "perplexity": np.exp(losses.mean()),
        "perplexity_error": np.exp(losses.mean()) * losses.std(ddof=1) / np.sqrt(35),
        "bits_per_byte": losses.sum() / np.log(2) / 35,
        "divergence": kl.mean(),
        "divergence_error": kl.std(ddof=1) / np.sqrt(35),
        "divergence_99.9": np.percentile(kl, 99.9),
        "same_token": np.mean(p.argmax(-1) == q.argmax(-1)),
        "perplexity_over_reference": np.exp(losses.mean() + np.take_along_axis(p, following[..., None], -1).mean()),
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(figures[name], value, rtol=1e-4, err_msg=name)
    assert not path.exists() and 0 < figures["divergence"] < 1


@pytest.mark.long
def test_caches_and_activations_are_measured(evaluation, model):
    chunks = np.asarray(jr.randint(jr.key(1), (2, 32), 0, 96))
    text = import_example("llama", "tokenization").Text()
    packed = eqq.quantize_activations(eqq.quantize_tree(model, "int8"), "int8")
    by = [
        evaluation.evaluate(each, chunks, text, model, cache=cache).divergences.mean()
        for each, cache in ((model, None), (model, "int4"), (packed, None))
    ]
    assert by[0] < 1e-10 < min(by[1:])


@pytest.mark.long
def test_what_cannot_be_measured(evaluation, model, folder, tmp_path):
    path, text = str(folder / "model.safetensors"), str(folder / "text.txt")
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    for arguments, message in (
        ([path, text], "at least two chunks of 512 tokens. Got 91 tokens"),
        ([path, text, "--context", "2"], "`--context` must be from 3 to 2,048 tokens.*Got 2"),
        ([path, text, "--context", "16", "--batch", "0"], "`--batch` must be at least 1. Got 0"),
        ([path, str(tmp_path / "none"), "--context", "16"], "none"),
        ([path, str(tmp_path / "latin"), "--context", "16"], "latin must be text in UTF-8"),
        ([path], "MODEL and TEXT must be"),
    ):
        with pytest.raises(SystemExit, match=message) as e:
            evaluation.main(arguments)
        assert str(e.value.code).startswith("Error: ")
    tokens = import_example("llama", "tokenization").Text()
    with pytest.raises(ValueError, match="Tokens must be below 96, the vocabulary. Got 96"):
        evaluation.evaluate(model, np.full((1, 16), 96), tokens)
    other = import_example("llama", "llama").Llama(dataclasses.replace(model.config, vocabulary=97), key=jr.key(0))
    with pytest.raises(ValueError, match="must have the vocabulary of the model, 96 tokens. Got 97"):
        evaluation.evaluate(model, np.zeros((1, 16), int), tokens, other)
