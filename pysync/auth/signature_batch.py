"""Verification of request signatures, several at once (docs/reference/protocol.md#request-signature)."""

import asyncio
from collections.abc import Callable
from typing import Final

from pysync import _core

MAX_BATCH: Final = 16
"""Signatures that are verified at once. More save little, and keep the first of them waiting for longer."""
SINGLY_AFTER_FAILURE: Final = 8
"""For each signature of a batch that failed, how many of the next are verified one by one. So wrong ones cost
at most a ninth more than if each were verified alone."""

RequestParts = tuple[_core.PublicKey, str, str, list[str], bytes, str, int, str]
"""The arguments of `_core.verify_request`."""


class SignatureBatch:
    """Verifies the signatures of requests that are handled in the same tick of the event loop at once, which
    takes about half as long as one by one. `others_follow` returns True if the loop is about to handle
    further requests in this tick; without them a request waits for nothing."""

    def __init__(self, others_follow: Callable[[], bool]) -> None:
        self._others_follow = others_follow
        self._waiting: list[tuple[RequestParts, asyncio.Future[bool]]] = []
        self._singly = 0

    async def verify(self, request: RequestParts) -> bool:
        """Return True if the signature of a request is valid."""
        if self._singly > 0:
            self._singly -= 1
            return _core.verify_request(*request)
        follow = self._others_follow()
        if not (follow or self._waiting):
            return _core.verify_request(*request)
        loop = asyncio.get_running_loop()
        if not self._waiting:
            # Not all that follow have a signature.
            loop.call_soon(self._verify_waiting)
        is_valid: asyncio.Future[bool] = loop.create_future()
        self._waiting.append((request, is_valid))
        if not follow or len(self._waiting) == MAX_BATCH:
            self._verify_waiting()
        return await is_valid or _core.verify_request(*request)

    def _verify_waiting(self) -> None:
        """Verify what waits. If one signature is wrong, each request verifies its own."""
        waiting, self._waiting = self._waiting, []
        are_valid = False
        try:
            if len(waiting) > 1:
                are_valid = _core.verify_requests([request for request, _ in waiting])
                if not are_valid:
                    self._singly = SINGLY_AFTER_FAILURE * len(waiting)
        finally:
            for _, is_valid in waiting:
                if not is_valid.done():
                    is_valid.set_result(are_valid)
