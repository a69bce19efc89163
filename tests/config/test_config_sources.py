"""Sources of a configuration: variables that reach each of its members, and paths relative to its file."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from support.cli_runner import Shell
from support.configurations import ROOT, collection, config, faults

from pysync.config import Config, ConfigError, RateLimit, Restriction, load, parse, schema
from pysync.config.check import check
from pysync.config.collection import wire_name
from pysync.config.loader import env_overrides

VALUES = {
    "version": "1",
    "auth.adminToken": "token-of-the-tests",
    "auth.trustedIssuers": json.dumps(["ab" * 32]),
    "auth.identityRoles": '{"u": ["editor"]}',
    "auth.spaces.accessPath": "s/{sid}/_access",
    "auth.spaces.param": "sid",
    "store.url": "file:x",
    "coordinator": "file:y",
    "server.mountPath": "/v9",
    "server.publicHosts": '["sync.example"]',
    "server.cors.origins": '["https://app.example", "*"]',
    "configEndpoint.auth": "role-filtered",
    "batchKeyDenySuffixes": '["_x"]',
    "collections": json.dumps([collection(ttlMs=5)]),
    "namespaces": json.dumps({"acme": config(collection())}),
    "restrictions": '{"mode": "deny", "identities": ["x"]}',
    "plugins": '["audit:plugin"]',
}
"""Members that are no number and no boolean, as a variable spells them."""


def environ() -> dict[str, str]:
    """A value for every variable."""
    return {name: VALUES.get(path) or _spelled(path) for name, path in env_overrides().items()}


def _spelled(path: str) -> str:
    """A value that the types of a member admit."""
    kinds = leaves(Config)[path]
    words = [word for kind in kinds for word in (kind, *get_args(kind)) if isinstance(word, str)]
    if words:
        return words[0]
    if any(map(dataclasses.is_dataclass, kinds)):
        return "false"
    return "true" if bool in kinds else "[]" if get_origin(kinds[0]) is tuple else "7"


def leaves(kind: type, path: str = "") -> dict[str, tuple[Any, ...]]:
    """Every member that is no object of fixed members, or may be `false` in its place, and its types."""
    found: dict[str, tuple[Any, ...]] = {}
    for field in dataclasses.fields(kind):
        at = f"{path}.{wire_name(field.name)}" if path else wire_name(field.name)
        is_many = get_origin(field.type) in (tuple, Mapping)
        types = (field.type,) if is_many else (field.type, *get_args(field.type))
        inner = next((one for one in types if isinstance(one, type) and dataclasses.is_dataclass(one)), None)
        if inner is None or any(get_origin(one) is Literal for one in types):
            found[at] = types
        if inner is not None:
            found |= leaves(inner, at)
    return found


def test_a_variable_reaches_every_scalar_and_every_list() -> None:
    assert leaves(Config).keys() == set(env_overrides().values())
    assert len(set(env_overrides().values())) == len(env_overrides())
    read = parse({}, environ())
    assert read.server.cors.origins == ("https://app.example", "*")
    assert (read.server.public_hosts, read.server.port) == (("sync.example",), 7)
    assert read.auth.trusted_issuers == ("ab" * 32,)
    assert read.auth.identity_roles == {"u": ("editor",)}
    assert read.auth.spaces == schema.SpacesConfig(
        access_path="s/{sid}/_access", param="sid", trust_on_first_use=True
    )
    assert read.config_endpoint == schema.ConfigEndpoint(auth="role-filtered")
    assert read.collections == parse(config(collection(ttlMs=5))).collections
    assert list(read.namespaces) == ["acme"]
    assert read.restrictions == (Restriction(mode="deny", identities=("x",)),)
    assert (read.plugins, read.batch_key_deny_suffixes) == (("audit:plugin",), ("_x",))
    assert isinstance(read.rate_limit, RateLimit)
    assert read.rate_limit.window_ms == 7
    assert read.changes.max_count == 7


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("PYSYNC_SERVER_CORS_ORIGINS", "server.cors.origins"),
        ("PYSYNC_AUTH_SPACES_ACCESS_PATH", "auth.spaces.accessPath"),
        ("PYSYNC_RATE_LIMIT_PULL_IP_MAX_REQUESTS", "rateLimit.pull.ip.maxRequests"),
        ("PYSYNC_PLUGINS", "plugins"),
        ("PYSYNC_STORE", "store.url"),
        ("PYSYNC_ADMIN_TOKEN", "auth.adminToken"),
    ],
)
def test_the_name_of_a_variable_follows_from_the_path_of_its_member(name: str, path: str) -> None:
    assert env_overrides()[name] == path


def test_a_list_that_is_no_json_is_refused_with_the_name_of_its_variable() -> None:
    for text in ("a.example", '"a.example"', "{}"):
        ((path, message),) = faults({}, {"PYSYNC_SERVER_PUBLIC_HOSTS": text})
        assert path == "server.publicHosts"
        assert message.startswith("must be a list")
    assert faults({}, {"PYSYNC_SERVER_PUBLIC_HOSTS": "a.example"}) == [
        (
            "server.publicHosts",
            "must be a list in JSON, not a string (environment variable PYSYNC_SERVER_PUBLIC_HOSTS)",
        )
    ]


def test_what_a_list_of_the_environment_holds_is_not_substituted() -> None:
    read = parse({}, {"PYSYNC_PLUGINS": '["a:b", "c:d"]', "PYSYNC_SERVER_PUBLIC_HOSTS": '["$x"]', "x": "y"})
    assert (read.plugins, read.server.public_hosts) == (("a:b", "c:d"), ("$x",))
    schema = json.dumps([collection(objectSchema={"const": "${X}"})])
    assert parse({}, {"PYSYNC_COLLECTIONS": schema, "X": "y"}).collections[0].object_schema == {
        "const": "${X}"
    }
    told = faults({}, {"PYSYNC_SERVER_CORS_ORIGINS": '["${X}"]', "X": "https://a.example"})
    assert told[0][0] == "server.cors.origins[0]"


def test_a_variable_switches_off_what_may_be_false() -> None:
    assert parse({}, {"PYSYNC_SCRUB": "false"}).scrub is False
    limit = {"windowMs": 5, "maxRequests": 6}
    read = parse({"rateLimit": limit}, {"PYSYNC_RATE_LIMIT_PUSH": "false"})
    assert read.rate_limit == RateLimit(window_ms=5, max_requests=6, push=False)
    assert parse({"scrub": False}, {"PYSYNC_SCRUB_EVERY_MS": "7"}).scrub == schema.ScrubConfig(every_ms=7)


def test_a_variable_adds_to_a_limit_that_is_spelled_shortly() -> None:
    names = {"PYSYNC_RATE_LIMIT_WINDOW_MS": "5", "PYSYNC_RATE_LIMIT_MAX_REQUESTS": "6"}
    for short in (True, False, "none", None):
        assert parse({"rateLimit": short}, names).rate_limit == RateLimit(window_ms=5, max_requests=6)


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
    # A variable is set where the server is started.
    assert load("etc/c.json", {"WHERE": "x", "PYSYNC_SERVER_EXAMPLES": "here"}).server.examples == "here"
    assert parse({"server": {"examples": "pages"}}).server.examples == "pages"


def test_check_and_serve_find_the_same_folder(tmp_path: Path) -> None:
    seen: list[Config] = []
    check(str(ROOT / "deploy/example.json"), {}, seen.append)
    assert seen[0].server.examples == str(ROOT / "deploy/examples")


@pytest.mark.process
@pytest.mark.parametrize(
    ("value", "told"),
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
def test_serve_names_the_file_that_is_wrong(tmp_path: Path, value: Any, told: list[str]) -> None:
    (tmp_path / "c.json").write_text(json.dumps(value))
    ran = subprocess.run(
        [sys.executable, "-m", "pysync", "serve", "--config", "c.json", "--store", "memory:", "--port", "0"],
        capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False,
        env={name: item for name, item in os.environ.items() if not name.startswith("PYSYNC_")},
    )  # fmt: skip
    lines = ran.stderr.splitlines()
    assert ran.returncode == 1
    assert lines[0].startswith("pysync: " + told[0])
    assert lines[1:] == told[1:]


def test_a_file_that_cannot_be_read_is_named_once(shell: Shell) -> None:
    with pytest.raises(ConfigError) as refused:
        load("none.json", {})
    assert str(refused.value) == "none.json: No such file or directory"
