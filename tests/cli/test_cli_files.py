"""Files and keyrings from the command line, against a service in this process."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.cli_runner import Shell
from support.clients import Start
from support.collections import collection

from pysync.auth.identity_keys import IdentityKeys

SERVICE: dict[str, Any] = {
    "collections": [
        collection("docs", listable=True),
        collection("photos", allowedMimeTypes=["*/*"]),
        collection("keyrings", "photos/_keyring"),
    ]
}
PNG = b"\x89PNG\r\n\x00\xff" * 9000


@pytest_asyncio.fixture
async def server(start: Start, shell: Shell, monkeypatch: pytest.MonkeyPatch) -> str:
    url = await start(SERVICE)
    monkeypatch.setenv("PYSYNC_URL", url)
    return url


@pytest.fixture
def people(tmp_path: Path) -> None:
    """Key files of two people, and what one of them gives away."""
    for number, name in enumerate(("me", "bob")):
        keys = IdentityKeys.from_private(bytes([number + 1]) * 32, bytes([number + 3]) * 32)
        keys.save(tmp_path / f"{name}.json")
        public = {"edPub": keys.ed_pub, "kemPub": keys.kem_pub}
        (tmp_path / f"{name}.pub").write_text(json.dumps(public))


async def printed(shell: Shell, line: str, **options: Any) -> Any:
    """What the command line prints, which must go well."""
    status, output, errors = await shell.run_async(*line.split(), **options)
    assert (status, errors) == (0, "")
    return json.loads(output)


async def error_of(shell: Shell, line: str) -> str:
    """What the problem is that the command line tells of."""
    status, output, errors = await shell.run_async(*line.split())
    assert (status, output) == (1, "")
    return errors


@pytest.mark.usefixtures("server")
async def test_a_file_is_pushed_and_pulled_as_it_is(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(PNG)
    pushed = await printed(shell, "push photos/cat cat.png --type image/png")
    pulled = await printed(shell, "pull photos/cat --out copy.png")
    assert pulled == {"hash": pushed["hash"], "type": "image/png", "size": len(PNG)}
    assert (tmp_path / "copy.png").read_bytes() == PNG


@pytest.mark.usefixtures("server")
async def test_json_is_pushed_as_a_file_where_it_is_one(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1, 2]")
    await printed(shell, "push photos/a a.json --type application/json --admin-token x")
    assert (await printed(shell, "pull photos/a --out b.json"))["type"] == "application/json"
    assert (tmp_path / "b.json").read_text() == "[1, 2]"


@pytest.mark.process
async def test_a_file_goes_through_pipes(server: str, shell: Shell, tmp_path: Path) -> None:
    await piped("push", "photos/cat", "--type", "image/png", "--server", server, sent=PNG)
    assert await piped("pull", "photos/cat", "--out", "-", "--server", server) == PNG
    await piped("push", "photos/dog", "/dev/stdin", "--type", "image/png", "--server", server, sent=PNG)
    await printed(shell, "pull photos/dog --out dog.png")
    assert (tmp_path / "dog.png").read_bytes() == PNG


async def piped(*arguments: str, sent: bytes = b"") -> bytes:
    """What a process of its own prints, which reads `sent`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pysync", *arguments, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    output, errors = await process.communicate(sent)
    assert (process.returncode, errors) == (0, b"")
    return output


@pytest.mark.usefixtures("server")
async def test_existing_file_is_not_overwritten_and_a_missing_one_is_reported(
    shell: Shell, tmp_path: Path
) -> None:
    assert await error_of(shell, "pull photos/none --out f") == "pysync: no file is stored at photos/none\n"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "f").write_bytes(b"mine")
    (tmp_path / "link").symlink_to("nothing")
    for name in ("f", "link"):
        message = await error_of(shell, f"pull photos/none --out {name}")
        assert message == f"pysync: {name} exists already\n"
    await printed(shell, "push docs/a", stdin="{}")
    assert "a document, not a file" in await error_of(shell, "pull docs/a --out g")
    assert "none.png" in await error_of(shell, "push photos/cat none.png --type image/png")
    assert "directory" in await error_of(shell, "push photos/cat . --type image/png")


@pytest.mark.usefixtures("server")
async def test_file_pulled_as_a_document_is_reported_with_the_options_for_files(
    shell: Shell, tmp_path: Path
) -> None:
    (tmp_path / "cat.png").write_bytes(PNG)
    assert "--type TYPE stores a file" in await error_of(shell, "push photos/cat cat.png")
    await printed(shell, "push photos/cat cat.png --type image/png")
    message = await error_of(shell, "pull photos/cat")
    assert message == "pysync: a file of image/png is there: `pull_blob` or `pull --out` gets it\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("push photos/a f --type image/png --force", "for documents"),
        ("push photos/a f --type image/png --base x", "for documents"),
        ("push photos/a f --type image/png --seal photos", "--seal"),
        ("push photos/a f --seal photos", "needs --key"),
        ("pull photos/a --out f --data", "--data"),
        ("pull photos/a --open photos", "--out"),
        ("keyring show photos", "needs --key"),
    ],
)
@pytest.mark.usefixtures("server")
async def test_options_that_do_not_fit_are_reported(shell: Shell, line: str, message: str) -> None:
    assert message in await error_of(shell, line)


@pytest.mark.usefixtures("server", "people")
async def test_a_sealed_file_is_shared_from_the_shell(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(PNG)
    made = await printed(shell, "keyring new photos --key me.json")
    assert (made["keyring"], made["verdict"], made["epoch"]) == ("photos/_keyring", "ok", 1)
    await printed(shell, "push photos/a f --seal photos --key me.json")
    as_bob = "--open photos --key bob.json --trust me.pub"
    assert "not in epoch 1" in await error_of(shell, f"pull photos/a --out g {as_bob}")
    added = await printed(shell, "keyring add photos bob.pub --key me.json")
    assert len(added["recipients"]) == 2
    await printed(shell, f"pull photos/a --out g {as_bob}")
    assert (tmp_path / "g").read_bytes() == PNG
    await printed(shell, "push photos/b --seal photos --key me.json", stdin="hello")
    shown = await shell.run_async(*["pull", "photos/b", "--out", "-", "--open", "photos", "--key", "me.json"])
    assert shown == (0, "hello", "")
    assert "not trusted" in await error_of(shell, "pull photos/a --out h --open photos --key bob.json")
    removed = await printed(shell, "keyring remove photos bob.pub --key me.json")
    assert (removed["epoch"], len(removed["recipients"])) == (2, 1)
    assert "not in epoch 2" in await error_of(shell, "keyring remove photos bob.pub --key me.json")
    as_me = "--open photos --key me.json --min-epoch"
    await printed(shell, f"pull photos/a --out h {as_me} 2")
    assert "at epoch 2" in await error_of(shell, f"pull photos/a --out i {as_me} 3")
    status, output, _ = await shell.run_async(
        *["keyring", "show", "photos", "--key", "bob.json", "--trust", "me.pub"]
    )
    assert status == 1
    assert "not in epoch 2" in json.loads(output)["verdict"]


@pytest.mark.usefixtures("server", "people")
async def test_a_keyring_is_made_once_for_everybody_named(shell: Shell) -> None:
    made = await printed(shell, "keyring new photos bob.pub --key me.json")
    assert len(made["recipients"]) == 2
    again = "something is at photos/_keyring already; `pysync keyring add` lets others in"
    assert again in await error_of(shell, "keyring new photos --key me.json")
    assert "already present" in await error_of(shell, "keyring add photos bob.pub --key me.json")
    assert "no keyring at docs/_keyring" in await error_of(shell, "keyring show docs --key me.json")
