"""What docs/client.md shows works."""

import asyncio
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from conftest import Start
from shell import Shell

from pysync.client import sealed
from pysync.keys import Keys

PAGE = (Path(__file__).parents[1] / "docs/client.md").read_text()


def shown(language: str) -> str:
    """The block in this language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)
    return str(found)


async def test_the_program_does_what_the_page_says(start: Start, tmp_path: Path) -> None:
    url = await start(json.loads(shown("json")))
    script = tmp_path / "example.py"
    script.write_text(shown("python"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), url,
        cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")
    assert output.decode().splitlines() == [str(b"a sealed file"), str({"title": "Picnic"})]
    assert (tmp_path / "copy.png").read_bytes() == script.read_bytes()


async def test_the_commands_do_what_the_page_says(
    start: Start, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSYNC_URL", await start(json.loads(shown("json"))))
    for name in ("me", "bob"):
        Keys.generate().save(tmp_path / f"{name}.json")
        (tmp_path / f"{name}.pub").write_text(shell.run("keys", "show", f"{name}.json")[1])
    for name in ("cat", "secret"):
        (tmp_path / f"{name}.png").write_text(name)
    lines = re.findall(r"^    pysync (.*)", PAGE, re.M)
    assert len(lines) == 6
    for line in lines:
        status, _, errors = await shell.ask(*shlex.split(line))
        assert (status, errors) == (0, "")
    assert (tmp_path / "copy.png").read_text() == "cat"
    assert (tmp_path / "secret2.png").read_text() == "secret"


def test_every_failure_of_sealed_data_is_in_the_table() -> None:
    told = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", PAGE, re.M))))
    assert told == {kind.__name__ for kind in sealed.SealedError.__subclasses__()}
