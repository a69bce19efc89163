"""The commands of the how-to pages that install, upgrade and roll back the service of systemd.

They run word for word, with `/opt`, `/etc` and `/var` below a temporary folder. A `systemctl` of this test
starts and stops what the installed unit names.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen
from zipfile import ZipFile

import pytest
from support.deployment import DEPLOY, ROOT
from support.page_runner import PageRunner, blocks_of

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(180)]

UPGRADE = ROOT / "docs/how-to/upgrade.md"
INSTALL = ROOT / "docs/how-to/run-on-one-machine.md"

# Starts the program of the unit as its `Type` says, and stops it: `exec` fails if there is no such program,
# `notify` waits for its READY=1.
SYSTEMCTL = """#!{python}
import os, re, select, shlex, signal, socket, subprocess, sys
from pathlib import Path

root = Path("{root}")
pid, unit = root / "pid", (root / "etc/systemd/system/pysync.service").read_text()
state = root / "var/lib/pysync"
if "stop" in sys.argv:
    running = int(pid.read_text())
    ended = os.pidfd_open(running)
    os.kill(running, signal.SIGTERM)
    select.select([ended], [], [])
    pid.unlink()
elif "start" in sys.argv or "--now" in sys.argv:
    command = shlex.split(re.search("^ExecStart=(.*)", unit, re.M)[1].replace(" /", " {root}/"))
    state.mkdir(parents=True, exist_ok=True)
    (root / "notify").unlink(missing_ok=True)
    notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notified.bind(str(root / "notify"))
    environment = dict(os.environ, NOTIFY_SOCKET=str(root / "notify"))
    options = dict(cwd=state, env=environment, start_new_session=True)
    with open(root / "journal", "a") as journal:
        command[0] = "{root}" + command[0]
        started = subprocess.Popen(command, stdout=journal, stderr=journal, **options)
    pid.write_text(str(started.pid))
    while "Type=notify" in unit and notified.recv(1000) != b"READY=1":
        pass
"""


class Machine:
    """A machine below `root`, with the wheel of a version in `dist/`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        programs = root / "programs"
        programs.mkdir(parents=True)
        self._program("systemctl", SYSTEMCTL.format(python=sys.executable, root=root))
        self._program("journalctl", f"#!/bin/sh\ncat {root}/journal\n")
        self._program("make", "#!/bin/sh\n")  # `make dist` takes longer than a test may
        path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.runner = PageRunner(root / "checkout", PATH=path)
        (self.runner.folder / "deploy").symlink_to(DEPLOY)
        members: dict[str, Any] = {
            "version": 1,
            "store": "file:./data",
            "server": {"admin": {"host": "127.0.0.1", "port": int(self.runner.port("8081"))}},
            "collections": [
                {
                    "name": "n",
                    "storagePath": "u/{identity}/{id}",
                    "readRoles": ["self"],
                    "writeRoles": ["self"],
                }
            ],
        }
        (self.runner.folder / "pysync.json").write_text(json.dumps(members))

    def close(self) -> None:
        if (self._root / "pid").exists():
            subprocess.run([self._root / "programs/systemctl", "stop", "pysync"], check=True)
        self.runner.__exit__()

    def _program(self, name: str, text: str) -> None:
        path = self._root / "programs" / name
        path.write_text(text)
        path.chmod(0o755)

    def build(self, version: str) -> None:
        """Put a wheel of this checkout into `dist/` that calls itself `version`, and finds its dependencies
        in the environment of the tests."""
        shutil.rmtree(self.runner.folder / "dist", ignore_errors=True)
        (self.runner.folder / "dist").mkdir()
        about, package = f"pysync-{version}.dist-info", ROOT / "pysync"
        own_version = re.compile(r"^__version__ = .*", re.M)
        with ZipFile(self.runner.folder / f"dist/pysync-{version}-py3-none-any.whl", "w") as wheel:
            for path in package.rglob("*"):
                if path.is_file() and "__pycache__" not in path.parts and path.name != "__init__.py":
                    wheel.write(path, path.relative_to(ROOT))
            for path in package.rglob("__init__.py"):
                text = own_version.sub(f'__version__ = "{version}"', path.read_text())
                wheel.writestr(str(path.relative_to(ROOT)), text)
            wheel.writestr("dependencies.pth", sysconfig.get_path("purelib"))
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: pysync\nVersion: {version}\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/entry_points.txt", "[console_scripts]\npysync = pysync.cli.main:main\n")
            wheel.writestr(f"{about}/RECORD", "")

    def run(self, commands: str) -> None:
        self.runner.run(re.sub(r"(?<![\w.])/(?=(opt|etc|var)/)", f"{self._root}/", commands))

    @property
    def version(self) -> str:
        """The version that serves."""
        with urlopen(self.runner.here("http://127.0.0.1:8081/version")) as answer:
            return str(json.load(answer)["version"])


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.close()


def commands(page: Path, heading: str) -> list[str]:
    """The blocks below `heading` of `page` that need root and systemd."""
    section = re.split(r"^##+ ", page.read_text().partition(f"# {heading}\n")[2], flags=re.M)[0]
    found = [block.text for block in blocks_of(section) if "systemd" in block.value("not run")]
    assert found, heading
    return found


ME = """ME=$(pysync keys new --out me.json | grep -o '"userId": *"[^"]*"' | cut -d'"' -f4)"""
READY = "curl -sf --retry 20 --retry-delay 1 --retry-connrefused http://127.0.0.1:8081/health/ready"


def install(machine: Machine) -> None:
    machine.build("0.2.0")
    for block in commands(INSTALL, "Start it with the machine"):
        machine.run(block.replace("pysync-0.3.0", "pysync-0.2.0"))
    machine.run(READY)
    assert machine.version == "0.2.0"
    machine.run(ME)
    machine.run("""echo '{"text":"old"}' | pysync push u/$ME/a --key me.json""")


def test_unit_backs_up_the_installed_service(machine: Machine) -> None:
    install(machine)
    for line in re.findall(r"^ExecStart=(.+)$", (DEPLOY / "pysync-backup.service").read_text(), re.M):
        machine.run(line)
    machine.run(
        "/opt/pysync/bin/pysync backup verify --from file:/var/backups/pysync | grep '\"objects\": 1,'"
    )


def test_upgrade_serves_the_new_version_and_going_back_the_old_one(machine: Machine) -> None:
    install(machine)
    machine.build("0.3.0")
    upgrade, go_back, _ = commands(UPGRADE, "One machine")
    machine.run(upgrade)
    assert machine.version == "0.3.0"
    machine.run("pysync pull u/$ME/a --key me.json | grep old")
    machine.run("""echo '{"text":"new"}' | pysync push u/$ME/b --key me.json""")

    machine.run(go_back)
    machine.run(READY)
    assert machine.version == "0.2.0"
    machine.run("pysync pull u/$ME/a --key me.json | grep old")
    machine.run("! pysync pull u/$ME/b --key me.json | grep new")


def test_upgrade_of_an_installation_in_a_folder(machine: Machine) -> None:
    install(machine)
    machine.run("""
systemctl stop pysync
rm -r /opt/pysync /opt/pysync-0.2.0
python3 -m venv /opt/pysync && /opt/pysync/bin/pip install dist/pysync-*.whl
systemctl start pysync
""")
    machine.run(READY)
    upgrade, _, make_a_link = commands(UPGRADE, "One machine")
    machine.run(make_a_link)
    machine.run(READY)
    assert machine.version == "0.2.0"
    machine.build("0.3.0")
    machine.run(upgrade)
    assert machine.version == "0.3.0"
