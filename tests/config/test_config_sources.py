"""Sources of a configuration: variables that reach each of its members, and paths relative to its file."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import Shell, running
from support.configurations import ROOT, collection, config, faults

from pysync.config import Config, ConfigError, load, parse
from pysync.config.check import check
from pysync.config.loader import ENVIRONMENT

REMOVED = {
    "PYSYNC_MAX_COLLECTIONS_PER_BATCH": ("maxCollectionsPerBatch", "7"),
    "PYSYNC_MAX_BATCH_APPEND_ELEMENTS": ("maxBatchAppendElements", "7"),
    "PYSYNC_SERVER_MOUNT_PATH": ("server.mountPath", "/v1"),
    "PYSYNC_SERVER_EXAMPLES": ("server.examples", "pages"),
    "PYSYNC_SERVER_DRAIN_TIMEOUT_MS": ("server.drainTimeoutMs", "7"),
    "PYSYNC_STORE_ENDPOINT": ("store.endpoint", "https://s3.example"),
    "PYSYNC_STORE_REGION": ("store.region", "eu-central-1"),
    "PYSYNC_STORE_FORCE_PATH_STYLE": ("store.forcePathStyle", "true"),
    "PYSYNC_STORE_ACCESS_KEY_ID": ("store.accessKeyId", "key"),
    "PYSYNC_STORE_SECRET_ACCESS_KEY": ("store.secretAccessKey", "secret"),
    "PYSYNC_STORE_MAX_CONNECTIONS": ("store.maxConnections", "7"),
    "PYSYNC_STORE_TIMEOUT_MS": ("store.timeoutMs", "7"),
}
"""The variables of 0.1.0 that no longer set a member, that member, and a value."""


def test_each_variable_overrides_its_member() -> None:
    environ = {
        "PYSYNC_SERVER_HOST": "::1",
        "PYSYNC_SERVER_PORT": "81",
        "PYSYNC_SERVER_ADMIN_HOST": "127.0.0.2",
        "PYSYNC_SERVER_ADMIN_PORT": "82",
        "PYSYNC_SERVER_WORKERS": "3",
        "PYSYNC_SERVER_TRUSTED_PROXY_HOPS": "1",
        "PYSYNC_SERVER_LOG_LEVEL": "debug",
        "PYSYNC_SERVER_LOG_REFUSALS": "true",
        "PYSYNC_STORE": "file:x",
        "PYSYNC_COORDINATOR": "file:y",
        "PYSYNC_ADMIN_TOKEN": "token-of-the-tests",
    }
    assert environ.keys() == ENVIRONMENT.keys()
    read = parse({"server": {"port": 1, "logLevel": "error"}, "store": "memory:"}, environ)
    server = read.server
    assert (server.host, server.port, server.workers, server.trusted_proxy_hops) == ("::1", 81, 3, 1)
    assert (server.log_level, server.log_refusals) == ("debug", True)
    assert server.admin is not None
    assert (server.admin.host, server.admin.port) == ("127.0.0.2", 82)
    assert (read.store.url, read.coordinator, read.auth.admin_token) == (
        "file:x",
        "file:y",
        "token-of-the-tests",
    )


@pytest.mark.parametrize("variable", REMOVED)
def test_a_removed_variable_is_an_error_that_names_the_member(variable: str) -> None:
    path, text = REMOVED[variable]
    ((at, message),) = faults({}, {variable: text})
    assert at == path
    assert message.startswith(f"{variable} no longer sets this member")


@pytest.mark.parametrize("variable", REMOVED)
def test_a_removed_variable_may_be_named_in_the_file(variable: str) -> None:
    path, text = REMOVED[variable]
    *section, name = path.split(".")
    members = {name: "${" + variable + "}"}
    if section == ["store"]:
        members |= {"url": "s3://bucket", "accessKeyId": "key", "secretAccessKey": "secret"} | members
    parse({section[0]: members} if section else members, {variable: text})
    parse({}, {variable: ""})


def test_variables_of_clients_and_of_the_file_are_no_mistake(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = config(collection(readRoles=["public"]), server={"logLevel": "${PYSYNC_LEVEL}"})
    (tmp_path / "c.json").write_text(json.dumps(members))
    for name, value in (("PYSYNC_KEY", "me.json"), ("PYSYNC_URL", "http://a"), ("PYSYNC_LEVEL", "info")):
        monkeypatch.setenv(name, value)
    code, printed, _ = shell.run("check", "--strict", "c.json")
    assert (code, printed.splitlines()[0]) == (0, "c.json: accepted")


def test_variable_that_nothing_reads_is_a_warning(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.json").write_text(json.dumps(config(collection(readRoles=["public"]))))
    monkeypatch.setenv("PYSYNC_SERVER_PROT", "1")
    code, printed, _ = shell.run("check", "c.json")
    assert code == 0
    warning = "nothing reads PYSYNC_SERVER_PROT; did you mean PYSYNC_SERVER_PORT?"
    assert re.search(f"^  environment +{re.escape(warning)}$", printed, re.M)
    assert shell.run("check", "--strict", "c.json")[0] == 1


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--config", "c.json"], b"1 warning about this configuration; see them with: pysync check c.json\n"),
        ([], b"environment: nothing reads PYSYNC_ZONE\n"),
    ],
)
async def test_server_reports_a_variable_that_nothing_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], line: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.json").write_text(json.dumps(config(collection(readRoles=["public"]))))
    monkeypatch.setenv("PYSYNC_ZONE", "x")
    async with running("serve", "--store", "memory:", "--port", "0", *arguments) as process:
        assert process.stdout is not None
        printed = [await process.stdout.readline()]
        while not printed[-1].startswith((b"environment", b"1 warning")):
            assert printed[-1], printed
            printed.append(await process.stdout.readline())
    assert printed[-1] == line


def test_check_rejects_a_removed_variable(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c.json").write_text(json.dumps(config(collection(readRoles=["public"]))))
    monkeypatch.setenv("PYSYNC_STORE_REGION", "eu-central-1")
    code, printed, _ = shell.run("check", "c.json")
    assert code == 1
    assert "store.region  PYSYNC_STORE_REGION no longer sets this member" in printed


def test_a_folder_is_relative_to_the_file_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "etc").mkdir()
    path = tmp_path / "etc/c.json"
    path.write_text('{"server": {"examples": "${WHERE}"}, "store": "file:data", "coordinator": "file:co"}')
    read = load(path, {"WHERE": "pages"})
    assert read.server.examples == str(tmp_path / "etc/pages")
    assert (read.store.url, read.coordinator) == ("file:data", "file:co")
    assert load(path, {"WHERE": "/srv/pages"}).server.examples == "/srv/pages"
    monkeypatch.chdir(tmp_path)
    assert load("etc/c.json", {"WHERE": "pages"}).server.examples == "etc/pages"
    assert parse({"server": {"examples": "pages"}}).server.examples == "pages"


def test_check_and_serve_find_the_same_folder(tmp_path: Path) -> None:
    seen: list[Config] = []
    check(str(ROOT / "deploy/example.json"), {}, seen.append)
    assert seen[0].server.examples == str(ROOT / "deploy/examples")


@pytest.mark.process
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"server": {"workers": "x"}}, ["c.json: server.workers: must be an integer, not a string"]),
        (
            {"server": {"workers": "x"}, "stor": 1},
            [
                "c.json: 2 problems",
                "  server.workers: must be an integer, not a string",
                "  stor: unknown member; did you mean store?",
            ],
        ),
        ({"plugins": ["nowhere:plugin"]}, ["c.json: plugins[0]: there is no module nowhere"]),
    ],
)
def test_serve_names_the_file_that_is_wrong(tmp_path: Path, value: Any, expected: list[str]) -> None:
    (tmp_path / "c.json").write_text(json.dumps(value))
    ran = subprocess.run(
        [sys.executable, "-m", "pysync", "serve", "--config", "c.json", "--store", "memory:", "--port", "0"],
        capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False,
        env={name: item for name, item in os.environ.items() if not name.startswith("PYSYNC_")},
    )  # fmt: skip
    lines = ran.stderr.splitlines()
    assert ran.returncode == 1
    assert lines[0].startswith("pysync: " + expected[0])
    assert lines[1:] == expected[1:]


def test_a_file_that_cannot_be_read_is_named_once(shell: Shell) -> None:
    with pytest.raises(ConfigError) as rejected:
        load("none.json", {})
    assert str(rejected.value) == "none.json: No such file or directory"
