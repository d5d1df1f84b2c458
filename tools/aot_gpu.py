"""Compiles the kernels for GPUs on a machine without one, with the same compiler: `nox -s aot`.

What compiles here compiles there. For every format that has a kernel, it prints registers, spills, and the
instructions per weight and thread in the main loop: those of `mosaic_gpu`, in the last rows, without those that a warp
runs once for all its threads. It fails if a kernel does not compile, if a dense weight is
written to memory, or if a kernel that is the default spills registers. It does not measure time. `--gpu` is `h100`,
`b200`, or `rtx4090`, to see whether kernels fit into 99 KiB of shared memory; there spills are allowed. A process
compiles for one GPU: Mosaic keeps the architecture of the first.
"""

import argparse
import collections
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any


N, K = 8192, 4096
# Device facts, in the text form of XLA's `GpuTargetConfigProto`.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98  device_memory_size: 84942979072
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
B200 = (
    H100.replace("core_count: 132", "core_count: 148")
    .replace("capability { major: 9 }", "capability { major: 10 }")
    .replace("NVIDIA H100 80GB HBM3", "NVIDIA B200")
)
ADA = (
    H100.replace("major: 9", "major: 8 minor: 9")
    .replace(
        "shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448",
        "shared_memory_per_core: 102400  shared_memory_per_block_optin: 101376",
    )
    .replace("NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090")
)
GPUS = {"h100": (H100, "sm_90a"), "b200": (B200, "sm_100a"), "rtx4090": (ADA, "sm_89")}


class Kernel(collections.namedtuple("Kernel", "registers spills shared_memory loop")):
    """What the assembler reports of one kernel, and the number of instructions in its main loop."""


def kernels_in(directory: Path, architecture: str) -> list[Kernel]:
    """Assembles the PTX of our kernels that the compiler left in a directory."""
    found = []
    for path in sorted(directory.glob("*.ptx")):
        text = path.read_text()
        if "quantized_matmul" not in text:
            continue
        cubin = path.with_suffix(".cubin")
        said = subprocess.run(
            [tool("ptxas"), "-v", f"-arch={architecture}", str(path), "-o", str(cubin)],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        number = lambda pattern, said=said: max(map(int, re.findall(pattern, said)), default=0)
        thunks = "".join(path.read_text() for path in directory.glob("*thunk_sequence.txt"))
        found.append(
            Kernel(
                number(r"Used (\d+) registers"),
                number(r"(\d+) bytes spill stores"),
                max(map(int, re.findall(r"shared_memory: (\d+)", thunks)), default=0),
                main_loop(subprocess.run([tool("nvdisasm"), "-c", str(cubin)], capture_output=True, text=True).stdout),
            )
        )
    return found


def clear(directory: Path) -> None:
    for path in directory.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def tool(name: str) -> str:
    import nvidia

    return str(next(path for root in nvidia.__path__ for path in Path(root).rglob(f"bin/{name}")))


def main_loop(sass: str) -> int:
    """The number of instructions of a thread in the shortest loop with all products, or else in the longest.

    The products are those of `mosaic_gpu`, by `wgmma` or `tcgen05`.
    """
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops: list[list[str]] = [[]]
    for line in sass.splitlines():
        if label := re.match(r"^(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?(.*?);", line):
            instructions.append(instruction[1])
            # Under a condition: after a wait, a program jumps back from its end without one.
            jump = re.search(r"(?:P\d.*BRA|BRA.*P\d).*?(\.L_x_\d+)", line)
            if jump and jump[1] in labels:
                loops.append(instructions[labels[jump[1]] :])
    multiply = lambda loop: sum(name.startswith(("HGMMA", "UTCHMMA")) for name in loop)
    if multiply(instructions) == 0:
        return max(map(len, loops))
    # Instructions on registers of the warp have names with U.
    loop = max(loops, key=lambda loop: (multiply(loop), -len(loop)))
    return sum(not name.startswith("U") for name in loop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="*", help="names of the tests' table of formats; all unless given")
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        # PTX alone: printing the program after each pass of Triton takes seven times as long as to compile it.
        os.environ["XLA_FLAGS"] = f"--xla_dump_to={directory} --xla_dump_emitter_re=ptx"
        os.environ["MOSAIC_GPU_DUMP_TO"] = directory
        os.environ["JAX_PLATFORMS"] = "cpu"
        sys.exit(check(arguments, Path(directory)))


def check(arguments: argparse.Namespace, directory: Path) -> int:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from rich.table import Table

    import eqquant as eqq
    from eqquant._matmul import dispatch
    from eqquant._matmul.kernels import mosaic_gpu
    from eqquant._matmul.kernels.triton import product as pallas_gpu
    from eqquant._matmul.problem import MatmulProblem, TargetDevice
    from tests.helpers import FORMATS, IN_KERNELS, report

    names = arguments.formats or IN_KERNELS
    config, architecture = GPUS[arguments.gpu]
    topology = topologies.get_topology_desc(platform="cuda", topology_name="", topology="1x1x1", target_config=config)
    mesh = topologies.make_mesh(topo=topology, mesh_shape=(1,), axis_names=("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    device = mesh.devices.flat[0]
    target = TargetDevice("cuda", device.device_kind, float(device.compute_capability))
    table = Table(
        *("format", "kernel", "product", "registers", "spills", "shared KiB", "per weight", "temp MiB", "chosen"),
        title=f"W({N}, {K}), compiled for {target.device}, JAX {jax.__version__}",
    )
    failures = []
    known: dict[Any, Any] = {}

    def compile_product(name: str, implementation: str, m: int, dtype: Any, transpose: bool = False) -> None:
        format = FORMATS[name].format
        q = jax.eval_shape(lambda w: eqq.quantize(w, format, dtype=dtype), jax.ShapeDtypeStruct((N, K), jnp.float32))
        x = jax.ShapeDtypeStruct((m, N if transpose else K), dtype)
        f = lambda x, q: eqq.matmul(x, q if transpose else q.T, implementation=implementation)
        args = jax.tree_util.tree_map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), (x, q))
        clear(directory)  # so that the program is alone there
        problem = MatmulProblem(m, N, K, jnp.dtype(dtype), format, transpose)
        if dispatch.find_refusal(target, problem, implementation) is not None:
            return  # other implementations take it
        product = f"{jnp.dtype(dtype).name}({m}, {x.shape[1]}) . {'W' if transpose else 'W^T'}"
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            try:
                program = jax.jit(f).trace(*args).lower().compile()
            except jax.errors.JaxRuntimeError as error:
                failures.append(f"{name} {implementation} {product}: {str(error).splitlines()[0]}")
                return
        chosen = dispatch.choose(target, problem, None)[0] == implementation
        layout = problem.layout
        # Mosaic compiles a program once, for all tables that it reads from memory.
        key = (implementation, layout._replace(table=()), layout.kind, m, dtype, transpose)
        known[key] = (*kernels_in(directory, architecture), known.get(key))[0]
        kernel = known[key]
        if implementation == "mosaic_gpu":
            rows = mosaic_gpu.generation(target).rows
            weights = mosaic_gpu.tune(layout, m, N, dtype, target).segments * layout.planes * 64 * rows / 128
        else:
            tiles = pallas_gpu.tune(target.device, layout.bits, jnp.dtype(dtype).itemsize, m, transpose=transpose)
            tile_bytes = pallas_gpu._run_bytes(layout) if transpose else pallas_gpu._step_bytes(layout)
            weights = tiles.tile_n * tile_bytes * layout.planes / (32 * tiles.num_warps)
        temp = program.memory_analysis().temp_size_in_bytes / 2**20
        table.add_row(
            *(
                name,
                implementation,
                product,
                str(kernel.registers),
                str(kernel.spills),
                f"{kernel.shared_memory / 1024:.0f}",
            ),
            *(f"{kernel.loop / weights:.1f}", f"{temp:.1f}", "yes" if chosen else ""),
        )
        dense = re.search(rf"\b(bf16|f16|f32)\[({N},{K}|{K},{N})\]", program.as_text())
        # Temporary arrays hold partial sums of parts (split-K).
        is_strict = chosen or implementation == "mosaic_gpu"
        if dense or temp > 20 or (is_strict and kernel.spills and config != ADA):
            why = f"{dense and dense[0]}, {temp:.1f} MiB, {kernel.spills} bytes spilled"
            failures.append(f"{name} {implementation} {product}: {why}")

    def compile_sharded() -> None:
        """Checks that each of four devices runs a kernel on its rows of the packed weight."""
        four = topologies.get_topology_desc(platform="cuda", topology_name="", topology="1x4x1", target_config=config)
        mesh = topologies.make_mesh(topo=four, mesh_shape=(4,), axis_names=("x",))
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        q = jax.eval_shape(
            lambda w: eqq.quantize(w, "nf4", dtype="bfloat16"), jax.ShapeDtypeStruct((N, K), jnp.float32)
        )
        q = jax.tree_util.tree_map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows), q)
        x = jax.ShapeDtypeStruct((8, K), jnp.bfloat16, sharding=whole)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            text = jax.jit(lambda x, q: x @ q.T).trace(x, q).lower().compile().as_text()
        if "triton" not in text or "all-gather" in text or f"[8,{N // 4}]" not in text:
            failures.append("a product on four devices is not sharded by rows of the weight")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_sharded()
        for name in names:
            for m, dtype, transpose in (
                *((1, "bfloat16", False), (16, "bfloat16", False), (32, "float16", False), (64, "bfloat16", False)),
                *((128, "bfloat16", False), (256, "bfloat16", False)),
                *((16, "bfloat16", True), (64, "bfloat16", True), (16, "float32", False)),
            ):
                compile_product(name, "pallas_gpu", m, dtype, transpose)
            # On Blackwell, one row takes the same program as 16.
            few = () if mosaic_gpu.generation(target).least_m == 16 else ((1, "bfloat16"),)
            for m, dtype in (*few, (16, "bfloat16"), (16, "float16"), (64, "bfloat16"), (256, "bfloat16")):
                compile_product(name, "mosaic_gpu", m, dtype)
    return report(table, failures)


if __name__ == "__main__":
    main()
