"""`pysync` as a user has installed it: started by a command of its own, away from the checkout."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextmanager
def serving(command: Sequence[str | Path], folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `command`, a `pysync serve`, in `folder`, and yield the process and its URL once it serves. It is
    killed at the end if it still runs; `serve.log` in the folder has its log."""
    with (folder / "serve.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        assert " at http://" in first, first + (folder / "serve.log").read_text()
        yield process, first.split(" at ")[1].strip()
    finally:
        process.kill()
        process.stdout.read()  # workers hold it too: it is closed when all have ended
        process.stdout.close()
        process.wait()


def run_protocol_tests(url: str) -> None:
    """Run the tests of the protocol against a service that was started with tests/protocol.json."""
    command = [sys.executable, "-m", "pytest", "-q", "tests/server/api/test_protocol.py"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "TESTS_URL": url}, check=True)
