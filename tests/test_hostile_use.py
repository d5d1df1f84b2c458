"""Kills, full disks, files that shrink, forks, threads and interrupts: the old file or the new one, never half."""

import errno
import io
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant.io._convert import convert_into


ROOT = Path(__file__).parents[1]
SHAPE = (64, 1024)
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


def model(value):
    return {f"{name}.weight": np.full(SHAPE, value, np.float32) for name in "vw"}


def convert(format, **options):
    return lambda source, path, **more: eqq.io.convert(source, path, format, **options, **more)


# What writes, from a source to a path: the old file or folder there is replaced.
OPERATIONS = {
    "save": lambda source, path: eqq.save(path, eqq.load(source)),
    "save_shards": lambda source, path: eqq.save(path, eqq.load(source), shard_nbytes=1),
    "convert": convert(None),
    "quantize": convert("int8"),
    "quantize_shards": convert("int8", shard_nbytes=1),
    "gguf": convert("q8_0", dialect="gguf"),
}
# These replace several files, which a kill can divide. An error cannot.
FOLDERS = {
    "int8_folder": convert("int8", dialect="bitsandbytes"),
    "mlx_shards": convert("mxfp8", dialect="mlx", shard_nbytes=1),
    "own_folder": lambda source, path, **more: convert_into(eqq.io.open(source), path, "int8", **more),
}


def output(folder, operation):
    names = {"save": "a.safetensors", "convert": "a.safetensors", "quantize": "a.safetensors", "gguf": "a.gguf"}
    return folder / names.get(operation, "a")


@pytest.fixture
def sources(tmp_path):
    """Two checkpoints, whose values are all ones and all twos."""
    (tmp_path / "sources").mkdir()
    (tmp_path / "out").mkdir()
    paths = [tmp_path / "sources" / f"{n}.safetensors" for n in (1, 2)]
    for n, path in enumerate(paths):
        eqq.save(path, model(n + 1))
    return paths


def found(path):
    """The values in all arrays of a checkpoint: one, unless they are of several."""
    checkpoint = eqq.io.open(path)
    assert set(checkpoint) == {"v.weight", "w.weight"}
    dense = lambda x: np.asarray(x.dequantize() if eqq.is_quantized(x) else x, np.float32)
    return {round(float(x), 2) for name in checkpoint for x in np.unique(dense(checkpoint[name]))}


def contents(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


# Kills

PROGRAM = """
import itertools, os, signal, sys, time
from pathlib import Path
from tests.test_hostile_use import OPERATIONS

write, out = OPERATIONS[sys.argv[1]], Path(sys.argv[2])
sources = sys.argv[3:]
for line in sys.stdin:  # no process but its children computes by JAX, so that they may be forked
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        for source in itertools.cycle(sources):
            write(source, out)
            os.write(writer, b".")
    os.read(reader, 2)
    os.read(reader, 1)
    started = time.perf_counter()
    os.read(reader, 1)
    time.sleep(float(line) * 2 * (time.perf_counter() - started))  # within the next two
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader), os.close(writer)
    print("killed", flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes that are forked")
@pytest.mark.parametrize("kills", [3, pytest.param(25, marks=(pytest.mark.slow, pytest.mark.long))])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_kill_leaves_the_old_file_or_the_new_one(tmp_path, sources, operation, kills):
    rng, path = random.Random(operation), output(tmp_path / "out", operation)
    command = [sys.executable, "-c", PROGRAM, operation, str(path), *map(str, sources)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(command, cwd=ROOT, env=ENV, **pipes) as run:
        for _ in range(kills):
            print(rng.random(), file=run.stdin, flush=True)
            assert run.stdout.readline() == "killed\n"
            assert found(path) in ({1.0}, {2.0})
        run.stdin.close()
    OPERATIONS[operation](sources[1], path)
    assert found(path) == {2.0} and not [*path.parent.rglob(".*")]


# Full disks


class FullDisk(io.FileIO):
    """A file on a disk that has room for so many writes."""

    room = 0

    def write(self, data):
        FullDisk.room -= 1
        if FullDisk.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@pytest.mark.parametrize("operation", [*OPERATIONS, *FOLDERS])
def test_a_full_disk_leaves_the_old_file(tmp_path, sources, operation, monkeypatch):
    write, path = {**OPERATIONS, **FOLDERS}[operation], output(tmp_path / "out", operation)
    original = Path.open
    on_full_disk = lambda file, mode="r", *args, **kwargs: (
        io.BufferedWriter(FullDisk(file, mode)) if mode == "wb" else original(file, mode, *args, **kwargs)
    )
    for exists in (False, True):
        if exists:
            write(sources[0], path)
        before = contents(tmp_path / "out")
        for room in range(30):
            with monkeypatch.context() as patch:
                patch.setattr(Path, "open", on_full_disk)
                FullDisk.room = room
                try:
                    write(sources[1], path)
                except OSError as error:
                    assert error.errno == errno.ENOSPC and error.filename == str(path)
                else:
                    break
            assert before == contents(tmp_path / "out")
        assert room > 1 and found(path) == {2.0}
        if not exists:
            for file in sorted((tmp_path / "out").rglob("*"), reverse=True):
                file.rmdir() if file.is_dir() else file.unlink()


def test_a_limit_of_the_system(tmp_path):
    resource = pytest.importorskip("resource")
    path = tmp_path / "a.safetensors"
    eqq.save(path, {"w": np.zeros(3)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        with pytest.raises(OSError, match="too large") as raised:
            eqq.save(path, model(1.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.filename == str(path)
    assert [*tmp_path.iterdir()] == [path] and eqq.load(path)["w"].shape == (3,)


# Interrupts


@pytest.mark.parametrize("operation", [*OPERATIONS, *FOLDERS][2:])
def test_an_interrupt_leaves_nothing(tmp_path, sources, operation):
    """At the first and at the last array, as from a key while a progress bar is shown."""
    path, seen = output(tmp_path / "out", operation), []

    def each(name, *_):
        seen.append(name)
        if len(seen) == stop:
            raise KeyboardInterrupt

    for stop in (1, 2):
        seen.clear()
        with pytest.raises(KeyboardInterrupt):
            {**OPERATIONS, **FOLDERS}[operation](sources[0], path, each=each)
        assert [*(tmp_path / "out").iterdir()] == []


# Files that shrink


def test_a_file_that_becomes_shorter(tmp_path):
    paths = tmp_path / "a.safetensors", tmp_path / "a.gguf"
    eqq.save(paths[0], model(1.0))
    eqq.io.write(paths[1], model(1.0), "gguf")
    for path in paths:
        checkpoint = eqq.io.open(path)
        assert checkpoint["v.weight"].shape == SHAPE
        os.truncate(path, 4096)
        with pytest.raises(ValueError, match=f"{path.name} must not become shorter while it is open. Got 4096 bytes"):
            checkpoint["w.weight"]


# Processes and threads


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_threads_of_a_fork(tmp_path):
    """Threads that read files do not live on in a child, which starts its own."""
    program = """
import os, sys
import numpy as np
from eqquant.io import _memory

big = np.arange(3 * 2**20, dtype=np.float32)
_memory.copy_in_parallel(big)
if os.fork() == 0:
    os._exit(0 if (_memory.copy_in_parallel(big) == big).all() else 1)
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    subprocess.run([sys.executable, "-c", program], env=ENV, check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_arrays_go_to_other_processes(tmp_path, method):
    """By pickle, and by file."""
    program = """
import concurrent.futures, multiprocessing, sys
import jax.numpy as jnp, eqquant as eqq

def total(q):
    return float((q @ jnp.ones(64)).sum())

if __name__ == "__main__":
    q = eqq.quantize(jnp.ones((4, 64)), "nf4")
    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context(sys.argv[1])) as pool:
        assert [*pool.map(total, [q, q])] == [256.0, 256.0]
"""
    script = tmp_path / "program.py"
    script.write_text(program)
    subprocess.run([sys.executable, str(script), method], env=ENV, check=True, timeout=120)


def test_threads_write_and_read_one_file(tmp_path):
    """Each reader finds one whole file, whoever writes; and threads may share a checkpoint that is open."""
    path, errors, seen = tmp_path / "a.safetensors", [], set()
    eqq.save(path, model(0.0))
    shared = eqq.io.open(path)

    def work(n):
        try:
            for _ in range(5):
                eqq.save(path, model(float(n)))
                values = {float(x) for leaf in eqq.load(path).values() for x in np.unique(leaf)}
                assert len(values) == 1
                seen.update(values)
                assert not np.asarray(shared["w.weight"]).any()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and seen <= {0.0, 1.0, 2.0, 3.0}
    assert [*tmp_path.iterdir()] == [path]


def test_threads_quantize_and_multiply(tmp_path):
    """The caches of programs, layouts and formats are shared by threads."""
    results = {}

    def work(n):
        with jax.numpy_dtype_promotion("strict"):
            q = eqq.quantize(jnp.arange(128.0).reshape(2, 64), ("nf4", "int4", "int8")[n % 3])
            results[n] = np.asarray(q @ jnp.ones(64))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 9
    for n in range(9):
        np.testing.assert_array_equal(results[n], results[n % 3])
