"""Two processes with four devices each compute the same as one with eight."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from tools import two_processes


LIMIT = 240  # seconds


@pytest.fixture
def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.long
def test_two_processes(tmp_path, free_port):
    path = tmp_path / "done.json"
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "4",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiles sooner
        "XLA_FLAGS": "",
    }
    logs = [(tmp_path / f"{rank}.log").open("w+") for rank in range(2)]
    command = [sys.executable, two_processes.__file__]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(free_port), str(path)],
            env=env,
            cwd=Path(__file__).parents[1],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=LIMIT) for process in processes]
    finally:
        for process in processes:  # whatever happens, none is left behind
            process.kill()
            process.wait()
    printed = []
    for log in logs:
        log.seek(0)
        printed.append(log.read()[-3000:])
        log.close()
    assert codes == [0, 0], "\n".join(printed)
    done = json.loads(path.read_text())

    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        alone = two_processes.run(mesh)
    assert done["specs"] == alone["specs"] == [["model", None], ["model", None], [None, "model"]]
    assert tuple(done["local_codes"]) == tuple(alone["local_codes"]) == (128, 64)
    np.testing.assert_allclose(done["losses"], alone["losses"], rtol=1e-4)
    assert done["losses"][-1] < done["losses"][1] - 0.1
