"""Every way to read a key asks one authoriser: vetoes, roles for one request and hidden fields hold there.
A path that forgets one of them fails here."""

import ast
import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import aiohttp
import pytest
from support.clients import ISSUER, STRANGER, SUBJECT, Reply, Signed, Start, root_device
from support.plugin_samples import Roles
from support.sse_client import EventStream, listen

from pysync.errors import Forbidden
from pysync.plugins import PluginRequest
from pysync.server import authorization

OWNER, MEMBER = ISSUER.user_id, SUBJECT.user_id
DATA = {"open": 1, "secret": 2}
PNG = {"Content-Type": "image/png"}


class Seen(NamedTuple):
    """What a reader got: the data, if the path shows it, and the version, if the path tells it."""

    data: dict[str, Any] | None = None
    version: str | None = None


class Scene(NamedTuple):
    """A service with something to read on every path, and the plain versions of what is there."""

    base: str
    session: aiohttp.ClientSession
    versions: dict[str, str]
    start_cursor: str

    def reader(self, keys: Any) -> Signed:
        return Signed(self.base, self.session, keys, root_device(keys))


Read = Callable[[Scene, Signed], Awaitable[Seen | None]]
"""Reads on one path. None: the reader is refused."""


def version_of(reply: Reply) -> str:
    return str(reply.headers["ETag"]).removeprefix("W/").strip('"')


async def pulled(reader: Signed, key: str, method: str = "GET", **headers: str) -> Reply | None:
    reply = await reader.request(method, f"/pull/{key}", headers=headers)
    assert reply.status in (200, 304, 403), reply
    return None if reply.status == 403 else reply


async def pull(scene: Scene, reader: Signed) -> Seen | None:
    reply = await pulled(reader, "s/x/docs/a")
    return None if reply is None else Seen(reply.json["data"], reply.json["hash"])


async def head(scene: Scene, reader: Signed) -> Seen | None:
    reply = await pulled(reader, "s/x/docs/a", "HEAD")
    return None if reply is None else Seen(None, version_of(reply))


async def not_modified(scene: Scene, reader: Signed) -> Seen | None:
    reply = await pulled(reader, "s/x/docs/a", **{"If-None-Match": f'"{scene.versions["docs"]}"'})
    return (
        None
        if reply is None
        else Seen(None if reply.status == 304 else reply.json["data"], version_of(reply))
    )


async def log(scene: Scene, reader: Signed) -> Seen | None:
    reply = await pulled(reader, "s/x/log/a?last=1")
    return None if reply is None else Seen(reply.json["data"]["items"][0]["data"], reply.json["hash"])


async def log_head(scene: Scene, reader: Signed) -> Seen | None:
    reply = await pulled(reader, "s/x/log/a?last=1", "HEAD")
    return None if reply is None else Seen(None, version_of(reply))


async def file(scene: Scene, reader: Signed) -> Seen | None:
    return None if await pulled(reader, "s/x/pics/a") is None else Seen()


async def file_head(scene: Scene, reader: Signed) -> Seen | None:
    return None if await pulled(reader, "s/x/pics/a", "HEAD") is None else Seen()


async def file_range(scene: Scene, reader: Signed) -> Seen | None:
    reply = await reader.request("GET", "/pull/s/x/pics/a", headers={"Range": "bytes=0-1"})
    assert reply.status in (206, 403), reply
    return Seen() if reply.status == 206 else None


async def listed(scene: Scene, reader: Signed) -> Seen | None:
    reply = await reader.request("GET", "/list/s/x/docs")
    assert reply.status in (200, 403), reply
    return Seen() if reply.status == 200 else None


async def batch_entry(reader: Signed, name: str, **bounds: int) -> dict[str, Any]:
    query = f"collections={name}&params={quote(json.dumps({name: [{'spaceId': 'x', 'id': 'a'}]}), safe='')}"
    if bounds:
        query += f"&appendParams={quote(json.dumps({name: [bounds]}), safe='')}"
    reply = await reader.request("GET", f"/batch/pull?{query}")
    assert reply.status == 200, reply
    entry: dict[str, Any] = reply.json["collections"][name][0]
    return entry


async def batch(scene: Scene, reader: Signed) -> Seen | None:
    entry = await batch_entry(reader, "docs")
    return None if "error" in entry else Seen(entry["data"], entry["hash"])


async def batch_log(scene: Scene, reader: Signed) -> Seen | None:
    entry = await batch_entry(reader, "log", last=1)
    return None if "error" in entry else Seen(entry["data"]["items"][0]["data"], entry["hash"])


async def bundle(scene: Scene, reader: Signed) -> Seen | None:
    reply = await pulled(reader, "s/x/board")
    assert reply is not None
    card = reply.json["collections"].get("cards")
    return None if card is None else Seen(card["data"], card["hash"])


async def keyring_fold(scene: Scene, reader: Signed) -> Seen | None:
    reply = await pulled(reader, "open/x?withKeyring=1")
    assert reply is not None
    keyring = reply.json.get("keyring")
    return None if keyring is None else Seen(keyring["data"], keyring["hash"])


async def listed_version(scene: Scene, reader: Signed) -> Seen | None:
    reply = await reader.request("GET", "/history/s/x/docs/a")
    assert reply.status in (200, 403), reply
    return None if reply.status == 403 else Seen(None, reply.json["versions"][-1]["hash"])


async def old_version(scene: Scene, reader: Signed) -> Seen | None:
    seen = await listed_version(scene, reader)
    reply = await reader.request("GET", f"/pull/s/x/docs/a?version={seen.version if seen else ''}")
    assert reply.status in (200, 403), reply
    return None if reply.status == 403 else Seen(reply.json["data"], reply.json["hash"])


async def seen_by_stream(scene: Scene, stream: EventStream, hash_: str) -> Seen | None:
    """What a stream tells of a write to `docs`, before the write to `marks` that follows it."""
    assert stream.status == 200, stream.body
    change = (await stream.event()).data
    seen = None if change["collection"] == "marks" else Seen(None, change["hash"])
    await stream.close()
    if seen is not None and seen.version == hash_:
        seen = Seen(None, scene.versions["docs"])  # the plain version of another write
    return seen


async def stream(scene: Scene, reader: Signed) -> Seen | None:
    opened = await listen(reader, collections="docs,marks")
    writer = scene.reader(ISSUER)
    hash_ = (await writer.push("s/x/docs/live", {"at": reader.keys.user_id})).json["hash"]
    assert (await writer.push("marks/live", {})).status == 200
    return await seen_by_stream(scene, opened, hash_)


async def resumed_stream(scene: Scene, reader: Signed) -> Seen | None:
    stream = await listen(reader, headers={"Last-Event-ID": scene.start_cursor}, collections="docs,marks")
    return await seen_by_stream(scene, stream, scene.versions["docs"])


DOCUMENTS: list[Read] = [
    pull, head, not_modified, log, log_head, batch, batch_log, bundle, keyring_fold, stream, resumed_stream,
    listed_version, old_version,
]  # fmt: skip
"""The paths that show data, or versions of data, with members that may be hidden."""
PATHS = [*DOCUMENTS, file, file_head, file_range, listed]
PULLS = [path for path in PATHS if path not in (stream, resumed_stream, listed)]
"""The paths that plugins are asked about by their pull hooks: a list and a stream show no data."""


class Vetoing(Roles):
    """Gives the roles that are `held`, and in one `hook` refuses to have anything below `s/x` read."""

    def __init__(self, held: dict[str, Iterable[str]], hook: str) -> None:
        super().__init__(held)
        self.hook = hook
        self.is_armed = False

    def veto(self, hook: str, request: PluginRequest) -> None:
        if self.is_armed and hook == self.hook and request.action != "push" and request.key.startswith("s/x"):
            raise Forbidden

    async def authorize(self, request: PluginRequest) -> Iterable[str]:
        self.veto("authorize", request)
        return await super().authorize(request)

    async def before_pull(self, request: PluginRequest) -> None:
        self.veto("before_pull", request)


HELD: dict[str, Iterable[str]] = {OWNER: ["chief", "editor"], MEMBER: ["editor"]}
SOURCES = {"space": ("space:member", "space:owner"), "plugin": ("editor", "chief")}


async def scene_with(
    start: Start, session: aiohttp.ClientSession, source: str, plugin: Vetoing | None = None
) -> Scene:
    member, owner = SOURCES[source]
    closed = {"readRoles": [member], "writeRoles": [owner]}
    hiding = {**closed, "fieldPermissions": {"secret": {"readRoles": [owner]}}}
    known = {"readRoles": ["public"], "writeRoles": ["public"], "requireAuth": True}
    access = {"readRoles": ["space:member"], "writeRoles": ["space:owner"]}
    collections: list[dict[str, Any]] = [
        {"name": "access", "storagePath": "spaces/{spaceId}/_access", **access},
        {"name": "docs", "storagePath": "s/{spaceId}/docs/{id}", "listable": True, "history": {}, **hiding},
        {"name": "log", "storagePath": "s/{spaceId}/log/{id}",
         "appendOnly": {"requireAuthorSignature": False}, **hiding},
        {"name": "pics", "storagePath": "s/{spaceId}/pics/{id}", "allowedMimeTypes": ["image/png"], **closed},
        {"name": "cards", "storagePath": "s/{spaceId}/board", "bundle": "board", **hiding},
        {"name": "rings", "storagePath": "s/{spaceId}/ring", **hiding},
        {"name": "opened", "storagePath": "open/{spaceId}", "keyringPath": "s/{spaceId}/ring", **known},
        {"name": "marks", "storagePath": "marks/{id}", **known},
    ]  # fmt: skip
    settings = {"collections": collections, "auth": {"spaces": {}}}
    if plugin is None and source == "plugin":
        plugin = Vetoing(HELD, "none")
    base = await start(settings, plugins=[plugin] if plugin else [])
    scene = Scene(base, session, {}, "")
    chief = scene.reader(ISSUER)
    empty = await listen(chief, collections="marks")
    cursor = (await empty.block()).id
    await empty.close()
    assert (await chief.push("spaces/x/_access", {"owner": OWNER, "members": [MEMBER]})).status == 200
    for name, key in {"docs": "s/x/docs/a", "cards": "s/x/board/cards", "rings": "s/x/ring"}.items():
        scene.versions[name] = (await chief.push(key, DATA)).json["hash"]
    reply = await chief.request("POST", "/push/s/x/log/a", {"data": DATA})
    scene.versions["log"] = reply.json["hash"]
    file_headers = chief.headers("POST", "/push/s/x/pics/a", b"") | PNG
    url = f"{base}/push/s/x/pics/a"
    async with session.post(url, data=b"png", headers=file_headers) as answer:
        assert answer.status == 200, await answer.text()
    for key in ("open/x", "marks/a"):
        assert (await chief.push(key, {})).status == 200
    if plugin is not None:
        plugin.is_armed = True
    return scene._replace(start_cursor=cursor)


@pytest.fixture(params=SOURCES)
async def scene(request: pytest.FixtureRequest, start: Start, session: aiohttp.ClientSession) -> Scene:
    """The service with roles of each source."""
    return await scene_with(start, session, request.param)


@pytest.mark.parametrize("path", PATHS)
async def test_caller_with_the_roles_reads_everything_on_every_path(path: Read, scene: Scene) -> None:
    seen = await path(scene, scene.reader(ISSUER))
    assert seen is not None
    assert seen.data in (None, DATA)
    assert path not in DOCUMENTS or seen.version in scene.versions.values()


@pytest.mark.parametrize("path", PATHS)
async def test_caller_outside_the_space_or_the_plugin_is_rejected_on_every_path(
    path: Read, scene: Scene
) -> None:
    assert await path(scene, scene.reader(STRANGER)) is None


@pytest.mark.parametrize("path", DOCUMENTS)
async def test_a_hidden_field_and_the_plain_version_are_hidden_on_every_path(
    path: Read, scene: Scene
) -> None:
    seen = await path(scene, scene.reader(SUBJECT))
    assert seen is not None
    assert seen.data in (None, {"open": 1})
    assert seen.version
    assert seen.version not in scene.versions.values()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("path", PATHS)
async def test_a_plugin_that_rejects_to_give_roles_vetoes_every_path(
    path: Read, source: str, start: Start, session: aiohttp.ClientSession
) -> None:
    scene = await scene_with(start, session, source, Vetoing(HELD, "authorize"))
    assert await path(scene, scene.reader(ISSUER)) is None


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("path", PULLS)
async def test_a_veto_before_a_pull_holds_on_every_path_that_shows_data(
    path: Read, source: str, start: Start, session: aiohttp.ClientSession
) -> None:
    scene = await scene_with(start, session, source, Vetoing(HELD, "before_pull"))
    assert await path(scene, scene.reader(ISSUER)) is None


def test_only_the_authoriser_composes_a_decision() -> None:
    """A handler that put a decision together by itself would be the place that forgets a part of it."""
    parts = {"denial_reason", "effective_roles", "hidden_fields", "run_pull_hooks", "veto_nested_read"}
    home = Path(authorization.__file__)
    for path in home.parent.rglob("*.py"):
        if path != home:
            names = {
                node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
            }
            assert not names & parts, f"{path.name} decides by itself: {names & parts}"
