"""A client that sends requests to nodes and records the responses."""

import time
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, Final, Protocol

from proof import service
from proof.history import History, Kind, Operation
from proof.signed import ANSWER_LIMIT_S, MESSAGE_ID, Connection, Device, NoReply, Reply, Request
from pysync import protocol
from pysync.clock import wall_clock_ms

REQUESTS_PER_CONNECTION: Final = 15
"""A new connection may lead to another worker of a node."""


class Node(Protocol):
    """Where to ask: host and port, None while nobody is there."""

    @property
    def address(self) -> tuple[str, int] | None: ...


class ProofClient:
    """A client of `nodes`, under the name and with the keys of one device."""

    def __init__(self, name: str, nodes: Sequence[Node], history: History, random: Random) -> None:
        self.name = name
        self._nodes = nodes
        self._history = history
        self._device = Device(random, service.NAMES)
        self._idle: dict[int, tuple[Connection, int]] = {}

    async def pull(self, node: int, key: str, known: str = "") -> tuple[Operation, Request]:
        """Pull a document, unless it is the version `known`."""
        headers = [(protocol.HEADER_IF_NONE_MATCH, f'"{known}"')] if known else []
        request = self._device.request(f"/pull/{key}", headers=headers)
        return await self.send(node, "pull", key, {"known": known} if known else {}, request), request

    async def tail(self, node: int, key: str, bounds: Mapping[str, object]) -> tuple[Operation, Request]:
        query = "&".join(f"{name}={value}" for name, value in bounds.items())
        request = self._device.request(f"/pull/{key}?{query}")
        return await self.send(node, "tail", key, bounds, request), request

    def writing(self, kind: Kind, key: str, sent: Mapping[str, Any]) -> Request:
        """The request of a push, append, batch, create or delete: `sent` as in `Operation`."""
        once = [(protocol.HEADER_IDEMPOTENCY_KEY, sent["once"])] if "once" in sent else []
        if kind == "batch":
            events = [{MESSAGE_ID: id_} for id_ in sent["ids"]]
            body = {"data": {"events": events}, "baseHash": None}
            return self._device.request(f"/push/{key}/discarded", body, once)
        if kind == "delete":
            return self._device.request(f"/push/{key}?baseHash={sent['base']}", headers=once, method="DELETE")
        base = {"push": {"baseHash": sent.get("base")}, "create": {"baseHash": None}}
        body = {"data": sent["data"]} | base.get(kind, {})
        return self._device.request(f"/push/{key}", body, once)

    async def download(self, node: int, key: str, known: str = "") -> tuple[Operation, Request]:
        """Pull a file, unless it is the version `known`."""
        headers = [(protocol.HEADER_IF_NONE_MATCH, f'"{known}"')] if known else []
        request = self._device.request(f"/pull/{key}", headers=headers)
        return await self.send(node, "download", key, {"known": known} if known else {}, request), request

    def uploading(self, key: str, content: bytes) -> Request:
        """The request of a push of these bytes."""
        return self._device.request(f"/push/{key}", content)

    async def names(self, node: int, key: str, after: str, limit: int) -> tuple[Operation, Request]:
        """The names of batches that come after one."""
        request = self._device.request(f"/list/{key}?limit={limit}" + (f"&after={after}" if after else ""))
        return await self.send(node, "list", key, {"after": after}, request), request

    async def rows(self, node: int, key: str) -> tuple[Operation, Request]:
        """Pull a batch."""
        request = self._device.request(f"/pull/{key}")
        return await self.send(node, "rows", key, {}, request), request

    async def metered(self, node: int, key: str) -> Operation:
        return await self.send(node, "metered", key, {}, self._device.request(f"/pull/{key}"))

    async def send(
        self,
        node: int,
        kind: Kind,
        key: str,
        sent: Mapping[str, Any],
        request: Request,
        leave_after_s: float = ANSWER_LIMIT_S,
    ) -> Operation:
        """Send `request`, on a kept connection or a new one, and write down what became of it."""
        from_ms, start = wall_clock_ms(), time.monotonic()
        answer, error = None, ""
        try:
            answer = await self._send(node, request, leave_after_s)
        except NoReply as lost:
            error = str(lost)
        end, to_ms = time.monotonic(), wall_clock_ms()
        operation = Operation(
            kind=kind,
            who=self.name,
            node=node,
            key=key,
            sent={"from_ms": from_ms, "to_ms": to_ms} if kind == "metered" else dict(sent),
            start=start,
            end=end,
            status=None if answer is None else answer.status,
            answer=None if answer is None else answer.body,
            nonce=request.nonce,
            error=error,
        )
        self._history.add(operation)
        return operation

    def up(self) -> list[int]:
        """The nodes that are there now; all, where none is."""
        up = [at for at, node in enumerate(self._nodes) if node.address is not None]
        return up or list(range(len(self._nodes)))

    def close(self) -> None:
        for connection, _ in self._idle.values():
            connection.close()

    async def _send(self, node: int, request: Request, leave_after_s: float) -> Reply:
        address = self._nodes[node].address
        if address is None:
            raise NoReply("nobody is there")
        connection, used = self._idle.pop(node, (None, 0))
        if connection is None:
            connection = await Connection.to(address)
        answer = await connection.send(request, leave_after_s)
        if node in self._idle or used + 1 >= REQUESTS_PER_CONNECTION:
            connection.close()
        else:
            self._idle[node] = connection, used + 1
        return answer
