"""Warnings of `check` about roles that no caller can have, and about variables that set nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.configurations import collection, config

from pysync.config import parse
from pysync.config.check import lint

TRUSTED = {"trustedIssuers": ["ab" * 32]}
TOKEN = {"adminToken": "token-of-the-tests"}
ROOM = {"storagePath": "spaces/{spaceId}/doc"}


def warnings(*collections: dict[str, Any], **members: Any) -> list[tuple[str, str]]:
    found = lint(parse(config(*collections, **members)))
    return [(problem.path, problem.message) for problem in found]


def about(role: str, members: dict[str, Any], auth: dict[str, Any]) -> list[str]:
    """Return the warnings about a role that may read."""
    return [message for _, message in warnings(collection(readRoles=[role], **members), auth=auth)]


@pytest.mark.parametrize(
    ("role", "members", "auth", "message"),
    [
        ("admin", {}, {}, "no caller can have admin: auth.adminToken is not set"),
        ("space:member", ROOM, {}, "no caller can have space:member: auth.spaces is not set"),
        ("space:owner", ROOM, {}, "no caller can have space:owner: auth.spaces is not set"),
        (
            "space:member",
            {},
            {"spaces": {}},
            "space:member is never granted: storagePath lacks {spaceId} of auth.spaces.accessPath",
        ),
        ("cap:raed:notes", {}, {}, "no caller can have 'cap:raed:notes'; did you mean cap:read:notes?"),
        (
            "space:members",
            ROOM,
            {"spaces": {}},
            "no caller can have 'space:members'; did you mean space:member?",
        ),
        (
            "cap:read:notes",
            {},
            {"trustedIssuers": []},
            "no caller can have cap:read:notes: trustedIssuers is empty, so no certificate yields it",
        ),
    ],
)
def test_role_that_nobody_holds_is_reported_once(
    role: str, members: dict[str, Any], auth: dict[str, Any], message: str
) -> None:
    assert about(role, members, auth) == [message]


@pytest.mark.parametrize(
    ("role", "members", "auth"),
    [
        ("admin", {}, TOKEN),
        ("admin", {}, {"identityRoles": {"u": ["admin"]}}),
        ("space:member", ROOM, {"spaces": {}}),
        ("space:member", ROOM, {"identityRoles": {"u": ["space:member"]}}),
        ("cap:read:notes", {}, TRUSTED),
    ],
)
def test_a_role_that_somebody_holds_is_not_wondered_at(
    role: str, members: dict[str, Any], auth: dict[str, Any]
) -> None:
    assert about(role, members, auth) == []


def test_the_environment_may_give_the_token() -> None:
    read = parse(config(collection(readRoles=["admin"])), {"PYSYNC_ADMIN_TOKEN": "token-of-the-tests"})
    assert lint(read) == []


def test_roles_of_single_members_are_checked_too() -> None:
    secret = {"salary": {"readRoles": ["admin"], "writeRoles": ["boss"]}}
    assert warnings(collection(readRoles=["public"], fieldPermissions=secret)) == [
        (
            "collections[0].fieldPermissions.salary.readRoles[0]",
            "no caller can have admin: auth.adminToken is not set",
        ),
        ("collections[0].fieldPermissions.salary.writeRoles[0]", "no caller can have 'boss'"),
    ]


@pytest.mark.process
@pytest.mark.parametrize("workers", ["1", "2"])
def test_serve_says_how_many_warnings_there_are_and_how_to_see_them(tmp_path: Path, workers: str) -> None:
    (tmp_path / "c.json").write_text(json.dumps(config(collection(readRoles=["admin", "publik"]))))
    command = [sys.executable, "-m", "pysync", "serve", "--config", "c.json", "--port", "0"]
    served = subprocess.Popen(
        [*command, "--store", "file:data", "--workers", workers], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYSYNC_")},
    )  # fmt: skip
    assert served.stdout is not None
    reports: list[str] = []
    while not reports or "warning" not in reports[-1]:
        reports.append(served.stdout.readline())
        assert reports[-1], "it ended"
    served.send_signal(signal.SIGTERM)
    served.communicate(timeout=30)
    assert reports[-1] == "2 warnings about this configuration; see them with: pysync check c.json\n"
