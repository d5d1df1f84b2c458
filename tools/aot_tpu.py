"""Compiles the kernels for TPUs on a machine without one, with the compiler of the real ones: `nox -s aot`.

For every format that has a kernel it prints the temporary memory and the bytes that the program accesses, for three
generations; and it fails where the compiler refuses, or where a dense weight is written to memory. It says nothing of
time. A type that a generation lacks may abort the compiler, so each generation has a process of its own.
"""

import argparse
import os
import re
import subprocess
import sys


N, K = 4096, 4096
GENERATIONS = ("v5e:2x2", "v6e:2x2", "tpu7x:2x2x1")
CASES = (
    *((1, "bfloat16", False), (16, "bfloat16", False), (64, "bfloat16", False)),
    *((16, "bfloat16", True), (16, "float32", False)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generation", choices=GENERATIONS, help="all of them unless given")
    parser.add_argument("--formats", nargs="*", help="names of the tests' table of formats; all unless given")
    arguments = parser.parse_args()
    # Only to silence questions about a machine that is not there.
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}
    os.environ |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}
    if arguments.generation is not None:
        sys.exit(check(arguments.generation, arguments.formats))
    passed_on = ["--formats", *arguments.formats] if arguments.formats else []
    codes = [
        subprocess.run(
            [sys.executable, "-m", "tools.aot_tpu", "--generation", generation, *passed_on],
            timeout=1800,
        ).returncode
        for generation in GENERATIONS
    ]
    sys.exit(max(map(abs, codes)))


def check(generation: str, names: list[str] | None) -> int:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from rich.table import Table

    import eqquant as eqq
    from eqquant._matmul import dispatch
    from eqquant._matmul.problem import MatmulProblem, TargetDevice
    from tests.helpers import FORMATS, IN_KERNELS, report

    topology = topologies.get_topology_desc(platform="tpu", topology_name=generation)
    sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
    table = Table(
        *("format", "stored MiB", *(f"{dtype} {m}{', transposed' if t else ''}" for m, dtype, t in CASES)),
        title=f"W({N}, {K}) for {topology.devices[0].device_kind}, JAX {jax.__version__}: temporary, accessed MiB",
    )
    failures = []

    def compiled(name: str, m: int, dtype: str, transpose: bool) -> str:
        format = FORMATS[name].format
        problem = MatmulProblem(m, N, K, jnp.dtype(dtype), format, transpose)
        if dispatch.find_refusal(TargetDevice("tpu"), problem, "pallas_tpu") is not None:
            return "no kernel"
        q = jax.eval_shape(lambda w: eqq.quantize(w, format, dtype=dtype), jax.ShapeDtypeStruct((N, K), jnp.float32))
        x = jax.ShapeDtypeStruct((m, N if transpose else K), dtype)
        args = jax.tree_util.tree_map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), (x, q))
        f = lambda x, q: eqq.matmul(x, q if transpose else q.T, implementation="pallas_tpu")
        try:
            program = jax.jit(f).lower(*args).compile()
        except Exception as error:
            failures.append(f"{name}, {m} {dtype} {transpose=}: {str(error).splitlines()[0][:200]}")
            return "refused"
        temp = program.memory_analysis().temp_size_in_bytes / 2**20
        costs = program.cost_analysis()
        dense = re.search(rf"\b(bf16|f32|s32|s8)\[({N},{K}|{K},{N})\]", program.as_text())
        if dense or temp > 8 or "tpu_custom_call" not in program.as_text():
            failures.append(f"{name}, {m} {dtype} {transpose=}: {temp:.1f} MiB, {dense and dense[0]}")
        return f"{temp:.1f}, {costs.get('bytes accessed', 0) / 2**20:.1f}"

    def divided() -> None:
        """Inside `shard_map`, each device takes its rows of the packed weight, with a kernel."""
        mesh = jax.sharding.Mesh(np.array(topology.devices), ("x",))
        rows = jax.sharding.PartitionSpec("x")
        q = jax.eval_shape(
            lambda w: eqq.quantize(w, "nf4", dtype="bfloat16"), jax.ShapeDtypeStruct((N, K), jnp.float32)
        )
        x = jax.ShapeDtypeStruct((8, K), jnp.bfloat16)
        specs = (jax.sharding.PartitionSpec(), rows)
        place = lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))
        args = (place(x, specs[0]), jax.tree_util.tree_map(lambda a: place(a, rows), q))
        columns = jax.sharding.PartitionSpec(None, "x")
        f = jax.shard_map(lambda x, q: x @ q.T, mesh=mesh, in_specs=specs, out_specs=columns)
        text = jax.jit(f).lower(*args).compile().as_text()
        if "tpu_custom_call" not in text or "all-gather" in text:
            failures.append("a product in `shard_map` is not divided as it should be")

    divided()
    for name in names or IN_KERNELS:
        bits = FORMATS[name].bits
        table.add_row(name, f"{bits / 8 * N * K / 2**20:.1f}", *(compiled(name, *case) for case in CASES))
    return report(table, failures)


if __name__ == "__main__":
    main()
