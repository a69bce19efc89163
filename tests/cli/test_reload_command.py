"""`pysync reload`: where it finds the server and the token, and what it says if it finds none."""

import json
from pathlib import Path
from typing import Any

import pytest
from components import free_port
from support.cli_runner import Shell

TOKEN = "0123456789abcdef"


def written(**members: Any) -> None:
    Path("pysync.json").write_text(json.dumps(members))


def test_without_a_file_it_needs_the_address_and_the_token(shell: Shell) -> None:
    status, _, errors = shell.run("reload")
    assert status == 1
    assert "--config" in errors
    status, _, errors = shell.run("reload", "--url", "http://127.0.0.1:1")
    assert status == 1


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ({"auth": {"adminToken": TOKEN}}, "server.admin names no port"),
        ({"server": {"admin": {}}}, "auth.adminToken is not set: send the server SIGHUP"),
        (
            {"server": {"admin": {}}, "auth": {"adminToken": "${SECRET_OF_THE_SERVER}"}},
            "--url and --admin-token reload without this file",
        ),
    ],
)
def test_it_says_what_the_file_lacks(shell: Shell, members: dict[str, Any], says: str) -> None:
    written(**members)
    status, output, errors = shell.run("reload")
    assert (status, output) == (1, "")
    assert says in errors


def test_a_server_that_is_not_there_is_named(shell: Shell) -> None:
    port = free_port()
    written(server={"admin": {"port": port}}, auth={"adminToken": [TOKEN, TOKEN[::-1]]})
    status, _, errors = shell.run("reload")
    assert status == 5
    assert f"http://127.0.0.1:{port}/admin/reload" in errors
