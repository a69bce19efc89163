"""Early rejections: requests that an overloaded server rejects by their first bytes.

To parse a request and answer it in the ordinary way takes several times as long. Behind a proxy that matters
most: its connections carry requests of many clients, so the server reads from all of them, and has to refuse
what is too much one by one.
"""

import itertools
import os
import time
from functools import lru_cache
from typing import Final

from pysync import protocol
from pysync._core import plain_get_ends
from pysync.auth.addresses import forwarded_ip
from pysync.errors import Overloaded
from pysync.server.metrics import Counters
from pysync.server.overload import Address, Arrivals, LoadShedder, Readable, spread
from pysync.server.responses import count_response, error_response

REJECTIONS_AT_ONCE: Final = 128
"""Requests that are rejected together. Their responses fit into the buffer of a connection."""
_FORWARDED_FOR: Final = b"\r\nx-forwarded-for:"


class EarlyRejections:
    """Decides about requests that have just been read. `proxy_hops` is `server.trustedProxyHops`."""

    def __init__(self, load: LoadShedder, counters: Counters, proxy_hops: int = 0) -> None:
        self._load = load
        self._counters = counters
        self._proxy_hops = proxy_hops
        self._ids = itertools.count(1)
        self._id_prefix = os.urandom(5).hex().encode()

    def decide(self, connection: Readable, data: bytes) -> bytes | None:
        """Return the responses to the requests in `data` if there is no room for them. Return None if there
        is, or if `data` is anything else than some GET requests without a body."""
        if self._load.queue.has_room_for_others:
            return None
        address = self.address(connection, data)
        if address is None or self._load.prefers(connection, address):
            return None
        ends = plain_get_ends(data)
        if not ends or ends[-1] < len(data) or len(ends) > REJECTIONS_AT_ONCE:
            return None
        return self._rejections(address, len(ends))

    def reject_until(
        self, latest: float, connection: Readable, data: bytes, arrivals: Arrivals
    ) -> tuple[bytes, bytes]:
        """Return the responses to the first requests in `data`, those that arrived at the time `latest` or
        before, and the rest of `data`."""
        ends = plain_get_ends(data)
        stale = sum(at <= latest for at, _ in spread(arrivals, len(ends)))
        count = min(stale, REJECTIONS_AT_ONCE)
        if not count:
            return b"", data
        address = self.address(connection, data[: ends[0]])
        return self._rejections(address, count), data[ends[count - 1] :]

    def address(self, connection: Readable, request: bytes) -> Address | None:
        """Return the address for which a request counts; None if its bytes do not tell."""
        if not self._proxy_hops:
            return connection.address
        head, is_complete, _ = request.partition(b"\r\n\r\n")
        _, found, rest = head.lower().partition(_FORWARDED_FOR)
        if not (is_complete and found) or _FORWARDED_FOR in rest:
            return None
        ip = forwarded_ip(rest.partition(b"\r\n")[0].decode("latin-1"), self._proxy_hops)
        return None if ip is None else self._load.address(ip)

    def _rejections(self, address: Address | None, count: int) -> bytes:
        """Return the responses to `count` requests from `address`."""
        self._load.count_rejections(address, count)
        count_response(self._counters, Overloaded.status, 0.0, count=count)
        before, after = _rejection(int(time.monotonic()))
        ids, prefix = self._ids, self._id_prefix
        return b"".join([b"%b%b-%x%b" % (before, prefix, next(ids), after) for _ in range(count)])


@lru_cache(maxsize=1)
def _rejection(second: int) -> tuple[bytes, bytes]:
    """Return what stands before and after the request id in a refusal, whose date is that of a second of the
    monotonic clock."""
    response = error_response(Overloaded())
    response.header_text += f"{protocol.HEADER_REQUEST_ID}: \0\r\n"
    before, _, after = response.to_bytes(keep_alive=True).partition(b"\0")
    return before, after
