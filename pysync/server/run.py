"""`pysync serve`: a process that listens, says so, and leaves in good order."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvloop
from aiohttp import web

from pysync import __version__
from pysync.config import Config
from pysync.server import logs
from pysync.server.app import App, create_app
from pysync.server.banner import banner
from pysync.server.connection import listen

log = logging.getLogger("pysync.server")


def serve(config: Config) -> int:
    """Serve until SIGTERM or SIGINT and return the exit status. A second signal ends the process at once.

    Raises ValueError for a configuration that cannot be served, OSError for an address that is taken,
    StoreUnavailable for a store that does not open.
    """
    if config.server.workers > 1:
        raise ValueError("server.workers: this version serves with one process; start several on one folder")
    logs.configure()
    return uvloop.run(_serve(config))


@asynccontextmanager
async def listening(
    app: App, host: str = "127.0.0.1", port: int = 0, drain_s: float = 10.0
) -> AsyncIterator[int]:
    """Listen for `app` and yield the port. On leaving, accept no more and finish what is under way, for at
    most `drain_s`."""
    # A handler that does not end has nearly all of that time, and then a moment to be cancelled.
    runner = web.ServerRunner(listen(app.handle), shutdown_timeout=drain_s * 0.9)
    await runner.setup()
    await web.TCPSite(runner, host, port, backlog=1024).start()
    try:
        yield runner.addresses[0][1]
    finally:
        app.drain()
        try:
            async with asyncio.timeout(drain_s):
                await runner.cleanup()
        except TimeoutError:
            log.warning("gave up on requests under way after %.1f s", drain_s)


async def _serve(config: Config) -> int:
    stop = asyncio.Event()
    _listen_for_signals(stop)
    server = config.server
    async with (
        await create_app(config) as app,
        listening(app, server.host, server.port, server.drain_timeout_ms / 1000) as port,
    ):
        print(banner(config, port), flush=True)
        log.info("serving, version %s, pid %s", __version__, os.getpid())
        await stop.wait()
        log.info("draining")
    log.info("stopped")
    return 0


def _listen_for_signals(stop: asyncio.Event) -> None:
    def on_signal() -> None:
        if stop.is_set():
            sys.stderr.write("stopped at once\n")
            os._exit(1)
        stop.set()

    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, on_signal)
