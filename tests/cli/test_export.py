"""Documents as JSON files in a folder: `pysync export` and `pysync import`."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import Shell
from support.cli_service import ADMIN_TOKEN, SEE_LOG
from support.clients import ISSUER, Start
from support.collections import LOG, OWN, collection

from pysync.client import Client, SyncDocument
from pysync.client.sealed import RemoteKeyring
from pysync.store.memory import MemoryStore

FOLDER = Path("folder")
NOTES = collection("notes", listable=True, deletable=True, maxBodyBytes=1000)
COUNTS = ("exported", "imported", "unchanged", "skipped")


class Sync:
    """Runs `export` and `import` of one folder against one server."""

    def __init__(self, shell: Shell, url: str, *options: str) -> None:
        self.shell = shell
        self.url = url
        self.client = Client(url)
        self._options = ("--server", url, *options)

    async def run(self, *arguments: str) -> tuple[int, dict[str, int], str]:
        """Exit status, the counts that are not 0, and the errors."""
        status, output, errors = await self.shell.run_async(*arguments, *self._options)
        counts = json.loads(output or "{}")
        return status, {name: counts[name] for name in COUNTS if counts.get(name)}, errors

    async def export(self, *arguments: str) -> tuple[int, dict[str, int], str]:
        return await self.run("export", str(FOLDER), *(arguments or ("notes",)))

    async def import_(self, *arguments: str) -> tuple[int, dict[str, int], str]:
        return await self.run("import", str(FOLDER), *arguments)


async def sync_with(shell: Shell, start: Start, *collections: dict[str, Any], **members: Any) -> Sync:
    return Sync(shell, await start({"collections": [*(collections or (NOTES,))], **members}))


def content(key: str) -> Any:
    return json.loads((FOLDER / f"{key}.json").read_text())


def edit(key: str, text: str | bytes) -> None:
    path = FOLDER / f"{key}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


async def test_exported_documents_are_the_same_on_another_server(shell: Shell, start: Start) -> None:
    first, second = await sync_with(shell, start), await sync_with(shell, start)
    stored = {"text": "Grüße", "n": 2**63, "f": 0.1, "deep": {"list": [None, {}]}}
    async with first.client as client:
        hashes = {
            f"notes/{name}": (await client.push(f"notes/{name}", stored)).hash for name in ("a", "b:1@x")
        }
    assert await first.export() == (0, {"exported": 2}, "")
    assert content("notes/b:1@x") == stored
    assert await second.import_() == (0, {"imported": 2}, "")
    async with second.client as client:
        assert {key: (await client.pull(key)).hash for key in hashes} == hashes
    assert await second.import_() == (0, {"unchanged": 2}, "")
    assert await first.export() == (0, {"unchanged": 2}, "")


async def test_import_replaces_only_the_version_that_was_exported(shell: Shell, start: Start) -> None:
    sync = await sync_with(shell, start)
    async with sync.client as client:
        for name in ("edited", "gone", "newer", "both", "left"):
            await client.push(f"notes/{name}", {"is": "exported"})
        await sync.export()
        stored = (await client.pull("notes/left")).hash
        for name in ("edited", "both"):
            edit(f"notes/{name}", '{"is": "edited"}')
        edit("notes/made", '{"is": "made"}')
        for name in ("newer", "both"):
            await client.push(f"notes/{name}", {"is": "newer"}, stored)
        await client.delete("notes/gone", stored)

        status, counts, errors = await sync.import_()
        assert (status, counts) == (3, {"imported": 3, "unchanged": 1, "skipped": 2})
        changed = "it has changed on the server; --force replaces it"
        skipped = [f"pysync: notes/{name}: {changed}" for name in ("both", "newer")]
        assert sorted(errors.splitlines()) == skipped
        names = ("edited", "gone", "newer", "both", "left", "made")
        found = [(await client.pull(f"notes/{name}")).data["is"] for name in names]
        assert found == ["edited", "exported", "newer", "newer", "exported", "made"]

        assert await sync.import_("--force") == (0, {"imported": 2, "unchanged": 4}, "")
        found = [(await client.pull(f"notes/{name}")).data["is"] for name in ("newer", "both")]
        assert found == ["exported", "edited"]
        edit("notes/edited", '{"is": "edited again"}')
        assert await sync.import_() == (0, {"imported": 1, "unchanged": 5}, "")


async def test_file_made_by_hand_replaces_no_document(shell: Shell, start: Start) -> None:
    sync = await sync_with(shell, start)
    async with sync.client as client:
        await client.push("notes/a", {"is": "stored"})
        edit("notes/a", '{"is": "made"}')
        status, counts, _errors = await sync.import_()
        assert (status, counts) == (3, {"skipped": 1})
        edit("notes/a", '{ "is": "stored" }')
        assert await sync.import_() == (0, {"unchanged": 1}, "")


async def test_export_keeps_a_file_that_was_edited(shell: Shell, start: Start) -> None:
    sync = await sync_with(shell, start)
    async with sync.client as client:
        first = await client.push("notes/a", {"n": 1})
        await client.push("notes/b", {"n": 1})
        await sync.export()
        edit("notes/a", '{"n": 5}')
        for name in ("a", "b"):
            await client.push(f"notes/{name}", {"n": 2}, first.hash)
        edited = "its file was edited: import it, or delete it"
        assert await sync.export() == (1, {"exported": 1, "skipped": 1}, f"pysync: notes/a: {edited}\n")
        assert (content("notes/a"), content("notes/b")) == ({"n": 5}, {"n": 2})
        assert (await sync.import_())[0] == 3, "it is still that of the first version"


async def test_interrupted_export_and_import_go_on(shell: Shell, start: Start) -> None:
    sync = await sync_with(shell, start)
    async with sync.client as client:
        for name in ("a", "b"):
            await client.push(f"notes/{name}", {"n": 1})
        await sync.export()
        versions = FOLDER / ".pysync-export"
        versions.write_bytes(versions.read_bytes()[:-5])  # a process ends while it writes this
        assert await sync.export() == (0, {"unchanged": 2}, "")
        edit("notes/a", '{"n": 2}')
        before = versions.read_bytes()
        await sync.import_()
        versions.write_bytes(before)  # or between the push and the note of it
        assert await sync.import_() == (0, {"unchanged": 2}, "")
        edit("notes/a", '{"n": 3}')
        assert await sync.import_() == (0, {"imported": 1, "unchanged": 1}, "")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "its file: not JSON"),
        ("[]", "its file: expected a JSON object"),
        ('{"n": NaN}', "its file: JSON has no number NaN"),
        ('{}, "baseHash": "x"', "its file: not JSON"),
        (b'{"n": "\xff"}', "its file: not JSON"),
        ('{"n": "\\ud800"}', "its file: not JSON"),
        ('{"n": 1e999}', "its file: not JSON"),
        ('{"n":' * 70 + "{}" + "}" * 70, "Body nesting too deep"),
        (json.dumps({"n": "x" * 1000}), "Payload too large: 1,031 bytes"),
    ],
)
async def test_file_that_no_server_stores_is_reported(
    shell: Shell, start: Start, text: str | bytes, why: str
) -> None:
    sync = await sync_with(shell, start)
    edit("notes/a", text)
    edit("notes/b", "{}")
    (FOLDER / "README.txt").write_text("not JSON, and no matter")
    status, counts, errors = await sync.import_()
    assert (status, counts) == (1, {"imported": 1, "skipped": 1})
    assert errors.startswith(f"pysync: notes/a: {why}"), errors


async def test_names_that_a_file_system_cannot_hold_are_reported(shell: Shell, start: Start) -> None:
    sync = await sync_with(shell, start, NOTES, collection("parts", "notes/{id}/{part}", listable=True))
    async with sync.client as client:
        for key in ("notes/" + "x" * 255, "notes/a.json/b", "notes/a", "notes/A"):
            await client.push(key, {"key": key})
    FOLDER.mkdir()
    (FOLDER / ".PYSYNC-EXPORT").symlink_to(".pysync-export")  # as on a file system that ignores case
    (FOLDER / ".pysync-export").touch()
    status, counts, errors = await sync.export()
    assert (status, counts) == (1, {"exported": 1, "skipped": 2})
    assert errors.splitlines() == [
        "pysync: notes/a: the file system takes it for notes/A",
        f"pysync: notes/{'x' * 255}: File name too long",
    ]
    assert content("notes/A") == {"key": "notes/A"}
    (FOLDER / ".PYSYNC-EXPORT").unlink()
    assert await sync.export() == (
        1,
        {"exported": 1, "unchanged": 1, "skipped": 1},
        errors.splitlines()[1] + "\n",
    )
    status, counts, errors = await sync.export("parts")
    assert (status, counts) == (1, {"skipped": 1})
    assert errors.startswith("pysync: notes/a.json/b: ")
    edit("notes/..b", "{}")
    status, counts, errors = await sync.import_()
    assert (status, errors) == (1, "pysync: notes/..b: no document can have this key\n")


async def test_nothing_is_read_or_written_outside_of_the_folder(
    shell: Shell, start: Start, tmp_path: Path
) -> None:
    sync = await sync_with(shell, start, NOTES, collection("other", listable=True))
    async with sync.client as client:
        await client.push("notes/a", {"n": 1})
        await client.push("other/a", {"n": 1})
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.json").write_text('{"secret": 1}')
    (FOLDER / "other").mkdir(parents=True)
    (FOLDER / "notes").symlink_to(outside)
    (FOLDER / "other" / "a.json").symlink_to(outside / "secret.json")
    why = "a symbolic link is in its place"
    status, counts, errors = await sync.export("notes", "other")
    assert errors == f"pysync: notes/a: {why}\npysync: other/a: {why}\n"
    assert (status, counts) == (1, {"skipped": 2})
    assert [*outside.iterdir()] == [outside / "secret.json"]
    assert (outside / "secret.json").read_text() == '{"secret": 1}'
    assert await sync.import_() == (1, {"skipped": 1}, f"pysync: other/a: {why}\n")
    (FOLDER / ".pysync-export").unlink()
    (FOLDER / ".pysync-export").symlink_to(outside / "secret.json")
    for command in (sync.export, sync.import_):
        status, _, errors = await command()
        assert (status, errors.endswith(f"/.pysync-export: {why}\n")) == (1, True), errors


async def test_only_documents_are_exported(shell: Shell, start: Start) -> None:
    files = collection("files", allowedMimeTypes=["*/*"], listable=True)
    mixed = collection("mixed", allowedMimeTypes=["application/json", "image/png"], listable=True)
    sync = await sync_with(shell, start, {**LOG, "listable": True}, files, mixed)
    async with sync.client as client:
        await client.append("log/a", {"n": 1})
        await client.push_blob("files/a", b"x", "text/plain")
        await client.push_blob("mixed/a", b"x", "image/png")
        await client.push("mixed/b", {"n": 1})
    for name in ("log", "files"):
        status, _, errors = await sync.export(name)
        assert (status, errors) == (
            1,
            f"pysync: {name} has no documents: it has logs or files, or is in a bundle\n",
        )
    assert await sync.export("mixed") == (0, {"exported": 1}, "")
    assert content("mixed/b") == {"n": 1}


async def test_parameters_choose_what_is_exported(shell: Shell, start: Start) -> None:
    tasks = collection("tasks", "teams/{team}/tasks/{id}", deletable=True)
    sync = await sync_with(shell, start, tasks, collection("about", "about"))
    async with sync.client as client:
        for key in ("teams/x/tasks/1", "teams/x/tasks/2", "teams/y/tasks/1", "about"):
            await client.push(key, {"key": key})
        await client.delete("teams/y/tasks/1", (await client.pull("teams/y/tasks/1")).hash)
        await client.push("teams/y/tasks/3", {"key": "teams/y/tasks/3"})
    assert await sync.export("tasks", "--param", "team=x") == (0, {"exported": 2}, "")
    assert await sync.export("tasks", "--param", "team=x", "--param", "id=1") == (0, {"unchanged": 1}, "")
    assert await sync.export("tasks", "about") == (0, {"exported": 2, "unchanged": 2}, "")
    assert content("teams/y/tasks/3") == {"key": "teams/y/tasks/3"}
    assert not (FOLDER / "teams/y/tasks/1.json").exists()
    status, _, errors = await sync.export("nothing")
    assert (status, errors) == (1, "pysync: Collection not found\n")
    status, _, errors = await sync.export("tasks", "--param", "taem=x")
    assert (status, errors.startswith("pysync: --param taem: ")) == (1, True)


class Bucket(MemoryStore):
    """A store whose feed does not reach back to the beginning."""

    is_remote = True


async def test_documents_of_a_bucket_are_exported_by_their_list(shell: Shell, start: Start) -> None:
    tasks = collection("tasks", "teams/{team}/tasks/{id}", listable=True)
    url = await start({"collections": [tasks, NOTES, collection("about", "about")]}, store=Bucket())
    sync = Sync(shell, url)
    async with sync.client as client:
        for key in ("teams/x/tasks/1", "teams/x/tasks/2", "teams/y/tasks/1", "about", "notes/a"):
            await client.push(key, {"key": key})
    assert await sync.export("tasks", "notes", "--param", "team=x") == (0, {"exported": 3}, "")
    assert await sync.export("tasks", "--param", "team=x", "--param", "id=1") == (0, {"unchanged": 1}, "")
    assert await sync.export("about") == (0, {"exported": 1}, "")
    assert content("teams/x/tasks/2") == {"key": "teams/x/tasks/2"}
    status, _, errors = await sync.export("tasks")
    assert (status, "teams/{team}/tasks/{id}: give --param" in errors) == (1, True)


async def test_limits_of_batches_do_not_limit_an_export(shell: Shell, start: Start) -> None:
    rings = collection("rings", "rings/{id}/_keyring")
    sync = await sync_with(shell, start, NOTES, rings, maxCollectionsPerBatch=3, maxBatchBytes=1000)
    async with sync.client as client:
        for n in range(10):
            await client.push(f"notes/{n}" + "x" * 200, {"text": "x" * 700})
        await client.push("rings/a/_keyring", {"n": 1})
    assert await sync.export() == (0, {"exported": 10}, "")
    assert await sync.export("rings") == (0, {"exported": 1}, "")
    assert content("rings/a/_keyring") == {"n": 1}


async def test_names_that_make_a_batch_too_long_are_exported(shell: Shell, start: Start) -> None:
    sync = await sync_with(shell, start)
    names = [f"{n:03d}".ljust(200, "x") for n in range(100)]
    async with sync.client as client:
        for name in names:
            await client.push(f"notes/{name}", {"n": 1})
    assert (await sync.export())[:2] == (0, {"exported": 100})


async def test_hidden_members_are_not_exported_and_stay(shell: Shell, start: Start) -> None:
    hiding = collection(
        "cards", listable=True, fieldPermissions={"pin": {"readRoles": ["admin"], "writeRoles": ["admin"]}}
    )
    sync = await sync_with(shell, start, hiding, auth={"adminToken": ADMIN_TOKEN})
    async with sync.client, Client(sync.url, admin_token=ADMIN_TOKEN) as admin:
        await admin.push("cards/a", {"name": "A", "pin": 1})
        assert await sync.export("cards") == (0, {"exported": 1}, "")
        assert content("cards/a") == {"name": "A"}
        assert await sync.export("cards") == (0, {"unchanged": 1}, "")
        assert await sync.import_() == (0, {"unchanged": 1}, "")
        edit("cards/a", '{"name": "B"}')
        assert await sync.import_() == (0, {"imported": 1}, "")
        assert (await admin.pull("cards/a")).data == {"name": "B", "pin": 1}
        assert await sync.import_() == (0, {"unchanged": 1}, "")


async def test_sealed_documents_are_exported_as_they_are(shell: Shell, start: Start) -> None:
    rooms = collection("rooms", listable=True, encryption="delegated")
    rings = collection("rings", "rooms/{id}/_keyring")
    sync = await sync_with(shell, start, rooms, rings)
    async with sync.client as client:
        ring = RemoteKeyring(client, "rooms/a", ISSUER, [ISSUER.ed_pub])
        await ring.create()
        note = SyncDocument(client, "rooms/a", sealing=await ring.open())
        await note.push({"secret": "text"})
        assert await sync.export("rooms") == (0, {"exported": 1}, "")
        assert await sync.export("rings") == (0, {"exported": 1}, "")
        assert content("rooms/a") == (await client.pull("rooms/a")).data
        assert "secret" not in (FOLDER / "rooms/a.json").read_text()
    other = await sync_with(shell, start, rooms, rings)
    assert await other.import_() == (0, {"imported": 2}, "")
    async with other.client as client:
        ring = RemoteKeyring(client, "rooms/a", ISSUER, [ISSUER.ed_pub])
        note = SyncDocument(client, "rooms/a", sealing=await ring.open())
        assert await note.pull() == {"secret": "text"}


async def test_own_documents_are_exported_from_a_namespace_below_a_mount_path(
    shell: Shell, start: Start
) -> None:
    own = collection("notes", "users/{identity}/notes/{id}", **OWN, listable=True)
    members = {"collections": [], "namespaces": {"acme": {"collections": [own]}}}
    key = f"users/{ISSUER.user_id}/notes/a"
    ISSUER.save(Path("me.json"))
    first, second = [
        Sync(
            shell,
            await start({**members, "server": {"mountPath": mount}}),
            "--namespace",
            "acme",
            "--key",
            "me.json",
        )
        for mount in ("", "/v1")
    ]
    async with Client(first.url, keys=ISSUER, namespace="acme") as client:
        await client.push(key, {"n": 1})
    assert await first.export() == (0, {"exported": 1}, "")
    assert content(key) == {"n": 1}
    assert await second.import_() == (0, {"imported": 1}, "")
    assert await second.export() == (0, {"unchanged": 1}, "")


async def test_exit_status_says_what_stopped_an_export_or_import(shell: Shell, start: Start) -> None:
    shut = collection("shut", readRoles=["public"], writeRoles=["admin"], listable=True)
    own = collection("own", readRoles=["admin"], writeRoles=["public"], listable=True)
    url = await start({"collections": [NOTES, shut, own], "auth": {"adminToken": ADMIN_TOKEN}})
    sync = Sync(shell, url)
    assert (await sync.export("own"))[0] == 4
    for key in ("shut/a", "shut/b"):
        edit(key, "{}")
    assert (await sync.import_())[:2] == (4, {}), "without credentials nothing else can succeed"
    edit("notes/a", "{}")
    ISSUER.save(Path("me.json"))
    status, counts, errors = await sync.import_("--key", "me.json")
    assert (status, counts) == (4, {"imported": 1, "skipped": 2})
    assert sorted(errors.splitlines()) == [f"pysync: shut/{name}: Forbidden{SEE_LOG}" for name in "ab"]
    edit("notes/b", "[]")
    assert (await sync.import_("--key", "me.json"))[0] == 1, "the problems are of several kinds"
    away = Sync(shell, "http://127.0.0.1:9")
    assert [(await away.export())[0], (await away.import_())[0]] == [5, 5]
    assert (await sync.run("import", "missing"))[2].endswith("missing: No such file or directory\n")
