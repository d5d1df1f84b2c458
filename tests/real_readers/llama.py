"""A tiny Llama with random weights, and what other libraries compute with it."""

import jax.numpy as jnp
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import eqquant as eqq


CONFIG = LlamaConfig(
    vocab_size=288,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    tie_word_embeddings=False,
    initializer_range=0.1,
    architectures=["LlamaForCausalLM"],
)
TOKENS = [1, 17, 280, 33, 9, 101, 280, 5, 64, 200, 3, 77]


def weights() -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    return {name: x.detach().numpy() for name, x in LlamaForCausalLM(CONFIG).state_dict().items()}


def quantize_model(format, method=None) -> dict:
    """The weights, those of the projections quantized."""
    method = method or eqq.AbsMax()
    return {
        name: eqq.quantize(jnp.asarray(x), format, method=method) if "proj" in name else x
        for name, x in weights().items()
    }


def compute_logits(model) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].float().numpy()


def expected_logits(arrays) -> np.ndarray:
    """What transformers computes in float32 with our dequantized weights."""
    model = LlamaForCausalLM(CONFIG).eval()
    dense = lambda x: np.array(x.astype(jnp.float32).dequantize() if eqq.is_quantized(x) else x)
    model.load_state_dict({name: torch.from_numpy(dense(x)) for name, x in arrays.items()})
    return compute_logits(model)


def assert_near(actual, expected, tolerance) -> None:
    """The largest difference, over the spread of the logits."""
    assert actual.shape == expected.shape and np.isfinite(actual).all()
    error = np.abs(actual - expected).max() / expected.std()
    print(f"largest difference of logits: {error:.2e} of their deviation")
    assert error < tolerance
