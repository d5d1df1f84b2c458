"""The tests that concern a file: `.ci/run` runs those of what changed, and `mutate_python.py` those of a mutant.

`python -m tools.changed_tests` prints the test files that concern what changed since a commit: that of `EQQUANT_BASE`,
or the newest one more than four hours older than the last one, since a push is a few hours' work. What is not
committed counts as changed. Without such a commit, in a shallow clone or without git, it prints none.
"""

import os
import re
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[1]
NUMERICS = """test_numerics.py test_packing.py test_formats.py test_errors.py
    -k 'test_numerics or test_packing or minifloat or e8m0 or mx_scale or nvfp4_scale or codebook or ties or round_half
    or int2 or affine or equals or codes_of or integers or mlx or block_size or format_names or pass_through'"""
TRELLIS = "test_trellis.py -k 'by_hand or best_sequence or minimizes or outlier or names or scales'"
PALLAS_TPU = """test_pallas_tpu.py -m 'slow or not slow'
    -k 'unsupported or bits or halves or tiles or config or highest or transposed or 300 and (nf4 or affine)'"""
# By the first of these that a path contains. `-k` and `--every` are for mutants, on which tests run many times.
TESTS = {
    "pyproject": "test_project.py",
    "docs/tools/add_version": "test_project.py",
    "docs/": "test_pages.py test_public_docs.py test_notebooks.py",
    "examples/llama": "test_llama.py",
    "examples/": "test_notebooks.py test_minilm.py",
    "native/": "test_cpu_matmul.py test_cpu_int8.py test_cpu_decode.py test_cpu_encode.py --every 30",
    "tests/golden": "test_golden_files.py test_golden_checkpoints.py test_reference.py test_llama.py",
    "tools/notebooks": "test_notebooks.py",
    "tools/two_processes": "test_processes.py",
    "tools/": "test_project.py",
    "benchmarks/": "test_architecture.py",
    ".ci/": "test_project.py",
    ".github/": "test_project.py",
    "hatch_build": "test_project.py",
    "noxfile": "test_project.py",
    "README": "test_pages.py test_project.py",
    "__init__": "test_architecture.py test_public_docs.py",
    "eqquant/arrays": "test_architecture.py test_public_docs.py",
    "eqquant/extend": "test_architecture.py test_public_docs.py",
    "eqquant/formats": "test_architecture.py test_public_docs.py",
    "eqquant/reference": "test_reference.py --every 5",
    "eqquant/__main__": "test_cli.py --every 5",
    "_compat": "test_operators.py test_matmul.py test_control_flow.py test_ecosystem.py test_sharding.py --every 5",
    "_errors": "test_errors.py test_misuse.py --every 5",
    "_export": "test_export.py --every 5",
    "_mesh": "test_sharding.py test_partition.py --every 5",
    "_report": "test_explain.py test_tree.py test_analysis.py --every 5",
    "_types": "test_public_docs.py",
    "_numerics/hadamard": "test_rotations.py -k 'transpose or matrices'",
    "_numerics/hashing": "test_low_precision.py -k 'hashes or seed'",
    "_numerics/trellis": TRELLIS,
    "_numerics": NUMERICS,
    "_formats/trellis": TRELLIS,
    "_formats/iq": "test_vectors.py -k 'not (native or mesh or products or masters)'",
    "_formats/grids": "test_vectors.py -k 'gguf or nearest or bytes or any_size'",
    "_formats": NUMERICS,
    "kernels/pallas_tpu": PALLAS_TPU,
    "kernels/vpu": PALLAS_TPU,
    "kernels/mosaic": "test_mosaic_gpu.py --every 10",
    "kernels/scaled_matmul": "test_activations.py -k block_scaled",
    "kernels/triton": "test_pallas_gpu.py --every 10",
    "kernels/packed": "test_xla_cpu.py test_dispatch.py -k 'format or length or pref or forced or on_gpu' --every 6",
    "kernels/xla_cpu": "test_xla_cpu.py test_dispatch.py -k 'xla_cpu or pref'",
    "kernels/xla_codes": "test_activations.py test_dispatch.py -k 'test_activations or types'",
    "kernels/cpu_int8": "test_cpu_int8.py --every 20",
    "kernels/cpu": "test_cpu_matmul.py --every 30",
    "kernels/xla.": "test_dispatch.py test_pallas_tpu.py -k 'xla_on_gpu or test_float32'",
    "_matmul/dispatch": """test_dispatch.py test_activations.py test_select.py
        -k 'pref or forc or prec or types or refus or symbolic or small_floats or few_rows_mult or several_indices
        or empty_batch or stacked'""",
    "_matmul/explain": "test_matmul.py test_activations.py test_explain.py -k 'explain or last_two'",
    "_matmul/problem": "test_matmul.py test_activations.py test_dispatch.py -k 'explain or pref'",
    "_matmul/selected": "test_select.py -k 'not devices and not training'",
    "_matmul/rows": "test_activations.py -k 'no_scale or straight or lowest or nan_in or transformations'",
    "_matmul/primitive_rules": """test_matmul.py test_select.py test_experts.py test_dispatch.py
        test_partition.py -k 'test_matmul or test_select or ragged or export or one_tpu'""",
    "_matmul/partition": """test_partition.py
        -k 'tensor_par or scattered or fully or both_operands or cover_more or parts or stacked or more_devices'""",
    "_matmul/rounded": "test_low_precision.py test_delayed.py",
    "_matmul": "test_dispatch.py -k 'pref or forc'",
    "_quax/quaxify": "test_ecosystem.py test_operators.py -k quaxify",
    "_quax/trace": "test_quax_packed.py test_control_flow.py -k 'custom or checkpoint or rules'",
    "_quax/control_flow": "test_control_flow.py",
    "_quax/convolution": "test_wrappers_in_numpy.py test_activations_convolutions.py --every 5",
    "_quax/ragged": "test_wrappers_in_numpy.py test_experts.py --every 5",
    "_quax/products": "test_quax_packed.py test_operators.py test_rules.py -k 'test_operators or nf4 or convolution'",
    "_quax": "test_wrappers_in_numpy.py test_quax_packed.py test_rules.py --every 5",
    "_array/moves": "test_wrappers_in_numpy.py test_quax_packed.py test_rules.py --every 5",
    "_methods/gptq": "test_gptq.py --every 5",
    "_methods/gram": "test_statistics.py test_gptq.py test_learned.py --every 5",
    "_methods/learned": "test_learned.py --every 5",
    "_methods/joint": "test_joint.py --every 5",
    "_methods/fingerprint": "test_fingerprint.py --every 5",
    "_methods/statistics": "test_statistics.py test_gptq.py test_experts.py test_joint.py test_imatrix.py --every 5",
    "_methods/base": "test_statistics.py test_methods.py test_gptq.py test_fingerprint.py --every 5",
    "_methods/stochastic": "test_methods.py test_formats.py test_masters.py test_simulate.py -k stoch --every 5",
    "_methods/given": "test_statistics.py test_calibrate.py test_delayed.py -k 'scale or numpy or clipped' --every 5",
    "_methods": "test_statistics.py test_methods.py test_formats.py test_contract.py test_errors.py --every 5",
    "calibrate/_collect": "test_collect_stats.py test_experts.py --every 5",
    "calibrate/_gradients": "test_collect_stats.py -k 'grad or lookup or table' --every 5",
    "calibrate/_obs": "test_statistics.py test_collect_stats.py test_sequential.py test_experts.py --every 5",
    "calibrate/_dataflow": "test_sequential.py test_walk.py --every 5",
    "calibrate/_walk": "test_walk.py test_sequential.py --every 5",
    "calibrate/_sequential": "test_statistics.py test_sequential.py test_walk.py --every 5",
    "calibrate/_stats": "test_statistics.py test_collect_stats.py test_activations_static.py test_experts.py --every 5",
    "calibrate": "test_calibrate.py --every 5",
    "_training/delayed": "test_delayed.py --every 5",
    "_training/compensate": "test_lora.py -k error --every 5",
    "_training/distill": "test_distill.py --every 5",
    "_training/divergence": "test_distill.py --every 5",
    "_training/gradients": "test_gradients.py --every 5",
    "_training/lora": "test_lora.py --every 5",
    "_training/low_precision": "test_low_precision.py test_delayed.py --every 5",
    "_training/mask": "test_lora.py test_gradients.py test_delayed.py -k 'mask or train or low_rank' --every 5",
    "_training/masters": "test_masters.py test_masters_errors.py --every 5",
    "_training/moments": "test_moments.py --every 5",
    "_training/residuals": "test_residuals.py --every 5",
    "_training/simulate": "test_simulate.py --every 5",
    "transforms/_rotate": "test_rotations.py test_mapped.py -k 'test_rotations or errors' --every 5",
    "transforms/_smooth": "test_smooth.py test_weights.py -k 'test_smooth or both_orders' --every 5",
    "transforms/": "test_smooth.py test_rotations.py --every 5",
    "_training": "test_gradients.py test_masters.py test_simulate.py test_sharded_training.py --every 5",
    "analysis": "test_analysis.py test_analysis_models.py --every 5",
    "io/_dialects/gguf": "test_checkpoints.py test_golden_checkpoints.py test_writers.py -k 'gguf or golden' --every 5",
    "io/_dialects": """test_checkpoints.py test_declared_layouts.py test_golden_checkpoints.py
        test_damaged_weights.py test_writers.py --every 5""",
    "io/_writers": "test_writers.py test_convert.py --every 5",
    "io/_vector_blocks": "test_checkpoints.py test_writers.py -k gguf --every 5",
    "io/_blocks": "test_checkpoints.py test_writers.py -k gguf --every 5",
    "io/_imatrix": "test_imatrix.py",
    "io/_llama_cpp": "test_convert.py --every 5",
    "io/_convert": "test_convert.py --every 5",
    "io/_write.": "test_writers.py test_convert.py --every 5",
    "io/_load_": "test_load_into.py test_permuted_files.py --every 5",
    "io/_name": "test_load_into.py --every 5",
    "io/_parts": "test_load_into.py --every 5",
    "io/_rules": "test_load_into.py --every 5",
    "io/_load.": "test_files.py test_permuted_files.py --every 5",
    "io/_save": "test_files.py test_permuted_files.py --every 5",
    "io/": """test_checkpoints.py test_files.py test_incomplete_files.py test_atomic.py test_hostile_files.py
        test_declared_layouts.py test_writers.py --every 5""",
    "_wrappers/activation": "test_wrappers_in_numpy.py test_activations.py test_activations_static.py --every 5",
    "_wrappers/concatenate": "test_wrappers_in_numpy.py test_load_into.py test_rules.py --every 5",
    "_wrappers/learned_scale": "test_simulate.py --every 5",
    "_wrappers/lora": "test_wrappers_in_numpy.py test_lora.py --every 5",
    "_wrappers/low_precision": "test_low_precision.py test_delayed.py --every 5",
    "_wrappers/simulated": "test_simulate.py --every 5",
    "_wrappers/permuted": """test_checkpoints.py test_permuted_files.py test_wrappers_in_numpy.py
        -k 'act_order or permuted'""",
    "_wrappers": """test_wrappers_in_numpy.py test_wrappers.py test_own_wrapper.py test_mapped.py test_rules.py
        --every 5""",
    "_array/contraction": "test_matmul.py test_rules.py test_operators.py --every 5",
    "_array/serialize": "test_serialize.py",
    "_array/sharding": "test_sharding.py --every 5",
    "_array/straight": "test_simulate.py test_gradients.py --every 5",
    "_array/checks": "test_errors.py test_contract.py test_operators.py --every 5",
    "_array": "test_contract.py test_operators.py test_errors.py test_sharding.py --every 5",
    "_tree/placement": "test_sharding.py --every 5",
    "_tree/kept": "test_walk.py test_distill.py -k 'kept' --every 5",
    "_tree/no_dense": "test_no_dense.py",
    "_tree/explain": "test_explain.py",
    "_tree/decide": """test_tree.py test_weights.py
        -k 'rule or where or axis or axes or glob or role or statistics or overrides or default' --every 5""",
    "_tree/patterns": "test_load_into.py --every 5",
    "_tree/select": """test_tree.py test_wrappers.py test_errors.py
        -k 'rule or where or glob or selection or pattern or default' --every 5""",
    "_tree/quantize": """test_tree.py test_fingerprint.py
        -k 'rule or where or axis or progress or plain or tied or error or fingerprint' --every 5""",
    "_tree": "test_tree.py test_weights.py test_wrappers.py --every 5",
    "_program/cut": "test_walk.py --every 5",
    "_program": "test_follow.py test_collect_stats.py --every 5",
    "_cache": "test_cache.py test_cache_attend.py --every 5",
    "eqquant_cli": "test_cli.py test_convert.py --every 5",
}


def git(*arguments: str) -> str:
    """What git prints. Nothing, where it fails or is missing."""
    command = ["git", "-c", "safe.directory=*", *arguments]  # the clone may belong to another user
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def find_base() -> str:
    """The commit since which files changed."""
    if base := os.environ.get("EQQUANT_BASE"):
        return git("rev-parse", "--verify", "--quiet", f"{base}^{{commit}}")
    last = git("log", "-1", "--format=%ct")
    return last and git("rev-list", "-1", f"--min-age={int(last) - 4 * 3600}", "HEAD")


def list_changes(base: str) -> list[str]:
    """The paths of files that were added, changed or removed."""
    new = git("ls-files", "--others", "--exclude-standard")
    return f"{git('diff', '--name-only', '--no-renames', base)}\n{new}".split("\n")


def find_tests(path: str) -> list[str]:
    """The names of the test files that concern a file. Those of what all tests share are none in particular."""
    words = path if path.startswith("tests/test_") else next((TESTS[part] for part in TESTS if part in path), "")
    return re.findall(r"test_\w+(?=\.py)", words)


def main() -> None:
    if not (base := find_base()):
        print("No commit to compare with: what changed runs as the rest does.", file=sys.stderr)
        return
    changes = list_changes(base)
    names = {name for path in changes for name in find_tests(path) if (ROOT / "tests" / f"{name}.py").exists()}
    print(f"{len(changes)} files changed since {base[:12]}.", file=sys.stderr)
    print(*sorted(names), sep=",")


if __name__ == "__main__":
    main()
