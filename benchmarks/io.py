"""How fast checkpoints of each dialect become arrays, and how much memory that takes, from files in the page cache.

    python benchmarks/io.py              a table
    python benchmarks/io.py --only gptq  some rows
    python benchmarks/io.py --libraries  beside what each library does itself, where it is installed

Each row runs in a process of its own, libraries together in one. MB/s counts bytes of the file, also over the time of
all cores together, which other programs on the machine disturb less; memory is anonymous, without the page cache.
A library either loads the tensors as they are stored, or dequantizes one weight, as the table says.
"""

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import eqquant as eqq


COUNT, OUT, IN, GROUP = 8, 4096, 4096, 128


def words(rng, *shape):
    return rng.integers(-(2**31), 2**31, shape, np.int32)


def scales(rng, *shape, dtype=np.float16):
    return rng.uniform(0.5, 2, shape).astype(dtype)


def plain(rng):
    return {"weight": rng.standard_normal((OUT, IN)).astype(np.float32)}, {}


def half(rng):
    return {"weight": rng.standard_normal((OUT, IN)).astype(np.float16)}, {}


def gptq(rng):
    groups = IN // GROUP
    tensors = {
        "qweight": words(rng, IN // 8, OUT),
        "qzeros": np.full((groups, OUT // 8), 0x77777777, np.int32),
        "scales": scales(rng, groups, OUT),
    }
    return tensors, {"quant_method": "gptq", "sym": True, "checkpoint_format": "gptq"}


def gptq_act_order(rng):
    tensors, config = gptq(rng)
    return {**tensors, "g_idx": rng.permutation(np.arange(IN) // GROUP).astype(np.int32)}, config


def gptq_3_bits(rng):
    groups = IN // GROUP
    tensors = {"qweight": words(rng, IN * 3 // 32, OUT), "qzeros": words(rng, groups, OUT * 3 // 32)}
    return {**tensors, "scales": scales(rng, groups, OUT)}, {"quant_method": "gptq"}


def awq(rng):
    groups = IN // GROUP
    tensors = {"qweight": words(rng, IN, OUT // 8), "qzeros": words(rng, groups, OUT // 8)}
    return {**tensors, "scales": scales(rng, groups, OUT)}, {"quant_method": "awq"}


def make_compressed(bits):
    def make(rng):
        tensors = {
            "weight_packed": words(rng, OUT, IN * bits // 32),
            "weight_scale": scales(rng, OUT, IN // GROUP),
            "weight_shape": np.array([OUT, IN]),
        }
        return tensors, {"quant_method": "compressed-tensors"}

    return make


def int8(rng):
    return {"weight": rng.integers(-127, 128, (OUT, IN), np.int8), "weight_scale": scales(rng, OUT, 1)}, {}


def mxfp4(rng):
    packed = rng.integers(0, 256, (OUT, IN // 2), np.uint8)
    return {"weight_packed": packed, "weight_scale": rng.integers(100, 140, (OUT, IN // 32), np.uint8)}, {}


def nvfp4(rng):
    packed = rng.integers(0, 256, (OUT, IN // 2), np.uint8)
    inner = rng.integers(40, 100, (OUT, IN // 16), np.uint8).view(ml_dtypes.float8_e4m3fn)
    return {"weight_packed": packed, "weight_scale": inner, "weight_global_scale": np.ones(1, np.float32)}, {}


def fp8_tiles(rng):
    codes = rng.integers(0, 120, (OUT, IN), np.uint8).view(ml_dtypes.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales(rng, OUT // 128, IN // 128, dtype=np.float32)}, {}


def gpt_oss(rng):
    blocks = rng.integers(0, 256, (1, OUT, IN // 32, 16), np.uint8)
    return {"weight_blocks": blocks, "weight_scales": rng.integers(100, 140, (1, OUT, IN // 32), np.uint8)}, {}


def mlx(bits):
    def make(rng):
        group_scales = lambda: scales(rng, OUT, IN // 64)
        packed = words(rng, OUT, IN * bits // 32).view(np.uint32)
        return {"weight": packed, "scales": group_scales(), "biases": group_scales()}, {"bits": bits, "group_size": 64}

    return make


def llm_int8(rng):
    return {"weight": rng.integers(-127, 128, (OUT, IN), np.int8), "SCB": scales(rng, OUT, dtype=np.float32)}, {}


def torchao(rng):
    tensors = {"_weight_qdata": rng.integers(-127, 128, (OUT, IN), np.int8)}
    about = {"_type": "Int8Tensor", "_data": {}, "_tensor_data_names": ["qdata", "scale"]}
    return {**tensors, "_weight_scale": scales(rng, OUT, 1, dtype=np.float32)}, {"quantized_weights": json.dumps(about)}


def bitsandbytes(rng):
    table = [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [OUT, IN]}
    tensors = {
        "weight": rng.integers(0, 256, (OUT * IN // 2, 1), np.uint8),
        "weight.absmax": scales(rng, OUT * IN // 64, dtype=np.float32),
        "weight.quant_map": np.array(table, np.float32),
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }
    return tensors, {}


def gguf(kind):
    """One file of GGUF, of random codes."""
    number, block, nbytes, floats = {
        "q4_0": (2, 32, 18, (0,)),
        "q8_0": (8, 32, 34, (0,)),
        "q4_k": (12, 256, 144, (0, 2)),
        "q6_k": (14, 256, 210, (208,)),
    }[kind]

    def write(path, rng, weights):
        text = lambda x: struct.pack("<Q", len(x)) + x
        count = OUT * IN // block
        infos = b"".join(
            text(b"blk.%d.weight" % n) + struct.pack("<IQQIQ", 2, IN, OUT, number, n * count * nbytes)
            for n in range(weights)
        )
        head = b"GGUF" + struct.pack("<IQQ", 3, weights, 0) + infos
        with path.open("wb") as f:
            f.write(head + b"\0" * (-len(head) % 32))
            blocks = rng.integers(0, 256, (count, nbytes), np.uint8)
            for at in floats:
                blocks[:, at : at + 2] = scales(rng, count).view(np.uint8).reshape(-1, 2)
            for _ in range(weights):
                f.write(blocks.tobytes())

    return write


DIALECTS = {
    "safetensors, float32": plain,
    "safetensors, float16": half,
    "eqquant, NF4": None,
    "compressed-tensors, int8": int8,
    "compressed-tensors, 4 bits": make_compressed(4),
    "compressed-tensors, 3 bits": make_compressed(3),
    "compressed-tensors, MXFP4": mxfp4,
    "compressed-tensors, NVFP4": nvfp4,
    "Hugging Face, fp8 in 128 x 128": fp8_tiles,
    "GPT-OSS, MXFP4": gpt_oss,
    "torchao, int8": torchao,
    "bitsandbytes, NF4": bitsandbytes,
    "bitsandbytes, LLM.int8": llm_int8,
    "MLX, 4 bits": mlx(4),
    "MLX, 6 bits": mlx(6),
    "GPTQ, 4 bits": gptq,
    "GPTQ, 4 bits, act-order": gptq_act_order,
    "GPTQ, 3 bits": gptq_3_bits,
    "AWQ, 4 bits": awq,
    "GGUF, Q8_0": gguf("q8_0"),
    "GGUF, Q4_0": gguf("q4_0"),
    "GGUF, Q4_K": gguf("q4_k"),
    "GGUF, Q6_K": gguf("q6_k"),
}


def load_tensors(path):
    """What every library of PyTorch does first: the tensors as they are stored."""
    from safetensors.torch import load_file

    # It maps the file, so a tensor is read only when each of its bytes is.
    return {name: t.clone() for name, t in load_file(path / "model.safetensors").items()}


def load_bitsandbytes(path):
    from bitsandbytes.functional import QuantState

    tensors = load_tensors(path)
    states = [name for name in tensors if name.endswith("__nf4")]
    for state in states:
        name = state.partition(".quant_state")[0]
        parts = {key: t for key, t in tensors.items() if key.startswith(f"{name}.")}
        QuantState.from_dict(parts, device="cpu")


def decompress(path):
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    tensors = load_tensors(path)
    layers = sorted({name.rpartition(".")[0] for name in tensors})
    for layer in layers:
        parts = {name.rpartition(".")[2]: t for name, t in tensors.items() if name.startswith(f"{layer}.")}
        if "weight_packed" not in parts:
            layout, args = "int-quantized", {"num_bits": 8, "strategy": "channel"}
        elif "weight_global_scale" in parts:
            layout = "nvfp4-pack-quantized"
            args = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        elif parts["weight_packed"].dtype == torch.uint8:
            layout, args = "mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group"}
            args |= {"group_size": 32, "scale_dtype": torch.uint8}
        else:
            bits = parts["weight_packed"].shape[1] * 32 // IN
            layout, args = "pack-quantized", {"num_bits": bits, "strategy": "group", "group_size": GROUP}
        scheme = QuantizationScheme(targets=[layer], weights=QuantizationArgs(**args), format=layout)
        BaseCompressor.get_value_from_registry(layout).decompress(parts, scheme)


def dequantize_gguf(path):
    import gguf

    for t in gguf.GGUFReader(path).tensors:
        gguf.dequantize(t.data, t.tensor_type)


def library(name):
    """Returns a function that reads the file by another library, and its name."""
    if name.startswith("safetensors"):
        return load_tensors, "safetensors loads"
    if name.startswith("bitsandbytes"):
        return load_bitsandbytes, "bitsandbytes loads"
    if name.startswith("compressed"):
        return decompress, "compressed-tensors dequantizes"
    if name.startswith("GGUF"):
        return dequantize_gguf, "gguf dequantizes"
    return (None, "") if name.startswith("eqquant") else (load_tensors, "safetensors loads")


def make(name, folder, weights=COUNT):
    rng = np.random.default_rng(0)
    if name.startswith("GGUF"):
        DIALECTS[name](folder / "model.gguf", rng, weights)
        return folder / "model.gguf"
    if name.startswith("eqquant"):
        x = rng.standard_normal((OUT, IN)).astype(np.float32)
        # Arrays that are one in memory would be one in the file.
        eqq.save(folder / "model.safetensors", [eqq.quantize(x, "nf4") for _ in range(weights)])
        return folder
    one, config = DIALECTS[name](rng)
    tensors = {f"layers.{n}.{key}": x for n in range(weights) for key, x in one.items()}
    metadata = None
    if about := config.pop("quantized_weights", None):
        metadata = {f"layers.{n}.weight": about for n in range(weights)} | {"tensor_names": json.dumps(list(tensors))}
    save_file(tensors, folder / "model.safetensors", metadata)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config, "quantization": config}))
    return folder


def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024


def measure(name):
    """In this process: seconds, and peak memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = make(name, Path(folder))
        size = sum(f.stat().st_size for f in Path(folder).iterdir())
        best, processor, done, peak = float("inf"), float("inf"), threading.Event(), 0

        def watch():
            nonlocal peak
            while not done.wait(0.001):
                peak = max(peak, anonymous())

        for n in range(6):
            before = anonymous()
            watcher = threading.Thread(target=watch) if n == 1 else None
            if watcher:
                watcher.start()
            start, worked = time.perf_counter(), time.process_time()
            checkpoint = eqq.io.open(path)
            arrays = jax.block_until_ready([checkpoint[key] for key in checkpoint])
            best = min(best, time.perf_counter() - start)
            processor = min(processor, time.process_time() - worked)
            nbytes = sum(x.nbytes for x in arrays)
            if watcher:
                done.set()
                watcher.join()
                more = peak - before - nbytes
            del arrays
        measured = {"size": size, "seconds": best, "processor": processor}
        return {**measured, "more": more, "largest": nbytes / COUNT}


def measure_library(name):
    """MB/s of another library, or `None` if it is not installed."""
    load, about = library(name)
    if load is None:
        return None
    best = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        path = make(name, Path(folder), 1 if about.endswith("dequantizes") else COUNT)
        size = sum(f.stat().st_size for f in Path(folder).iterdir())
        for _ in range(2):
            start = time.perf_counter()
            try:
                load(path)
            except ImportError:
                return None
            best = min(best, time.perf_counter() - start)
    return f"{about}: {size / best / 1e6:.0f}"


def in_process(*arguments):
    run = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="rows whose name has one of these")
    parser.add_argument("--libraries", action="store_true", help="times other libraries too")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--theirs", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = [name for name in DIALECTS if any(text.lower() in name.lower() for text in arguments.only)]
    if arguments.row:
        return print(json.dumps(measure(arguments.row)))
    if arguments.theirs:
        return print(json.dumps({name: measure_library(name) for name in names}))
    theirs = in_process("--theirs", "--only", *arguments.only) if arguments.libraries else {}
    more = " Beside it, MB/s |" if theirs else ""
    columns = ("Size, MB", "MB/s", "MB per second of a core", "Memory beyond the result, MB", "One array, MB")
    print(f"| {COUNT} weights of {OUT} x {IN} | {' | '.join(columns)} |{more}")
    print(f"| --- |{' ---: |' * len(columns)}{' --- |' if more else ''}", flush=True)
    for name in names:
        row = in_process("--row", name)
        speed, core_speed = (row["size"] / row[key] / 1e6 for key in ("seconds", "processor"))
        print(
            f"| {name} | {row['size'] / 1e6:.0f} | {speed:.0f} | {core_speed:.0f} | {max(row['more'], 0) / 1e6:.0f} | "
            f"{row['largest'] / 1e6:.0f} |" + f" {theirs.get(name) or ''} |" * bool(theirs),
            flush=True,
        )


if __name__ == "__main__":
    main()
