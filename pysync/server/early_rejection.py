"""Early rejections: requests that an overloaded server rejects by their first bytes.

To parse a request and answer it in the ordinary way takes several times as long. Behind a proxy that matters
most: its connections carry requests of many clients, so the server reads from all of them, and has to refuse
what is too much one by one.
"""

import itertools
import os
import re
import time
from functools import lru_cache
from typing import Final

from pysync import protocol
from pysync.auth.admission import forwarded_ip
from pysync.errors import Overloaded
from pysync.server.metrics import Counters
from pysync.server.overload import Address, Arrival, LoadShedder, Readable
from pysync.server.responses import count_response, error_response

_is_plain: Final = re.compile(rb"GET /(?!health)[!-~]* HTTP/1\.1\r\n(?:[\w-]+:[^\0\n\r]*\r\n)*\r\n").fullmatch
"""Recognises a head that all parsers read alike, and that is not of a health probe. If a proxy saw a body
where this server sees none, that body would be taken for the next request."""
_FORWARDED_FOR: Final = b"\r\nx-forwarded-for:"
_UNDECIDED: Final = (b"\r\norigin:", b"\r\nconnection:", b"\r\ncontent-length:", b"\r\ntransfer-encoding:")
"""Headers of requests that have a body, or whose refusal would be another."""


class EarlyRejections:
    """Decides about requests that have just been read. `proxy_hops` is `server.trustedProxyHops`."""

    def __init__(self, load: LoadShedder, counters: Counters, proxy_hops: int = 0) -> None:
        self._load = load
        self._counters = counters
        self._proxy_hops = proxy_hops
        self._ids = itertools.count(1)
        self._id_prefix = os.urandom(5).hex().encode()

    def decide(self, connection: Readable, data: bytes) -> Arrival | bytes | None:
        """Return the arrival of the request in `data` if there is room for it, and the response if it is
        refused. Return None if `data` is anything else than one GET request without a body."""
        address = self._address(connection, data)
        if address is None:
            return None
        (arrival,) = self._load.arrivals(connection, 1)
        if self._load.admits(connection, address, arrival):
            return arrival._replace(is_admitted=True)
        count_response(self._counters, Overloaded.status, 0.0)
        before, after = _rejection(int(time.monotonic()))
        return b"%b%b-%x%b" % (before, self._id_prefix, next(self._ids), after)

    def _address(self, connection: Readable, data: bytes) -> Address | None:
        """Return the address for which a request counts; None if its bytes do not tell."""
        if _is_plain(data) is None:
            return None
        head = data.lower()
        if any(name in head for name in _UNDECIDED):
            return None
        if not self._proxy_hops:
            return connection.address
        _, found, rest = head.partition(_FORWARDED_FOR)
        if not found or _FORWARDED_FOR in rest:
            return None
        ip = forwarded_ip(rest.partition(b"\r\n")[0].decode("latin-1"), self._proxy_hops)
        return None if ip is None else self._load.address(ip)


@lru_cache(maxsize=1)
def _rejection(second: int) -> tuple[bytes, bytes]:
    """Return what stands before and after the request id in a refusal, whose date is that of a second of the
    monotonic clock."""
    response = error_response(Overloaded())
    response.header_text += f"{protocol.HEADER_REQUEST_ID}: \0\r\n"
    before, _, after = response.to_bytes(keep_alive=True).partition(b"\0")
    return before, after
