"""A service without a server, whose projections are folded on demand."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pysync import config
from pysync._core import decode_append, decode_push, read_document
from pysync.clock import wall_clock_ms
from pysync.coordinator import Coordinator
from pysync.coordinator.memory import MemoryCoordinator
from pysync.engine.append_log import AppendLogs, LogSettings
from pysync.engine.changes import DocumentRef, WriteContext
from pysync.engine.documents import Documents
from pysync.engine.files import Files
from pysync.engine.outbox import outbox_of
from pysync.model import WriteEvent
from pysync.plugins import PluginContext
from pysync.plugins.projection import Projection, projections_of
from pysync.plugins.projection.lists import ListWriter
from pysync.plugins.projection.rebuild import catch_up
from pysync.plugins.projection.sources import KeyResolver
from pysync.store import Store, StoredObject
from pysync.store.memory import MemoryStore
from support.collections import UNSIGNED, collection

NOTES = collection("notes", "notes/{space}/{id}")
JOURNAL = collection("journal", "journals/{space}", appendOnly=UNSIGNED)
LISTS = collection(
    "lists", "lists/{space}", pullOnly=True, listable=True, readRoles=["public"], writeRoles=[]
)
TITLES = {
    "source": "notes",
    "target": "lists/{space}",
    "id": "{id}",
    "value": {"title": "/title"},
    "removeWhen": {"/deleted": True},
}


def members(*projections: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A configuration of notes, a journal and lists."""
    return {
        "store": "memory:",
        "collections": [NOTES, JOURNAL, LISTS],
        "projections": list(projections),
        **more,
    }


def entry(id_: str, **value: Any) -> dict[str, Any]:
    return {"id": id_, "value": value}


def titled(event: WriteEvent) -> dict[str, Any] | None:
    """A project function: what TITLES declares."""
    assert event.body is not None
    if event.body.get("deleted"):
        return {"id": event.params["id"], "remove": True}
    return {"id": event.params["id"], "value": {"title": event.body.get("title")}}


class Site:
    """One process of a service: several may share a store and a coordinator. `counts` has its metrics."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        projections: Sequence[Projection] = (),
        store: Store | None = None,
        coordinator: Coordinator | None = None,
        now_ms: Any = wall_clock_ms,
    ) -> None:
        self.config = config.parse({"version": 1, **settings})
        self.store: Store = store or MemoryStore(now_ms)
        self.coordinator: Coordinator = coordinator or MemoryCoordinator(now_ms)
        self.counts: Counter[tuple[str, str]] = Counter()
        outbox = outbox_of(self.store, self.coordinator)
        self.log = outbox.log
        self.documents = Documents(self.store, self.coordinator, now_ms)
        self.logs = AppendLogs(self.store, self.coordinator, now_ms)
        self.services = PluginContext(
            config=self.config,
            store=self.store,
            coordinator=self.coordinator,
            outbox=outbox,
            documents=self.documents,
            files=Files(self.store, now_ms, outbox),
            logs=self.logs,
            now_ms=now_ms,
            sweeps=True,
            count=self._count,
        )
        own = [one for plugin in projections_of(self.config) for one in plugin.projections]
        self.projections = [*own, *projections]
        self.lists = ListWriter(self.projections, self.services)
        self._keys = KeyResolver(self.config)
        self._folded = ""

    async def push(
        self, name: str, params: Mapping[str, str], data: Any, namespace: str | None = None, by: str = ""
    ) -> None:
        """Write a document, whatever is there, or append to a log."""
        context = WriteContext(DocumentRef(name, params, namespace), by)
        located = self._keys.locate(context.ref)
        assert located is not None
        if located.collection.append_only is not None:
            element = decode_append(json.dumps({"data": data}).encode())
            await self.logs.append(
                located.key, element, LogSettings.from_collection(located.collection), context
            )
            return
        held = await self.documents.pull(located.key)
        body = {"data": data, "baseHash": None if held is None else held.hash}
        await self.documents.push(
            located.key, decode_push(json.dumps(body).encode()), located.collection.ttl_ms, context
        )

    async def note(self, id_: str, space: str = "s", **data: Any) -> None:
        await self.push("notes", {"space": space, "id": id_}, data)

    async def fold(self) -> None:
        """Fold all that was told since the last time."""
        after, self._folded = self._folded, await self.log.last_id()
        assert await catch_up(self.lists, self.log, after)

    async def fold_all(self) -> None:
        """Fold all that was told, again."""
        self._folded = ""
        await self.fold()

    async def data(self, key: str = "lists/s") -> Any:
        """What is stored at a list's key, None where nothing is."""
        found = await self.store.get(key)
        return json.loads(read_document(found.body).data) if isinstance(found, StoredObject) else None

    async def items(self, key: str = "lists/s") -> Any:
        data = await self.data(key)
        return None if data is None else data["items"]

    async def announced(self, collection: str = "lists") -> list[Any]:
        """The changes of a collection that followers have heard of."""
        found = await self.log.read("", 100_000)
        assert found is not None
        changes = [json.loads(change.text) for _, change in found]
        for change in changes:
            change.pop("key", None)
        return [change for change in changes if change["collection"] == collection]

    def count(self, what: str) -> int:
        return sum(n for (metric, _), n in self.counts.items() if metric == f"pysync_projection_{what}")

    def _count(self, metric: str, label: str, by: int = 1) -> None:
        self.counts[metric, label] += by
