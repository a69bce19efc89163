"""Clients who page through the latest changes, and now and then follow the stream from where they are."""

import asyncio
import time
from contextlib import closing
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlencode

from proof.follower import FOLLOWED, LONGEST_BACKOFF_S, Follower
from proof.signed import NoReply

READERS: Final = 4
LIMITS: Final = (1, 7, 50, 500)
"""Changes that a page has at most: few, so that much happens between the pages of a run."""
FOLLOWS: Final = 0.1
"""Of the steps: the reader follows the stream, perhaps from within a run of pages."""
BEGINS_ANEW: Final = 0.01
"""Of the steps: the reader forgets where it was, and begins with the oldest change or now."""
LONGEST_VISIT_S: Final = 0.5
LONGEST_PAUSE_S: Final = 0.02
ATTEMPTS: Final = 100
"""At reading to the end, each from any node."""


class Reader(Follower):
    """Somebody who reads the feed of its nodes, each page from any of them."""

    async def run(self) -> None:
        """Read until it is cancelled."""
        while True:
            if self._random.random() < BEGINS_ANEW:
                self._cursor = self._random.choice(("", "now"))
            is_somewhere = self._cursor not in ("", "now")
            if is_somewhere and self._random.random() < FOLLOWS:
                done = await self._follow(self._any_node(), LONGEST_VISIT_S)
            else:
                done = await self._read_page() is not None
            await asyncio.sleep(self._random.uniform(0, LONGEST_PAUSE_S if done else LONGEST_BACKOFF_S))

    async def read_to_the_end(self) -> None:
        """Read until a page has nothing after it. Raises RuntimeError where that is not answered."""
        for _ in range(ATTEMPTS):
            page = await self._read_page()
            while page is not None and page.get("hasMore"):
                page = await self._read_page()
            if page is not None and not page.get("reset"):
                return
            await asyncio.sleep(LONGEST_BACKOFF_S)
        raise RuntimeError(f"{self.name} does not come to the end of its feed")

    async def _read_page(self) -> Any:
        """The next page, None where none was answered."""
        node, sent = self._any_node(), {"since": self._cursor} if self._cursor else {}
        query = {"collections": ",".join(FOLLOWED), "limit": self._random.choice(LIMITS), **sent}
        request = self._device.request(f"/changes?{urlencode(query)}")
        start, status, page, error = time.monotonic(), None, None, ""
        try:
            with closing(await self._connection(node)) as connection:
                reply = await connection.send(request)
                status, page = reply.status, reply.body
        except (NoReply, TimeoutError) as lost:
            error = repr(lost)
        read = self._operation("changes", node, sent, start)
        self._history.add(replace(read, status=status, answer=page, nonce=request.nonce, error=error))
        if status != 200 or page is None:
            return None
        self._cursor = page["cursor"]
        return page

    def _any_node(self) -> int:
        up = [at for at, node in enumerate(self._nodes) if node.address is not None]
        return self._random.choice(up or range(len(self._nodes)))
