"""`pysync serve`: a process that listens, says so, and leaves in good order."""

import asyncio
import logging
import os
import signal
import sys
import time

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


async def _serve(config: Config) -> int:
    stop = asyncio.Event()
    _listen_for_signals(stop)
    async with await create_app(config) as app:
        listener = listen(app.handle)
        drain_s = config.server.drain_timeout_ms / 1000
        # A handler that does not end is given the whole time, and then a moment to be cancelled.
        runner = web.ServerRunner(listener, shutdown_timeout=max(0.1, drain_s - 1.0))
        await runner.setup()
        site = web.TCPSite(runner, config.server.host, config.server.port, backlog=1024)
        await site.start()
        print(banner(config, runner.addresses[0][1]), flush=True)
        log.info("serving, version %s, pid %s", __version__, os.getpid())
        await stop.wait()
        await _drain(app, runner, drain_s)
    log.info("stopped")
    return 0


async def _drain(app: App, runner: web.ServerRunner, drain_s: float) -> None:
    """Stop accepting, finish what is under way, within `drain_s`."""
    log.info("draining")
    app.ops.draining = True
    started = time.monotonic()
    try:
        async with asyncio.timeout(drain_s):
            await runner.cleanup()
    except TimeoutError:
        log.warning("gave up on requests under way after %.1f s", time.monotonic() - started)


def _listen_for_signals(stop: asyncio.Event) -> None:
    def on_signal() -> None:
        if stop.is_set():
            sys.stderr.write("stopped at once\n")
            os._exit(1)
        stop.set()

    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, on_signal)
