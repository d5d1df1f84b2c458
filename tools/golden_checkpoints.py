"""Writes small checkpoints with the libraries that people use, and what those libraries dequantize from them.

    pip install bitsandbytes compressed-tensors torchao torch && python -m tools.golden_checkpoints
    pip install "mlx[cpu]" safetensors && python -m tools.golden_checkpoints mlx
    pip install gptqmodel torch && python -m tools.golden_checkpoints gptq

Each goes to a folder of its own in `tests/golden/checkpoints`: `model.safetensors`, `config.json`, and `expected.npz`
with the float32 values that the library computes. The tests need only the files.
"""

import json
import sys
import types
from pathlib import Path

import numpy as np


GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "checkpoints"


def values(*shape: int) -> np.ndarray:
    """Rows of different magnitudes, with a zero block and an outlier."""
    rng = np.random.default_rng(shape)
    x = rng.standard_normal(shape) * np.exp(rng.standard_normal((*shape[:-1], 1)))
    x[0, :32] = 0
    x[-1, -1] *= 30
    return x.astype(np.float32)


def save(name: str, tensors: dict, expected: dict, config: dict, metadata: dict | None = None) -> None:
    """Writes a folder. `tensors` are those of torch."""
    from safetensors.torch import save_file

    folder = GOLDEN / name
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", metadata)
    finish(folder, expected, config)


def finish(folder: Path, expected: dict, config: dict) -> None:
    as_numpy = lambda x: x if isinstance(x, np.ndarray) else x.detach().float().numpy()
    np.savez_compressed(folder / "expected.npz", **{k: as_numpy(v) for k, v in expected.items()})
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}, indent=1) + "\n")


def bitsandbytes() -> None:
    import bitsandbytes as bnb
    import torch

    cases = {"nf4": False, "fp4": False, "nf4_nested": True, "fp4_nested": True}
    tensors, expected = {}, {}
    for case, nested in cases.items():
        for shape, dtype in (((6, 128), torch.float32), ((5, 7), torch.bfloat16), ((130, 128), torch.float16)):
            if (shape[0] == 130) != nested:  # more than 256 blocks have more than one outer scale
                continue
            options = {"quant_type": case[:3], "compress_statistics": nested}
            layer = bnb.nn.Linear4bit(shape[1], shape[0], bias=False, **options)
            layer.weight.data = torch.from_numpy(values(*shape)).to(dtype)
            layer = layer.to("cpu")
            layer(torch.zeros(1, shape[1], dtype=dtype))  # quantizes
            name = f"{case}_{shape[0]}"
            tensors |= {f"{name}.{k}": v for k, v in layer.state_dict().items()}
            weight = layer.weight
            expected[f"{name}.weight"] = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
    save("bitsandbytes", tensors, expected, {"quant_method": "bitsandbytes", "load_in_4bit": True})

    codes, absmax, _ = bnb.functional.int8_vectorwise_quant(torch.from_numpy(values(6, 50)).half())
    tensors = {"l.weight": codes, "l.SCB": absmax, "l.weight_format": torch.tensor(0, dtype=torch.uint8)}
    expected = {"l.weight": bnb.functional.int8_vectorwise_dequant(codes, absmax)}
    save("llm_int8", tensors, expected, {"quant_method": "bitsandbytes", "load_in_8bit": True})


def compressed_tensors() -> None:
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    cases = {
        f"{kind}{bits}_{strategy}_{'sym' if symmetric else 'asym'}": (layout, {**args, "symmetric": symmetric})
        for kind, bits, strategy, symmetric, layout, args in [
            *(
                ("int", bits, strategy, symmetric, "pack-quantized", {"num_bits": bits, "strategy": strategy})
                for bits in (2, 4, 8)
                for strategy in ("group", "channel")
                for symmetric in (True, False)
            ),
            ("i", 8, "channel", True, "int-quantized", {"num_bits": 8, "strategy": "channel"}),
            ("i", 8, "channel", False, "int-quantized", {"num_bits": 8, "strategy": "channel"}),
            ("f", 8, "channel", True, "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
            ("f", 8, "tensor", True, "float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
            ("f", 8, "block", True, "float-quantized", {"num_bits": 8, "type": "float", "strategy": "block"}),
        ]
    }
    tensors, expected, groups = {}, {}, {}
    for name, (layout, args) in cases.items():
        shape = (12, 96)
        if args["strategy"] == "group":
            args["group_size"] = 32
        if args["strategy"] == "block":
            shape, args["block_structure"] = (130, 136), [128, 128]
        weights = QuantizationArgs(**args)
        scheme = QuantizationScheme(targets=[name], weights=weights, format=layout)
        x = torch.from_numpy(values(*shape)).bfloat16()
        rows, columns = {"group": (1, 32), "channel": (1, shape[1]), "tensor": shape, "block": (128, 128)}[
            args["strategy"]
        ]
        # The ranges of the blocks, from which the library finds scales and zero points.
        padded = torch.nn.functional.pad(x, (0, -shape[1] % columns, 0, -shape[0] % rows))
        tiles = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
        low, high = tiles.amin((1, 3)), tiles.amax((1, 3))
        if args["strategy"] == "tensor":
            low, high = low.reshape(1), high.reshape(1)
        scale, zero = calculate_qparams(low, high, weights)
        state = {"weight": x, "weight_scale": scale, "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(layout)
        compressed = compressor.compress(state, scheme)
        tensors |= {f"{name}.{k}": v for k, v in compressed.items()}
        expected[f"{name}.weight"] = compressor.decompress(compressed, scheme)["weight"]
        groups[f"group_{name}"] = json.loads(scheme.model_dump_json(exclude_none=True))
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    save("compressed_tensors", tensors, expected, config)


def mxfp4_of_compressed_tensors() -> None:
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, symmetric=True)
    args.scale_dtype = torch.uint8
    scheme = QuantizationScheme(targets=["l"], weights=args, format="mxfp4-pack-quantized")
    x = torch.from_numpy(values(12, 96)).bfloat16()
    largest = x.float().reshape(12, 3, 32).abs().amax(-1).clamp(min=2.0**-100)
    scale = torch.exp2(torch.floor(torch.log2(largest)) - 2)
    compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    compressed = compressor.compress({"weight": x, "weight_scale": scale.bfloat16()}, scheme)
    expected = compressor.decompress(compressed, scheme)["weight"]
    config = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    save("mxfp4", {f"l.{k}": v for k, v in compressed.items()}, {"l.weight": expected}, config)


def torchao() -> None:
    import torch
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    state, expected = {}, {}
    for name, config in (("int8", Int8WeightOnlyConfig(version=2)), ("float8", Float8WeightOnlyConfig())):
        layer = torch.nn.Linear(96, 12, bias=False, dtype=torch.bfloat16)
        layer.weight.data = torch.from_numpy(values(12, 96)).bfloat16()
        quantize_(layer, config)
        state[f"{name}.weight"] = layer.weight.data if type(layer.weight) is torch.nn.Parameter else layer.weight
        expected[f"{name}.weight"] = layer.weight.dequantize()
    tensors, metadata = flatten_tensor_state_dict(state)
    save("torchao", tensors, expected, {"quant_method": "torchao"}, metadata)


def mlx() -> None:
    import mlx.core as mx

    tensors, expected, layers = {}, {}, {}
    for mode, bits, group in [
        *(("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)),
        ("affine", 4, 32),
        ("mxfp4", 4, 32),
        ("mxfp8", 8, 32),
        ("nvfp4", 4, 16),
    ]:
        name = f"{mode}_{bits}_{group}"
        # The same dtype as that of the scales, which the library computes in.
        x = mx.array(values(8, 128)).astype(mx.float32)
        codes, *scales = mx.quantize(x, group_size=group, bits=bits, mode=mode)
        tensors |= {f"{name}.weight": codes, f"{name}.scales": scales[0]}
        if len(scales) > 1:
            tensors[f"{name}.biases"] = scales[1]
        dense = mx.dequantize(codes, *scales, group_size=group, bits=bits, mode=mode)
        expected[f"{name}.weight"] = np.array(dense.astype(mx.float32))
        layers[name] = {"group_size": group, "bits": bits, "mode": mode}
    folder = GOLDEN / "mlx"
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    config = {"group_size": 64, "bits": 4, "mode": "affine", **layers}
    finish(folder, expected, config)
    (folder / "config.json").write_text(json.dumps({"quantization": config}, indent=1) + "\n")


def gptq() -> None:
    import torch
    from gptqmodel.nn_modules.qlinear.gemm_awq import AwqGEMMLinear
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    def rounded(bits: int) -> tuple:
        """A layer, and the scales and zero points of its blocks of 32."""
        linear = torch.nn.Linear(64, 32, bias=False)
        linear.weight.data = torch.from_numpy(values(32, 64))
        blocks = linear.weight.data.reshape(32, 2, 32)
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scale = ((high - low) / (2**bits - 1)).clamp(min=1e-4).half().float()
        return linear, scale, torch.round(-low / scale).clamp(1, 2**bits - 1)

    torch._dynamo.config.disable = True  # a layer compiles itself
    generator = torch.Generator().manual_seed(0)
    layers = {}
    for bits in (2, 3, 4, 8):
        for order in ("plain", "act_order"):
            linear, scale, zero = rounded(bits)
            groups = torch.arange(64, dtype=torch.int32) // 32
            if order == "act_order":
                groups = groups[torch.randperm(64, generator=generator)]
                linear.weight.data = linear.weight.data.clamp(-1, 1)
            options = {"bits": bits, "group_size": 32, "sym": False, "desc_act": order == "act_order"}
            layer = TorchLinear(**options, in_features=64, out_features=32, bias=False, register_buffers=True)
            layer.pack_original(linear, scale, zero, groups)
            layer.post_init()
            layers[f"int{bits}_{order}"] = layer.eval()
    for version in ("gptq_v2", "gptq"):
        tensors, expected = {}, {}
        for name, layer in layers.items():
            expected[f"{name}.weight"] = layer.dequantize_weight().T.contiguous()
            if version == "gptq":
                told = types.SimpleNamespace(bits=layer.bits, pack_dtype=torch.int32)
                convert_gptq_v2_to_v1_format_module(layer, told)
            of = ("qweight", "qzeros", "scales", "g_idx")
            tensors |= {f"{name}.{part}": getattr(layer, part).clone() for part in of}
        config = {"quant_method": "gptq", "checkpoint_format": version, "sym": False, "group_size": 32}
        save(version, tensors, expected, config | {"meta": {"quantizer": "gptqmodel:7.7.0"}})

    linear, scale, zero = rounded(4)
    options = {"bits": 4, "group_size": 32, "sym": False, "desc_act": False}
    layer = AwqTorchLinear(**options, in_features=64, out_features=32, bias=False, register_buffers=True)
    AwqGEMMLinear.pack(layer, linear, scale, zero)  # the class itself wants a GPU
    dense = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, 32).T.contiguous()
    tensors = {f"l.{part}": getattr(layer, part) for part in ("qweight", "qzeros", "scales")}
    config = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32, "zero_point": True}
    save("awq", tensors, {"l.weight": dense}, config)


if __name__ == "__main__":
    every = (bitsandbytes, compressed_tensors, mxfp4_of_compressed_tensors, torchao)
    chosen = [write for write in (mlx, gptq) if write.__name__ in sys.argv[1:]]
    for write in chosen or every:
        write()
