"""What Starfish keeps, read from a folder of plain files or from its objects in a store."""

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support import reference_append_log as twin
from support.append_log_nodes import Node, keys_below, numbered
from support.starfish_samples import LOG, stored
from support.store_samples import UNREAD, contents, copy

from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.append_log import LogSettings
from pysync.engine.documents import Documents
from pysync.errors import StoreUnavailable
from pysync.migrate import CopyReport
from pysync.migrate.locations import FolderSource
from pysync.store import ReadableStore
from pysync.store.memory import MemoryStore
from pysync.testing import FakeClock

DATA = {"text": "größe", "n": 1e21, "small": 0.0000001, "list": [1.5, None]}


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Starfish:
    """What a server of Starfish's has stored: in a folder, or as objects of a store."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.store = MemoryStore()

    @property
    def source(self) -> ReadableStore:
        return self.store if self.folder is None else FolderSource(self.folder)

    async def put(self, values: dict[str, Any]) -> None:
        """Store values as JSON, as its Python server writes it; bytes as they are."""
        for key, value in values.items():
            body = value if isinstance(value, bytes) else json.dumps(value).encode()
            if self.folder is None:
                await self.store.put(key, body)
            else:
                path = self.folder / key
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(body)


@pytest_asyncio.fixture(params=["folder", "store"])
async def starfish(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Starfish]:
    (tmp_path / "starfish").mkdir()
    yield Starfish(tmp_path / "starfish" if request.param == "folder" else None)


@pytest.fixture
def target() -> MemoryStore:
    return MemoryStore()


async def test_documents_arrive_as_they_are_and_are_pulled(starfish: Starfish, target: MemoryStore) -> None:
    values = {"notes/a": stored(DATA), "notes/b/_keyring": stored({}), "top": stored({"a": 1})}
    await starfish.put(values)
    await starfish.put({"__sync__/config.json": {"version": 1, "collections": []}})
    outcomes, reports = await copy(starfish.source, target)
    assert (outcomes.copied, reports) == (3, [])
    assert {key: json.loads(body) for key, (_, body) in (await contents(target)).items()} == values
    pulled = await Documents(target, MemoryCoordinator(), FakeClock()).pull("notes/a")
    assert pulled is not None
    assert json.loads(pulled.data) == DATA
    again, _ = await copy(starfish.source, target)
    assert again == CopyReport(already_there=3)


async def test_a_whole_number_that_was_hashed_with_all_its_digits_is_sound(
    starfish: Starfish, target: MemoryStore
) -> None:
    # 2**60 + 1 is no double: all digits are those of the double nearest to it.
    data = {"a": [-(2**60 + 1), 1e20, 0.12345678901234566], "s": '"12345678901234567890\\'}
    text = r'{"a":[-1152921504606846976,100000000000000000000,0.12345678901234566],'
    text += r'"s":"\"12345678901234567890\\"}'
    await starfish.put({"python": stored(data, sha256(text)), "typescript": stored(data)})
    log = {"items": [{"ts": 5, "data": data}]}
    exact = sha256(f'{{"last":{text},"n":1}}')
    await starfish.put({"log": {"v": 1, "data": log, "ts": 5, "hash": exact}})
    outcomes, reports = await copy(starfish.source, target)
    assert (outcomes.copied, reports) == (3, [])


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("layout", ["document", "chunks"])
async def test_a_log_arrives_and_is_appended_to(
    starfish: Starfish, target: MemoryStore, layout: str, behind: int
) -> None:
    extra = {"title": "a log"}
    if layout == "document":
        values = {"logs/a": twin.starfish_document(LOG, "entries", extra)}
    else:
        values = twin.starfish_chunks(LOG, "logs/a", 7, extra, behind)
    await starfish.put(values)
    outcomes, reports = await copy(starfish.source, target)
    assert (outcomes.copied, reports) == (len(values), [])
    assert await keys_below(target, "") == sorted(values)
    log_settings = LogSettings(field="entries") if layout == "document" else LogSettings()
    node = Node(target, MemoryCoordinator(), FakeClock())
    await node.append({"n": 60}, key="logs/a", rules=log_settings)
    assert await node.datas(key="logs/a", rules=log_settings) == numbered(61)
    await node.logs.close()
    outcomes, reports = await copy(target, MemoryStore())
    assert (outcomes.is_complete, reports) == (True, [])


async def test_unverifiable_objects_stay_behind(starfish: Starfish, target: MemoryStore) -> None:
    changed = twin.starfish_document(LOG)
    changed["data"]["items"][-1]["data"] = {"n": 7}
    shorter = twin.starfish_document(LOG)
    del shorter["data"]["items"][3]
    await starfish.put(
        {
            "notes/a": {**stored(DATA), "data": {"text": "another"}},
            "notes/cut": json.dumps(stored(DATA)).encode()[:-3],
            "notes/empty": b"",
            "notes/list": [1, 2],
            "logs/changed": changed,
            "logs/shorter": shorter,
        }
    )
    outcomes, reports = await copy(starfish.source, target)
    keys = ("notes/a", "notes/cut", "notes/empty", "notes/list", "logs/changed", "logs/shorter")
    assert dict(reports) == dict.fromkeys(keys, f"corrupt: {UNREAD}")
    assert outcomes.copied == 0
    assert await contents(target) == {}


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ("missing", "corrupt: its chunks do not match its head, or some are missing"),
        ("cut", "refused: objects of this log are missing"),
        ("changed", "corrupt: its chunks do not match its head, or some are missing"),
    ],
)
async def test_a_log_whose_chunks_are_not_what_its_head_says_gets_no_head(
    starfish: Starfish, target: MemoryStore, damage: str, text: str
) -> None:
    values = twin.starfish_chunks(LOG, "logs/a", 7)
    last = max(key for key in values if "__seg" in key)
    if damage == "missing":
        del values[last]
    elif damage == "cut":
        values[last] = json.dumps(values[last]).encode()[:-3]
    else:
        values[last][-1]["data"] = {"n": 7}
    await starfish.put(values)
    _, reports = await copy(starfish.source, target)
    assert ("logs/a", text) in reports
    assert await target.get("logs/a") is None


async def test_chunk_of_no_log_is_reported(starfish: Starfish, target: MemoryStore) -> None:
    values = twin.starfish_chunks(LOG, "logs/a", 30)
    del values["logs/a"]
    values["notes__seg/0000000000000001"] = stored(DATA)
    await starfish.put(values)
    outcomes, reports = await copy(starfish.source, target)
    assert (outcomes.copied, outcomes.corrupt) == (1, 2)
    assert {text for _, text in reports} == {"corrupt: it is a chunk of a log whose head is missing"}


async def test_file_has_the_media_type_of_its_sidecar(tmp_path: Path, target: MemoryStore) -> None:
    files = {
        "files/python.png": (b"\x89PNG", b'{"contentType": "image/png"}', "image/png"),
        "files/typescript": (b"{}", b"text/plain", "text/plain"),
        "files/empty": (b"", b"image/gif", "image/gif"),
        "files/cut": (b"a", b'{"content', "application/octet-stream"),
        "large": (bytes(600_000), b"", "application/octet-stream"),
    }
    (tmp_path / "files").mkdir()
    for key, (content, meta, _) in files.items():
        (tmp_path / key).write_bytes(content)
        (tmp_path / f"{key}.__meta__").write_bytes(meta)
    outcomes, reports = await copy(FolderSource(tmp_path), target)
    assert (outcomes.copied, reports) == (len(files), [])
    held = {key: (content_type, content) for key, (content, _, content_type) in files.items()}
    assert await contents(target) == held


async def test_other_files_of_a_folder_are_reported_and_not_guessed(
    tmp_path: Path, target: MemoryStore
) -> None:
    (tmp_path / "file").write_bytes(b"\x89PNG without a media type")
    (tmp_path / "left.__meta__").write_bytes(b"image/png")
    (tmp_path / "note.tmp").write_bytes(b'{"v": 1, "da')
    (tmp_path / b"not \xff UTF-8".decode("utf-8", "surrogateescape")).write_bytes(b"{}")
    (tmp_path / "nothing").mkdir()
    outcomes, reports = await copy(FolderSource(tmp_path), target)
    assert (outcomes.corrupt, outcomes.refused, len(reports)) == (3, 1, 4)
    assert await contents(target) == {}


async def test_unreadable_folder_is_reported(tmp_path: Path, target: MemoryStore) -> None:
    folder = tmp_path / "folder"
    with pytest.raises(ValueError, match="folder: there is no such folder"):
        FolderSource(folder)
    folder.mkdir()
    source = FolderSource(folder)
    with pytest.raises(ValueError, match="too long"):
        await source.get("x" * 300)
    folder.rmdir()
    with pytest.raises(StoreUnavailable, match=r"No such file or directory: '.+/folder'"):
        await copy(source, target)
