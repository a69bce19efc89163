"""`pysync init` prints configurations to begin with, and commands find the one in the working folder."""

import re
from pathlib import Path

import pytest
from support.cli_runner import Shell
from support.page_runner import PageRunner

from pysync.cli.main import build_parser
from pysync.cli.server import KINDS

NAMES = ["pysync.json", "pysync.toml", "pysync.yaml", "pysync.yml"]
SERVED = {
    ".json": '{"collections": [{"name": "notes", "storagePath": "notes/{id}"}]}',
    ".toml": '[[collections]]\nname = "notes"\nstoragePath = "notes/{id}"\n',
    ".yaml": "collections: [{name: notes, storagePath: 'notes/{id}'}]\n",
    ".yml": "collections: [{name: notes, storagePath: 'notes/{id}'}]\n",
}


@pytest.mark.parametrize("kind", KINDS)
def test_printed_configuration_has_no_problem_and_no_warning(shell: Shell, kind: str) -> None:
    status, printed, errors = shell.run("init", kind)
    assert (status, errors) == (0, "")
    Path("pysync.yaml").write_text(printed)
    status, output, _ = shell.run("check", "--strict")
    assert (status, output.splitlines()[0]) == (0, "pysync.yaml: accepted")


def test_configuration_that_is_printed_first_is_the_open_one(shell: Shell) -> None:
    assert shell.run("init") == shell.run("init", "open")
    assert shell.run("init", "opne")[0] == 2


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_commands_in_the_comments_store_and_read_a_first_document(kind: str, tmp_path: Path) -> None:
    with PageRunner(tmp_path / "page") as runner:
        runner.run(f"pysync init {kind} > pysync.yaml")
        introduction = (runner.folder / "pysync.yaml").read_text().partition("\nversion: 1")[0]
        commands = re.findall(r"^#   (.+)$", introduction, re.M)
        runner.run("pysync serve")
        printed = runner.run("\n".join(commands))
    assert re.search(r'"data": ?\{\s*"(text|topic)": ?"(Hello|lunch)"', printed)


@pytest.mark.parametrize("name", NAMES)
def test_configuration_in_the_working_folder_is_found(shell: Shell, name: str) -> None:
    Path(name).write_text(SERVED[Path(name).suffix])
    status, output, _ = shell.run("check")
    assert (status, output.splitlines()[0]) == (0, f"{name}: accepted")
    for command in (["serve"], ["verify"], ["erase", "--key", "notes/a"]):
        assert build_parser().parse_args(command).config == name


def test_several_configurations_in_the_working_folder_are_an_error_unless_one_is_named(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pysync.json", "pysync.yaml"):
        Path(name).write_text(SERVED[Path(name).suffix])
    for command in (["serve"], ["check"], ["verify"], ["backup", "--to", "file:b"], ["gc"]):
        status, output, errors = shell.run(*command)
        assert (status, output) == (2, "")
        assert "pysync.json and pysync.yaml: keep one of them here, or name one" in errors
    assert shell.run("check", "pysync.yaml")[0] == 0
    assert build_parser().parse_args(["serve", "--config", "pysync.yaml"]).config == "pysync.yaml"
    monkeypatch.setenv("PYSYNC_CONFIG", "pysync.json")
    assert shell.run("check")[1].startswith("pysync.json: accepted")


def test_check_without_a_configuration_names_the_command_that_prints_one(shell: Shell) -> None:
    status, output, errors = shell.run("check")
    assert (status, output) == (2, "")
    assert "there is no ./pysync.json, .yaml or .toml to check: name a configuration" in errors
    assert "`pysync init > pysync.yaml`" in errors
