"""The wheel that `make dist` has built, on each Python of this machine. `make test` does not run this."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from support.installed import ROOT, run_protocol_tests, serving

pytestmark = [pytest.mark.timeout(600)]

(WHEEL,) = ROOT.glob("dist/*.whl")
PYENV = Path.home() / ".pyenv/versions"


def pythons() -> dict[str, str]:
    """A Python of each supported version that this machine has."""
    found: dict[str, str] = {}
    for version in ("3.11", "3.12", "3.13", "3.14"):
        for path in [*map(str, PYENV.glob(f"{version}.*/bin/python")), f"python{version}"]:
            command = [path, "-c", "import sys; print(sys.version)"]
            ran = shutil.which(path) and subprocess.run(command, capture_output=True, text=True, check=False)
            if ran and ran.stdout.startswith(version):
                found[version] = path
    return found


@pytest.mark.parametrize("python", [pytest.param(path, id=version) for version, path in pythons().items()])
def test_pipx_installs_a_wheel_that_keeps_the_protocol(python: str, tmp_path: Path) -> None:
    environment = {
        "PATH": "/usr/bin:/bin",
        "PIPX_HOME": str(tmp_path / "home"),
        "PIPX_BIN_DIR": str(tmp_path),
    }
    pipx = [sys.executable, "-m", "pipx", "install", "--python", python, str(WHEEL)]
    subprocess.run(pipx, env={**os.environ, **environment}, check=True)
    pysync = str(tmp_path / "pysync")
    config = str(ROOT / "tests/protocol.json")

    # The base refuses a feature of an extra, and names the command that installs it, which has to work.
    check = [pysync, "check", config]
    refused = subprocess.run(check, capture_output=True, text=True, check=False)
    command = re.search(r"\S+ -m pip install 'pysync\[schema\]'", refused.stdout + refused.stderr)
    assert refused.returncode == 1
    assert command is not None, refused.stderr
    subprocess.run(command[0], shell=True, check=True)

    serve = [pysync, "serve", "--config", config, "--store", "file:data", "--port", "0"]
    with serving(serve, tmp_path) as (_, url):
        run_protocol_tests(url)
        with urlopen(f"{url}/client/pysync.js") as module:
            assert module.read() == (ROOT / "pysync/web/pysync.js").read_bytes()
