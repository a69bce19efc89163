"""Pushes that wait for projections: the response is sent when the lists contain the write (`"wait": true` of
a projection).
"""

import asyncio
from collections.abc import Iterable
from typing import Final

from aiohttp import web

from pysync.config import Collection, Config
from pysync.config.key_templates import KeyTemplate
from pysync.engine.outbox import Outbox
from pysync.errors import Unavailable
from pysync.plugins.projection import ProjectionsPlugin, projections_plugins_in
from pysync.plugins.projection.targets import KeyResolver
from pysync.server.responses import Response
from pysync.server.router import Handler, Match

MAX_WAIT_S: Final = 5.0
"""Longest time that a response waits for lists, in seconds."""
_NOT_PROJECTED: Final = b',"projected":false}'


class ProjectionWaiter:
    """Delays the responses to pushes until lists are updated; `plugins` contain the projections that maintain
    them."""

    def __init__(self, config: Config, plugins: Iterable[object], outbox: Outbox) -> None:
        self._outbox = outbox
        self._keys = keys = KeyResolver(config)
        self._awaited: list[tuple[KeyTemplate, ProjectionsPlugin]] = []
        for plugin in projections_plugins_in(plugins):
            for projection in plugin.projections:
                for _, collection in keys.sources(projection) if projection.wait else ():
                    self._awaited.append((keys.stored_at(collection)[0], plugin))

    def wrap_push(self, collection: Collection, push: Handler) -> Handler:
        """Return `push`, the handler of pushes to a collection, wrapped so that its responses wait if a
        projection with `wait` reads what is written there."""
        path = self._keys.stored_at(collection)[0]
        waited_plugins = list(
            dict.fromkeys(plugin for source, plugin in self._awaited if path.overlaps(source))
        )
        if not waited_plugins:
            return push

        async def push_and_wait(request: web.BaseRequest, match: Match) -> Response:
            response = await push(request, match)
            if response.status == 200 and not await self._wait_until_folded(waited_plugins):
                response.content = response.content[:-1] + _NOT_PROJECTED
            return response

        return push_and_wait

    async def _wait_until_folded(self, plugins: list[ProjectionsPlugin]) -> bool:
        """Wait until the lists contain everything written until now. Returns False if that takes longer than
        `MAX_WAIT_S`, or the change log is unavailable."""
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                last_id = await self._outbox.log.last_id()
                for plugin in plugins:
                    await plugin.wait_until_folded(last_id)
        except (TimeoutError, Unavailable):
            return False
        return self._outbox.is_flushed
