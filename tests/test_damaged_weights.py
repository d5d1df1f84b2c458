"""Weights whose tensors do not fit together: each reader names the tensor, and says what it must be."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq

from .test_checkpoints import FP4, small_bnb, write_torchao
from .test_declared_layouts import write_typed


def make_typed(kind, value, dtype):
    """A function of a shape that returns a tensor of one value, and the name of its type."""
    return lambda *shape: (kind, np.full(shape, value, dtype))


words, u32 = make_typed("I32", 0, np.int32), make_typed("U32", 1, np.uint32)
halves, floats = make_typed("F16", 1, np.float16), make_typed("F32", 1, np.float32)
unsigned, e4m3 = make_typed("U8", 1, np.uint8), make_typed("F8_E4M3", 1, jnp.float8_e4m3fn)

GPTQ = {"qweight": words(8, 32), "qzeros": words(2, 4), "scales": halves(2, 32)}
NVFP4 = {"weight_packed": unsigned(4, 32), "weight_scale": e4m3(4, 4)}
SHAPE = ("I64", np.array([4, 64]))


@pytest.mark.parametrize(
    "tensors, message",
    [
        (GPTQ | {"qzeros": words(8)}, "qzeros': It must have two dimensions. Got [8]"),
        (GPTQ | {"scales": halves(64)}, "scales': It must have two dimensions. Got [64]"),
        (
            GPTQ | {"qweight": ("F32", np.zeros((8, 32), np.float32))},
            "I32 of two dimensions, with floating point scales",
        ),
        (GPTQ | {"qzeros": words(2, 5)}, "2, 3, 4 and 8 bits of GPTQ, and 4 bits of AWQ"),
        ({"weight_packed": words(8), "weight_scale": halves(4, 1)}, "two dimensions or more, and a scale"),
        ({"weight_packed": words(4, 8), "weight_scale": halves(4, 1)}, "neither integers nor MXFP4"),
        ({"weight_packed": words(3, 8), "weight_scale": halves(3, 1), "weight_shape": SHAPE}, "the shape of [3] rows"),
        (
            {"weight_packed": words(4, 8), "weight_scale": floats(4, 1), "weight_shape": SHAPE}
            | {"weight_zero_point": ("I8", np.array([[0], [0], [0], [20]], np.int8))},
            "zero points must be below 16. Got 28",
        ),
        (NVFP4 | {"weight_global_scale": floats(2)}, "one F32 number"),
        (NVFP4 | {"weight_global_scale": ("F32", np.zeros(1, np.float32))}, "Got 0.0 as the scale of the tensor"),
        (NVFP4 | {"weight_scale": floats(4, 4), "weight_global_scale": floats(1)}, "NVFP4 with scales of F8_E4M3"),
        ({"weight": ("I8", np.ones((4, 10), np.int8)), "weight_scale": floats(4, 3)}, "10 values into equal groups"),
        ({"weight": ("I8", np.ones((4, 8), np.int8)), "weight_scale": words(4, 1)}, "floating point. Got I32"),
        ({"weight": ("I8", np.ones(8, np.int8)), "weight_scale": floats(1)}, "does not know scales of I8[8]"),
        ({"weight": u32(4, 8), "scales": halves(4, 1)}, "companion 'biases'"),
        ({"weight": u32(3), "scales": halves(3, 1), "biases": halves(3, 1)}, "rows of whole codes of 4 bits"),
        ({"weight": u32(4, 3), "scales": halves(4, 1), "biases": halves(4, 1)}, "rows of whole groups of 64"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, tensors, message):
    checkpoint = write_typed(
        tmp_path, {f"l.{name}": x for name, x in tensors.items()}, quant_method="gptq", bits=4, group_size=64
    )
    with pytest.raises(ValueError, match=f"must hold a valid 'l.*{re.escape(message)}"):
        checkpoint["l.weight"]


INTX, INT8 = "IntxUnpackedToInt8Tensor", ("I8", np.full((4, 32), 9, np.int8))


@pytest.mark.parametrize(
    "kind, parts, message",
    [
        ("Int4Tensor", {"qdata": unsigned(4, 16), "scale": halves(1, 5), "zero_point": halves(1, 5)}, "[any, 4]"),
        ("Int4Tensor", {"qdata": unsigned(4, 16), "scale": halves(3, 4), "zero_point": halves(3, 4)}, "32 inputs into"),
        (INTX, {"qdata": unsigned(4, 32), "scale": floats(4, 1)}, "I8, with scales of two dimensions"),
        (INTX, {"qdata": INT8, "scale": floats(4, 1), "zero_point": unsigned(4, 1)}, "I8 of [4, 1]"),
        (INTX, {"qdata": INT8, "scale": floats(4, 1)}, "no integer of 4 bits"),
        ("MXTensor", {"qdata": INT8, "scale": unsigned(4, 1)}, "U8, F4 or float8. Got I8"),
    ],
)
def test_tensors_of_torchao_that_do_not_fit(tmp_path, kind, parts, message):
    four_bits = {"_type": "torch.dtype", "_data": "int4"}
    with pytest.raises(ValueError, match=f"must hold a valid 'l.*{re.escape(message)}"):
        write_torchao(tmp_path / "model.safetensors", "l.weight", kind, parts, target_dtype=four_bits)


def test_states_of_bitsandbytes_that_do_not_fit(tmp_path):
    path, name = tmp_path / "model.safetensors", "w.quant_state.bitsandbytes__fp4"
    small_bnb(path, (4, 128), 64, FP4)
    tensors = {
        t.name: (t.dtype, np.array(t.array()))
        for item in eqq.io.open(path).items_by_name.values()
        for t in item.tensors
    }
    state = json.loads(tensors[name][1].tobytes())
    as_tensor = lambda fields: ("U8", np.frombuffer(json.dumps(fields).encode(), np.uint8))
    nested = {
        "w.absmax": unsigned(8),
        "w.nested_absmax": floats(1),
        name: as_tensor(state | {"nested_blocksize": 8, "nested_offset": 0}),
    }
    for changes, message in (
        (
            {"w.quant_state.bitsandbytes__nf4": tensors[name]},
            "must alone do so. Got .'w.quant_state.bitsandbytes__fp4'",
        ),
        ({name: as_tensor(state | {"more": "x" * 100_000})}, "at most 100000 bytes"),
        ({"w.quant_map": ("F32", np.full(16, np.inf, np.float32))}, "not finite"),
        (nested, "companion 'nested_quant_map'"),
    ):
        with pytest.raises(ValueError, match=f"must hold a valid 'w.*{message}"):
            write_typed(tmp_path, tensors | changes)["w"]
    del tensors["w"]
    with pytest.raises(ValueError, match="must alone do so. Got no such tensor"):
        write_typed(tmp_path, tensors)["w"]
    int8 = {"l.weight": ("I8", np.ones(8, np.int8)), "l.SCB": floats(8)}
    with pytest.raises(ValueError, match="'l.weight': It must be I8 of .any, any."):
        write_typed(tmp_path, int8)["l.weight"]


def test_experts_of_gpt_oss_that_do_not_fit(tmp_path):
    blocks, scales = unsigned(2, 3, 1, 16), unsigned(2, 3, 1)
    for tensors, message in (
        ({"c_blocks": blocks, "d_blocks": blocks, "d_scales": scales}, "companion 'c_scales'"),
        ({"c_blocks": unsigned(2, 3, 16), "c_scales": scales}, "U8 of .any, any, any, 16."),
    ):
        with pytest.raises(ValueError, match=f"must hold a valid 'c_blocks': .*{message}"):
            write_typed(tmp_path, tensors)["c"]
