"""The command line as scripts meet it: what it prints, where, and how it ends."""

import json
import socket
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import Shell
from support.cli_service import ADMIN_TOKEN, SEE_LOG, SERVICE
from support.clients import Start

from pysync import __version__
from pysync.auth import certificates
from pysync.auth.identity_keys import IdentityKeys


def test_the_version_is_printed(shell: Shell) -> None:
    assert shell.run("--version") == (0, f"pysync {__version__}\n", "")


def test_help_names_every_command_and_exit_status(shell: Shell) -> None:
    status, output, _ = shell.run("--help")
    assert status == 0
    for word in (
        "serve",
        "check",
        "keys",
        "cap",
        "pull",
        "push",
        "append",
        "tail",
        "history",
        "delete",
        "list",
        "batch",
        "copy",
        "keyring",
    ):
        assert word in output
    assert "bench" in output
    assert "exit status" in output


@pytest.mark.parametrize(
    "arguments",
    [[], ["keys"], ["cap"], ["nonsense"], ["push"], ["cap", "device"], ["serve", "--worker", "x", "y"]],
)
def test_a_command_line_that_is_not_understood_is_status_2(shell: Shell, arguments: list[str]) -> None:
    status, output, errors = shell.run(*arguments)
    assert (status, output) == (2, "")
    assert "usage:" in errors


def test_help_of_serve_names_every_kind_of_store_and_coordinator(shell: Shell) -> None:
    status, output, _ = shell.run("serve", "--help")
    assert status == 0
    options = output.partition("options:")[2]
    stores, _, rest = options.partition("--store URL")[2].partition("--coordinator URL")
    coordinators = rest.partition("--workers")[0]
    for section, kinds in (
        (stores, ("file:", "s3://", "memory:")),
        (coordinators, ("file:", "redis://", "memory:")),
    ):
        assert all(kind in section for kind in kinds)


@pytest.mark.process
def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys; from pysync.cli import main\n"
        "try: main.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(*sorted({'aiohttp', 'cryptography', 'orjson', 'asyncio', 'yaml'} & sys.modules.keys()))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == ""


def test_new_keys_are_printed_or_kept_in_a_file_for_the_owner(shell: Shell, tmp_path: Path) -> None:
    printed = shell.json("keys", "new")
    assert set(printed) == {"edPriv", "edPub", "kemPriv", "kemPub", "userId"}
    public = shell.json("keys", "new", "--out", "k.json")
    kept = IdentityKeys.from_json((tmp_path / "k.json").read_bytes())
    assert public == {"edPub": kept.ed_pub, "kemPub": kept.kem_pub, "userId": kept.user_id}
    assert shell.json("keys", "show", "k.json") == public
    assert shell.run("keys", "show", "k.json", "--user-id") == (0, f"{kept.user_id}\n", "")
    assert (tmp_path / "k.json").stat().st_mode & 0o077 == 0


def test_keys_are_never_overwritten(shell: Shell, tmp_path: Path) -> None:
    shell.json("keys", "new", "--out", "k.json")
    before = (tmp_path / "k.json").read_bytes()
    assert shell.run("keys", "new", "--out", "k.json") == (1, "", "pysync: k.json exists already\n")
    assert (tmp_path / "k.json").read_bytes() == before


def test_keys_of_a_passphrase_are_the_same_with_and_without_a_final_line_break(shell: Shell) -> None:
    made = shell.json("keys", "new", "--passphrase-stdin", stdin="correct horse battery staple\n")
    assert made["userId"] == "3a2587855944c8ebee1ad9e796d44149"
    assert made == shell.json("keys", "new", "--passphrase-stdin", stdin="correct horse battery staple")


def test_certificates_of_each_kind_hold_and_say_for_whom(shell: Shell, tmp_path: Path) -> None:
    issuer = shell.json("keys", "new", "--out", "issuer.json")
    other = shell.json("keys", "new", "--out", "other.json")
    (tmp_path / "other.pub").write_text(json.dumps(other))
    key = ("--key", "issuer.json")
    minted = {
        "root": ("device", *key),
        "device": ("device", *key, "--to", "other.pub", "--collection", "notes", "--days", "1"),
        "member": ("member", "notes", *key, "--to", "other.pub", "--write"),
        "audience": ("audience", "notes", *key, "--aud", other["edPub"]),
    }
    shown = {}
    for name, arguments in minted.items():
        assert shell.run("cap", *arguments, "--out", name) == (0, "", "")
        shown[name] = shell.json("cap", "show", name)
    assert {name: report["verdict"] for name, report in shown.items()} == dict.fromkeys(minted, "ok")
    assert shown["root"]["rootDevice"] is True
    assert shown["root"]["subject"] == issuer["userId"]
    assert shown["member"]["subject"] == other["userId"]
    assert shown["audience"]["certificate"]["aud"] == [other["edPub"]]
    issued = {name: report["certificate"] for name, report in shown.items()}
    assert issued["device"]["scope"]["collections"] == ["notes"]
    assert issued["device"]["exp"] - issued["device"]["nbf"] == 86_400
    assert issued["member"]["scope"]["ops"] == ["read", "list", "write"]


def test_a_certificate_is_shown_from_standard_input_and_from_its_header(shell: Shell) -> None:
    shell.json("keys", "new", "--out", "k.json")
    text = json.dumps(shell.json("cap", "device", "--key", "k.json"))
    header = certificates.parse(text.encode()).authorization
    assert shell.json("cap", "show", "-", stdin=header + "\n") == shell.json("cap", "show", "-", stdin=text)


def test_a_certificate_that_does_not_hold_is_shown_with_the_reason(shell: Shell) -> None:
    shell.json("keys", "new", "--out", "k.json")
    members = shell.json("cap", "device", "--key", "k.json")
    status, output, _ = shell.run(
        "cap", "show", "-", stdin=json.dumps({**members, "exp": members["exp"] + 1})
    )
    assert status == 1
    assert json.loads(output)["verdict"] == "bad-signature"
    said = "pysync: standard input: not a certificate: malformed-shape\n"
    assert shell.run("cap", "show", "-", stdin="{}") == (1, "", said)


def test_a_link_carries_the_audience_certificate(shell: Shell) -> None:
    shell.json("keys", "new", "--out", "k.json")
    status, fragment, _ = shell.run("cap", "audience", "notes", "--key", "k.json", "--link")
    assert status == 0
    assert fragment.startswith("ey")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cap", "device", "--key", "absent.json"], "absent.json: No such file or directory"),
        (["cap", "device", "--key", "-"], "standard input: not a key file: a JSON object is expected"),
        (
            ["push", "public/a", "-"],
            "standard input: expected a JSON object; --type TYPE stores a file as it is",
        ),
        (["append", "log/a"], "standard input: expected a JSON object"),
        (["append", "log/a", "[1]"], "DATA: expected a JSON object"),
        (
            ["append", "log/a", '{"t": [NaN]}'],
            "DATA: JSON has no number NaN: write null, or leave the member out",
        ),
        (
            ["batch", "notes", "--params", '{"t": -Infinity}'],
            "--params: JSON has no number -Infinity: write null, or leave the member out",
        ),
        (["tail", "log/a", "-n", "-1"], "-n must be 0 or more"),
        (["tail", "log/a", "-f", "--since", "-1"], "--since must be 0 or more"),
        (["cap", "revoke", "--key", "k", "--generation", "-1"], "--generation must be 0 or more"),
        (["pull", "public/a", "--cap", "c.json"], "--cap needs --key, or $PYSYNC_KEY"),
        (["pull", "public/a", "--server", "http://"], "not the http or https address of a server: 'http://'"),
    ],
)
def test_bad_input_is_status_1_and_one_line_that_names_it(shell: Shell, arguments: Any, said: str) -> None:
    assert shell.run(*arguments, stdin="[]") == (1, "", f"pysync: {said}\n")


@pytest.mark.parametrize("arguments", [["keys", "show", "k.json"], ["pull", "a", "--key", "k.json"]])
def test_a_key_file_that_is_not_json_is_named(shell: Shell, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "k.json").write_text('{"edPriv": hush')
    status, output, errors = shell.run(*arguments)
    assert (status, output) == (1, "")
    assert errors.startswith("pysync: k.json: not a key file: not JSON: ")
    assert "hush" not in errors


@pytest.mark.parametrize("url", ["localhost", "localhost:8080", "ftp://localhost"])
def test_address_without_a_scheme_is_reported_as_such(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    said = f"argument --server: {url!r}: begin it with http:// or https://\n"
    status, _, errors = shell.run("pull", "a", "--server", url)
    assert (status, errors.endswith(said)) == (2, True)
    monkeypatch.setenv("PYSYNC_URL", url)
    status, _, errors = shell.run("pull", "a")
    assert (status, errors.endswith(said)) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["device", "--days", "0"], "--days must be 1 or more"),
        (["member", "notes", "--to", "k.json"], "--to holds the issuer's own key: "),
        (
            ["audience", "notes", "--aud", "AB" * 32],
            "--aud must be a public key: 64 hex digits, in lower case",
        ),
        (["audience", "notes", "--aud", "ab" * 32, "--aud", "ab" * 32], "--aud names one key twice"),
        (["audience", "notes", *(["--aud", "ab" * 32] * 65)], "--aud may name 64 keys at most"),
        (["audience", "*"], "name one collection: "),
        (["audience", "notes", "--path", "users/{identity}/**"], "--path must not lead into users/"),
        (["audience", "notes", "--path", "**"], "--path must not reach the member list: "),
        (
            ["audience", "notes", "--write", "--path", "notes/**", "--path", "!notes/_members"],
            "--path must not reach the keyring: ",
        ),
    ],
)
def test_impossible_certificate_is_reported_with_the_option_to_change(
    shell: Shell, arguments: list[str], said: str
) -> None:
    shell.json("keys", "new", "--out", "k.json")
    status, output, errors = shell.run("cap", *arguments, "--key", "k.json")
    assert (status, output) == (1, "")
    assert errors.startswith(f"pysync: {said}")


def test_check_accepts_or_says_why_not(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text(json.dumps(SERVICE))
    (tmp_path / "bad.json").write_text(json.dumps({**SERVICE, "colections": [], "version": 2}))
    status, output, errors = shell.run("check", "good.json")
    assert (status, errors) == (0, "")
    assert "/pull/public/{id}" in output
    status, output, errors = shell.run("check", "bad.json")
    assert (status, errors) == (1, "")
    assert "colections" in output
    assert "version" in output


def test_a_configuration_that_cannot_be_served_is_status_1(shell: Shell) -> None:
    status, output, errors = shell.run("serve", "--port", "many")
    assert (status, output) == (1, "")
    assert "server.port" in errors


def test_a_file_that_check_does_not_find_is_named_once(shell: Shell) -> None:
    assert shell.run("check", "absent.json") == (1, "absent.json: No such file or directory\n", "")


@pytest.mark.process
def test_an_address_in_use_is_named_with_the_way_out(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "pysync", "serve", "--store", "memory:", "--port", port]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    said = f"pysync: http://127.0.0.1:{port}: the address is in use; choose another port with --port\n"
    assert (ran.returncode, ran.stdout, ran.stderr.splitlines(True)[-1]) == (1, "", said)


@pytest.mark.slow
def test_nobody_listening_is_status_5(shell: Shell, unused_tcp_port: int) -> None:
    status, output, errors = shell.run("pull", "x", "--server", f"http://127.0.0.1:{unused_tcp_port}")
    said = f"pysync: cannot connect to 127.0.0.1 port {unused_tcp_port}: the connection was refused; "
    assert (status, output, errors.startswith(said)) == (5, "", True)


async def test_a_document_goes_up_and_comes_down(shell: Shell, start: Start, tmp_path: Path) -> None:
    server = ("--server", await start(SERVICE))
    (tmp_path / "doc.json").write_text('{"a": "é"}')
    status, output, _ = await shell.run_async("push", "public/a", "doc.json", *server)
    pushed = json.loads(output)
    assert status == 0
    status, output, _ = await shell.run_async("pull", "public/a", *server)
    pulled = json.loads(output)
    assert (status, pulled["data"], pulled["hash"]) == (0, {"a": "é"}, pushed["hash"])
    assert await shell.run_async("pull", "public/a", "--data", *server) == (0, '{\n  "a": "é"\n}\n', "")


async def test_a_push_replaces_only_what_it_names(shell: Shell, start: Start) -> None:
    server = ("--server", await start(SERVICE))
    _, output, _ = await shell.run_async("push", "public/a", *server, stdin='{"n":1}')
    first = json.loads(output)["hash"]
    status, output, errors = await shell.run_async("push", "public/a", *server, stdin='{"n":2}')
    assert (status, output) == (3, "")
    assert errors == f"pysync: hash_mismatch: the document is at {first}; use --base HASH or --force\n"
    status, _, _ = await shell.run_async("push", "public/a", "--base", first, *server, stdin='{"n":2}')
    assert status == 0
    status, _, _ = await shell.run_async("push", "public/a", "--force", *server, stdin='{"n":3}')
    assert status == 0
    _, output, _ = await shell.run_async("pull", "public/a", "--data", *server)
    assert json.loads(output) == {"n": 3}


async def test_a_key_speaks_for_itself_and_nobody_else_reads_it(shell: Shell, start: Start) -> None:
    server = ("--server", await start(SERVICE))
    me = shell.json("keys", "new", "--out", "me.json")
    shell.json("keys", "new", "--out", "other.json")
    document = f"users/{me['userId']}/notes/n1"
    status, _, _ = await shell.run_async("push", document, "--key", "me.json", *server, stdin='{"mine":1}')
    assert status == 0
    status, output, _ = await shell.run_async("pull", document, "--data", "--key", "me.json", *server)
    assert (status, json.loads(output)) == (0, {"mine": 1})
    result = await shell.run_async("pull", document, *server)
    said = "Unauthorized: the request has no credentials; add keys (--key FILE on the command line)"
    assert result == (4, "", f"pysync: {said}\n")
    result = await shell.run_async("pull", document, "--key", "other.json", *server)
    assert result == (4, "", f"pysync: Forbidden{SEE_LOG}\n")


async def test_a_member_writes_under_the_certificate_it_was_given(shell: Shell, start: Start) -> None:
    server = ("--server", await start(SERVICE))
    shell.json("keys", "new", "--out", "owner.json")
    shell.json("keys", "new", "--out", "guest.json")
    given = ("--key", "owner.json", "--to", "guest.json", "--out", "cap.json")
    for write, status in (((), 4), (("--write",), 0)):
        assert shell.run("cap", "member", "board", *given, *write)[0] == 0
        used = ("--key", "guest.json", "--cap", "cap.json", *server)
        result = await shell.run_async("push", "board/b1", *used, stdin="{}")
        assert result[0] == status


async def test_a_certificate_that_its_issuer_took_back_no_longer_opens(shell: Shell, start: Start) -> None:
    server = ("--server", await start(SERVICE))
    issuer = shell.json("keys", "new", "--out", "owner.json")
    shell.json("keys", "new", "--out", "guest.json")
    assert (
        shell.run("cap", "member", "board", "--key", "owner.json", "--to", "guest.json", "--out", "c")[0] == 0
    )
    pull = ("pull", "board/b1", "--key", "guest.json", "--cap", "c", *server)
    revoke = ("cap", "revoke", "--key", "owner.json", "--generation", "1", "c")
    printed = shell.json(*revoke)
    assert (printed["iss"], printed["generation"], len(printed["revoked"])) == (issuer["edPub"], 1, 1)
    assert (await shell.run_async(*pull))[0] == 0  # printed, and not sent
    status, output, errors = await shell.run_async(*revoke, "--publish", *server)
    assert (status, json.loads(output), errors) == (0, printed, "")
    assert (await shell.run_async(*pull))[0] == 4
    assert (await shell.run_async(*revoke, "--publish", *server))[:2] == (1, "")  # that generation is known


def test_only_its_issuer_takes_a_certificate_back(shell: Shell) -> None:
    for name in ("one", "other"):
        shell.json("keys", "new", "--out", name)
    shell.run("cap", "device", "--key", "one", "--out", "c")
    status, output, errors = shell.run("cap", "revoke", "--key", "other", "--generation", "1", "c")
    said = "pysync: c: issued by another key: only its issuer can take it back\n"
    assert (status, output, errors) == (1, "", said)


async def test_push_of_events_prints_the_batch_that_they_became(
    shell: Shell, start: Start, tmp_path: Path
) -> None:
    taps = {
        "name": "taps",
        "storagePath": "taps/{batchId}",
        "readRoles": ["public"],
        "writeRoles": ["public"],
    }
    events = [{"collection": "taps", "storagePath": "events/{batchId}"}]
    server = ("--server", await start({"collections": [taps], "events": events}))
    status, output, _ = await shell.run_async(
        "push", "taps/a", *server, stdin='{"events": [{"event": "tap"}]}'
    )
    pushed = json.loads(output)
    assert (status, pushed.keys()) == (0, {"hash", "timestamp", "batchId"})
    pulled = await shell.run_async("pull", f"taps/{pushed['batchId']}", "--out", "batch.parquet", *server)
    assert json.loads(pulled[1])["hash"] == pushed["hash"]
    assert (tmp_path / "batch.parquet").read_bytes().startswith(b"PAR1")
    rejected = await shell.run_async("push", "taps/a", *server, stdin="{}")
    assert rejected == (1, "", "pysync: Missing or invalid events\n")


async def test_the_admin_token_comes_from_the_option_or_the_environment(
    shell: Shell, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSYNC_URL", await start(SERVICE))
    assert (await shell.run_async("pull", "board/b1"))[0] == 4
    assert (await shell.run_async("pull", "board/b1", "--admin-token", ADMIN_TOKEN))[0] == 0
    monkeypatch.setenv("PYSYNC_ADMIN_TOKEN", ADMIN_TOKEN)
    assert (await shell.run_async("pull", "board/b1"))[0] == 0


async def test_a_list_prints_every_name_on_a_line_of_its_own(shell: Shell, start: Start) -> None:
    listable = {**SERVICE, "collections": [{**SERVICE["collections"][0], "listable": True}]}
    server = ("--server", await start(listable))
    for name in ("b", "a", "c"):
        assert (await shell.run_async("push", f"public/{name}", *server, stdin="{}"))[0] == 0
    assert await shell.run_async("list", "public", *server) == (0, "a\nb\nc\n", "")
    assert await shell.run_async("list", "public", "--after", "a", *server) == (0, "b\nc\n", "")
    digits = sha256(b"{}").hexdigest()[:16]
    hashed = await shell.run_async("list", "public", "--after", "a", "--hashes", *server)
    assert hashed == (0, f"{digits}  b\n{digits}  c\n", "")
    why = "pysync: no collection has a list of 'board': see `listable`\n"
    assert await shell.run_async("list", "board", *server) == (1, "", why)


async def test_a_path_that_the_server_does_not_have_is_explained(shell: Shell, start: Start) -> None:
    server = ("--server", await start(SERVICE))
    why = "pysync: Not found: `pysync check` prints the paths that a configuration gives a server\n"
    assert await shell.run_async("pull", "nothing/a", *server) == (1, "", why)
    assert await shell.run_async("usage", *server) == (1, "", "pysync: the server has no quotas\n")


async def test_a_batch_prints_each_entry_or_why_there_is_none(shell: Shell, start: Start) -> None:
    server = ("--server", await start(SERVICE))
    _, pushed, _ = await shell.run_async("push", "public/a", *server, stdin='{"n":1}')
    params = json.dumps({"public": [{"id": "a"}, {"id": "none"}], "board": [{"id": "b"}]})
    status, output, _ = await shell.run_async("batch", "public,board", "--params", params, *server)
    printed = json.loads(output)
    assert status == 0
    assert printed["board"] == [{"error": "Forbidden"}]
    first, second = printed["public"]
    assert (first["data"], first["hash"]) == ({"n": 1}, json.loads(pushed)["hash"])
    assert (second["data"], second["hash"]) == ({}, "")


@pytest.mark.parametrize("params", ["{", "[]", "null"])
async def test_params_that_are_no_object_are_a_problem_of_the_input(shell: Shell, params: str) -> None:
    status, output, errors = await shell.run_async("batch", "public", "--params", params)
    assert (status, output) == (1, "")
    assert errors.startswith("pysync: --params: ")


async def test_deleted_document_is_gone_and_a_delete_of_another_version_has_status_3(
    shell: Shell, start: Start
) -> None:
    url = ("--server", await start(SERVICE))
    await shell.run_async("push", "public/a", *url, stdin='{"n": 1}')
    status, _, errors = await shell.run_async("delete", "public/a", "--base", "0" * 64, *url)
    assert (status, "hash_mismatch" in errors) == (3, True)
    status, output, _ = await shell.run_async("delete", "public/a", "--force", *url)
    assert (status, json.loads(output)["hash"]) == (0, "")
    assert (await shell.run_async("pull", "public/a", "--fail", *url))[0] == 6
    assert (await shell.run_async("delete", "public/a", "--force", *url))[0] == 0
    assert (await shell.run_async("delete", "public/a", *url))[0] == 2
    status, _, errors = await shell.run_async("delete", "board/a", "--force", *url)
    assert (status, errors) == (1, "pysync: board/a: its collection is not deletable\n")


async def test_an_old_version_is_listed_printed_and_restored(shell: Shell, start: Start) -> None:
    url = ("--server", await start(SERVICE))
    for n in (1, 2):
        await shell.run_async("push", "public/a", "--force", *url, stdin=f'{{"n": {n}}}')
    status, output, _ = await shell.run_async("history", "public/a", *url)
    newest, oldest = map(json.loads, output.splitlines())
    assert (status, "replaced" in newest, "replaced" in oldest) == (0, False, True)
    old = ("pull", "public/a", "--version", oldest["hash"])
    status, output, _ = await shell.run_async(*old, "--data", *url)
    assert (status, json.loads(output)) == (0, {"n": 1})
    status, _, errors = await shell.run_async("pull", "public/a", "--version", "0" * 64, *url)
    assert (status, "version_not_found: the history" in errors) == (1, True)
    assert (await shell.run_async("pull", "public/a", "--version", "0" * 64, "--fail", *url))[0] == 6
    status, _, errors = await shell.run_async("history", "board/a", *url)
    assert (status, errors) == (1, "pysync: board/a: its collection keeps no history\n")
    assert (await shell.run_async(*old, "--out", "x", *url))[0] == 1
