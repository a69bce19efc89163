"""What docs/reference/client.md shows works."""

import asyncio
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from support.cli_runner import Shell
from support.clients import Start

from pysync.auth.identity_keys import IdentityKeys
from pysync.client import sealed

PAGE = (Path(__file__).parents[2] / "docs/reference/client.md").read_text()


def shown(language: str) -> list[str]:
    """The blocks in this language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


SERVICE, FILES, OFFLINE = *shown("json"), *shown("python")


async def run(program: str, url: str, folder: Path) -> list[str]:
    """Return the output of the program."""
    script = folder / "example.py"
    script.write_text(program)
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), url,
        cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")
    return output.decode().splitlines()


@pytest.mark.process
async def test_the_program_does_what_the_page_says(start: Start, tmp_path: Path) -> None:
    printed = await run(FILES, await start(json.loads(SERVICE)), tmp_path)
    assert printed == [str(b"a sealed file"), str({"title": "Picnic"})]
    assert (tmp_path / "copy.png").read_text() == FILES


@pytest.mark.process
async def test_the_program_that_edits_without_a_network_prints_what_the_page_says(
    start: Start, tmp_path: Path
) -> None:
    (listed,) = re.findall(r"^prints\n\n((?:    .*\n)+)", PAGE, re.M)
    printed = await run(OFFLINE, await start(json.loads(SERVICE)), tmp_path)
    assert printed == [line.strip() for line in listed.splitlines()]


async def test_the_commands_do_what_the_page_says(
    start: Start, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSYNC_URL", await start(json.loads(SERVICE)))
    for name in ("me", "bob"):
        IdentityKeys.generate().save(tmp_path / f"{name}.json")
        (tmp_path / f"{name}.pub").write_text(shell.run("keys", "show", f"{name}.json")[1])
    for name in ("cat", "secret"):
        (tmp_path / f"{name}.png").write_text(name)
    lines = re.findall(r"^    pysync (.*)", PAGE, re.M)
    assert len(lines) == 6
    for line in lines:
        status, _, errors = await shell.run_async(*shlex.split(line))
        assert (status, errors) == (0, "")
    assert (tmp_path / "copy.png").read_text() == "cat"
    assert (tmp_path / "secret2.png").read_text() == "secret"


def test_every_failure_of_sealed_data_is_in_the_table() -> None:
    section = PAGE.split("### Errors of sealed data\n")[1].split("\n## ")[0]
    listed = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", section, re.M))))
    assert listed == {kind.__name__ for kind in sealed.SealedError.__subclasses__()}
