"""Plays two successive tags with the same `eqquant-cpu`: `python -m tools.publish_twice FOLDER SECOND`.

Uploads the distributions of one folder, and then those of the second, as the workflow does it: with twine, which skips
what is there. The index is a server on this machine, which refuses files that it has, as PyPI does.
"""

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path


# twine skips files on PyPI and TestPyPI alone, so that it has to take this server for one.
TWINE = "import sys, twine.repository as r, twine.__main__ as m; r.TEST_WAREHOUSE = sys.argv[3]; sys.exit(m.main())"


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Runs an empty index, and yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("-i", "127.0.0.1", "-p", str(port), "-P", ".", "-a", ".", "--disable-fallback", str(folder))
    server = subprocess.Popen([sys.executable, "-m", "pypiserver", "run", *options], stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}/"
    try:
        for _ in range(100):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}simple/").close()
                break
            time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        server.wait()


def upload(address: str, files: list[Path]) -> None:
    options = ("--repository-url", address, "--skip-existing", "-u", "any", "-p", "any", "--disable-progress-bar")
    command = [sys.executable, "-c", TWINE, "upload", *options, *map(str, files)]
    subprocess.run(command, check=True)


def main(first: Path, second: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder)) as address:
        stored = lambda: {path.name: path.read_bytes() for path in Path(folder).iterdir()}
        upload(address, sorted(first.glob("eqquant*")))
        before = stored()
        upload(address, sorted(second.glob("eqquant*")))
        after = stored()
    new = {path.name for path in second.glob("eqquant*")} - before.keys()
    kernels = {name for name in before if name.startswith("eqquant_cpu")}
    if not new or any("eqquant_cpu" in name for name in new) or not kernels:
        sys.exit(f"The second folder must hold a new eqquant and the same eqquant-cpu. Got {sorted(new)} as new.")
    if after.keys() != before.keys() | new or any(after[name] != content for name, content in before.items()):
        sys.exit(f"The second tag must add {sorted(new)} alone. Got {sorted(after)}.")
    print(f"The second tag published {', '.join(sorted(new))}, and skipped {', '.join(sorted(kernels))}.")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
