"""The command line helps: examples, suggestions, defaults of the environment, and what to do next."""

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli_runner import Shell
from support.cli_service import ADMIN_TOKEN, SERVICE
from support.clients import Start
from support.collections import limit_of
from support.fake_server import silent_until

from pysync.cli.io import show_progress, warn_retry
from pysync.cli.main import build_parser
from pysync.cli.parser import Parser
from pysync.errors import RateLimited, Unavailable


def leaves(parser: Parser) -> Iterator[Parser]:
    """The parsers of all commands that do something."""
    parser.load()
    actions = [one for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    if not actions:
        yield parser
    for action in actions:
        for command in action.choices.values():
            yield from leaves(command)


@pytest.mark.parametrize("command", [*leaves(build_parser())], ids=lambda command: command.prog)
def test_every_command_shows_an_example_that_is_understood(command: Parser) -> None:
    assert command.epilog is not None
    heading, *lines = command.epilog.splitlines()
    assert (heading, bool(lines)) == ("example:", True)
    for line in lines:
        words = line.strip().rpartition("| ")[2].removesuffix(f" > {line.rpartition(' > ')[2]}")
        assert f"{words} ".startswith(f"{command.prog} ")


@pytest.mark.parametrize(
    ("arguments", "suggested"),
    [
        (["srve"], "serve"),
        (["keyring", "ad"], "add"),
        (["pull", "a", "--sever", "http://a"], "--server"),
        (["cap", "device", "--key", "k", "--op", "raed"], "read"),
    ],
)
def test_a_misspelled_word_is_suggested(shell: Shell, arguments: list[str], suggested: str) -> None:
    status, output, errors = shell.run(*arguments)
    assert (status, output) == (2, "")
    assert errors.endswith(f"; did you mean {suggested}?\n")


def test_help_lists_the_commands_of_clients_and_of_operators(shell: Shell) -> None:
    status, output, _ = shell.run("help")
    assert (status, output) == (0, shell.run("--help")[1])
    clients, operators = output.partition("commands for clients:")[2].split("commands for operators:")
    listed = [re.findall(r"^  (\w+)", text.partition("\n\n")[0], re.M) for text in (clients, operators)]
    assert {"pull", "push", "keys", "help"} <= set(listed[0])
    assert {"serve", "check", "backup"} <= set(listed[1])
    known = [command.prog.split()[1] for command in leaves(build_parser())]
    assert sorted(listed[0] + listed[1]) == sorted(set(known))


def test_help_shows_that_of_a_command(shell: Shell) -> None:
    assert shell.run("help", "backup", "restore") == shell.run("backup", "restore", "--help")
    status, _, errors = shell.run("help", "psuh")
    assert (status, errors.endswith("; did you mean push?\n")) == (2, True)


@pytest.mark.parametrize("value", ["0", "-1", "x", "nan", "inf"])
def test_timeout_is_a_number_of_seconds(shell: Shell, value: str) -> None:
    status, _, errors = shell.run("pull", "notes/a", f"--timeout={value}")
    assert status == 2
    assert f"'{value}': give a number of seconds, more than 0" in errors


async def test_request_without_an_answer_ends_at_the_timeout(shell: Shell) -> None:
    never = asyncio.Event()
    async with silent_until(never) as url:
        status, _, errors = await shell.run_async("pull", "a/b", "--server", url, "--timeout", "0.05")
        never.set()
    assert (status, errors) == (5, f"pysync: {url.rstrip('/')}: no answer in time\n")


def test_nothing_is_suggested_for_what_is_near_nothing(shell: Shell) -> None:
    status, _, errors = shell.run("xyzzy")
    assert (status, "did you mean" in errors) == (2, False)


async def test_a_missing_document_has_an_exit_status_of_its_own(
    shell: Shell, start: Start, tmp_path: Path
) -> None:
    url = await start(SERVICE)
    arguments = ("public/none", "--server", url)
    assert (await shell.run_async("pull", *arguments))[0] == 0
    missing = (6, "", "pysync: no document is stored at public/none\n")
    assert await shell.run_async("pull", *arguments, "--fail") == missing
    missing = (6, "", "pysync: no file is stored at public/none\n")
    assert await shell.run_async("pull", *arguments, "--fail", "--out", "none.bin") == missing
    assert (await shell.run_async("pull", *arguments, "--out", "none.bin"))[0] == 1
    assert not (tmp_path / "none.bin").exists()


async def test_the_key_comes_from_the_environment_unless_an_option_says_otherwise(
    shell: Shell, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = await start(SERVICE)
    shell.json("keys", "new", "--out", "me.json")
    mine = f"users/{shell.json('keys', 'show', 'me.json')['userId']}/notes/a"
    monkeypatch.setenv("PYSYNC_KEY", "me.json")
    monkeypatch.setenv("PYSYNC_URL", url)
    assert (await shell.run_async("push", mine, stdin='{"n": 1}'))[0] == 0
    assert json.loads((await shell.run_async("pull", mine, "--data"))[1]) == {"n": 1}
    assert shell.run("cap", "device", "--collection", "notes")[0] == 0
    of_admins = ("push", "board/a", "--admin-token", ADMIN_TOKEN)
    assert (await shell.run_async(*of_admins, stdin='{"n": 1}'))[0] == 0


def test_the_configuration_comes_from_the_environment_or_the_folder(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pysync.json").write_text(json.dumps(SERVICE))
    status, output, _ = shell.run("check")
    assert (status, "/pull/public/{id}" in output) == (0, True)
    assert build_parser().parse_args(["serve"]).config == "pysync.json"
    (tmp_path / "other.json").write_text(json.dumps({"version": 7}))
    monkeypatch.setenv("PYSYNC_CONFIG", "other.json")
    assert shell.run("check")[0] == 1
    assert build_parser().parse_args(["serve", "--config", "x"]).config == "x"


async def test_a_rejected_request_says_when_to_try_again(shell: Shell, start: Start) -> None:
    limited = {**SERVICE["collections"][0], "rateLimit": {"push": limit_of(1)}}
    url = await start({"collections": [limited]})
    pushed = ("push", "public/a", "--server", url)
    assert (await shell.run_async(*pushed, stdin='{"n": 1}'))[0] == 0
    status, _, errors = await shell.run_async(*pushed, "--force", stdin='{"n": 1}')
    assert status == 5
    assert errors.startswith("pysync: Rate limit exceeded: try again in ")


def test_a_person_at_a_terminal_sees_progress_and_waits_and_a_script_does_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def report() -> str:
        warn_retry(Unavailable("busy"), 1.25)
        warn_retry(RateLimited(), 2.0)
        show_progress(1_000_000, 2_000_000)
        show_progress(2_000_000, 2_000_000)
        return capsys.readouterr().err

    assert report() == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert report() == (
        "pysync: busy; trying again in 1.2 s\npysync: Rate limit exceeded; trying again in 2.0 s\n"
        "\r1.0 of 2.0 MB\r2.0 of 2.0 MB\n"
    )
