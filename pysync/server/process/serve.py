"""`pysync serve`: listens in one process or several, prints the banner, and shuts down gracefully."""

import asyncio
import ctypes
import gc
import importlib
import logging
import os
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import uvloop

from pysync import __version__
from pysync.concurrency import Job
from pysync.config import Config
from pysync.config.plugin_validation import projection_name
from pysync.config.schema import LOOPBACK, LOOPBACK_HOSTS
from pysync.errors import ReloadRefused
from pysync.server.api.examples import INDEX, file_names
from pysync.server.app import App, Worker, create_app
from pysync.server.http.connection import bound_sockets
from pysync.server.process import logs
from pysync.server.process.admin import AdminListener
from pysync.server.process.metrics import SupervisorCounters
from pysync.server.process.reload import (
    RELOAD_PATH,
    ReadConfig,
    Reloads,
    WorkerReloads,
    changed_members,
    read_again,
    reload_action,
)
from pysync.server.process.supervisor import Supervisor
from pysync.server.process.systemd import sd_notify
from pysync.server.process.watchdog import LoopWatchdog
from pysync.server.process.worker import WorkerContext
from pysync.sqlite.database_file import quick_check


@contextmanager
def reserve_address(host: str, port: int) -> Iterator[int]:
    """Reserve an address for the workers of this process and yield its port; port 0 selects a free one.

    Workers listen with SO_REUSEPORT. With that alone, a second service of the same user would silently
    receive half of the connections. So the address is first bound exclusively, and only then shared. Raises
    OSError if it is in use or unavailable.
    """
    with ExitStack() as kept:
        for sock in bound_sockets(host, port, shared=False):
            kept.enter_context(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            port = sock.getsockname()[1]
        yield port


MAX_ARENAS: Final = 1
"""Number of heaps of glibc. By default each thread has its own, up to eight per core, and each keeps the
memory that was freed. A buffer that one thread allocates and another frees is then reused as well."""
_M_ARENA_MAX: Final = -8
_BACK_ENDS: Final = {"file": "local", "s3": "s3", "redis": "redis", "rediss": "redis"}
"""Kinds of stores and coordinators, with the modules that are imported on first use."""

log = logging.getLogger("pysync.server")


def serve(config: Config, notice: str = "", read_config: ReadConfig | None = None) -> int:
    """Serve until SIGTERM or SIGINT and return the exit status. A second signal ends the process at once.
    `notice` is printed after the banner. SIGHUP has `read_config` read the configuration again; None: it
    comes from no file.

    Raises ValueError for a configuration that cannot be served and for a damaged database, OSError for an
    address that is in use, and StoreUnavailable for a store that cannot be opened.
    """
    logs.configure(level=config.server.log_level)
    check_databases(config)
    _raise_fd_limit()
    _limit_arenas()
    if config.server.workers > 1:
        return _serve_with_workers(config, notice, read_config)
    return uvloop.run(_serve_alone(config, notice, read_config))


def _limit_arenas() -> None:
    """Let the process keep less of the memory that it frees. Called before other threads start. Has no effect
    with a C library other than glibc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, MAX_ARENAS)


def check_databases(config: Config) -> None:
    """Raise ValueError if a database is damaged. Databases larger than the configured limit are not
    checked."""
    most = config.server.quick_check_max_bytes
    for _, path in config.database_paths:
        if path.exists() and path.stat().st_size <= most and (found := quick_check(path)) is not None:
            raise ValueError(found)


def _check_databases_exist(config: Config) -> None:
    """Raise ValueError if a database is gone: whoever opens it would begin an empty one."""
    for _, path in config.database_paths:
        if not path.exists():
            raise ValueError(
                f"{path} was deleted while the service ran: stop it, put the database back or restore "
                "it from a backup, and start it again"
            )


def _serve_with_workers(config: Config, notice: str, read_config: ReadConfig | None) -> int:
    server = config.server
    _preload(config)
    with (
        reserve_address(server.host, server.port) as port,
        _reserve_admin_port(config) as admin_port,
        TemporaryDirectory(prefix="pysync-") as counters_dir,
    ):
        has_served = False

        def work(context: WorkerContext) -> None:
            logs.configure(worker=context.number, level=config.server.log_level)
            if has_served:
                _check_databases_exist(config)
            uvloop.run(_serve_as_worker(config, port, admin_port, context, Path(counters_dir)))

        def report_ready() -> None:
            nonlocal has_served
            has_served = True
            _print_banner(config, port, admin_port, notice)
            sd_notify("READY=1")
            log.info("serving with %s workers, version %s, pid %s", server.workers, __version__, os.getpid())

        def use(other: Config) -> list[str]:
            nonlocal config
            changed, config = changed_members(config, other), other
            logs.configure(level=config.server.log_level)
            supervisor.drain_s = config.server.drain_timeout_ms / 1000
            return changed

        counters = SupervisorCounters(Path(counters_dir))
        supervisor = Supervisor(
            server.workers,
            work,
            server.drain_timeout_ms / 1000,
            on_replace=lambda reason: counters.count("pysync_worker_replacements", reason),
            read=partial(read_again, read_config),
            use=use,
        )
        status = supervisor.run(report_ready)
    log.info("stopped")
    return status


def _raise_fd_limit() -> None:
    """Raise the limit of open files to the maximum, because each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _preload(config: Config) -> None:
    """Import modules that every worker needs, so that workers share their memory and start sooner. Missing
    modules are ignored, because workers report them better."""
    for package, url in (("store", config.store.url), ("coordinator", config.effective_coordinator)):
        with suppress(ImportError, KeyError):
            importlib.import_module(f"pysync.{package}.{_BACK_ENDS[url.partition(':')[0]]}")


@asynccontextmanager
async def serve_on(
    app: App, host: str = "127.0.0.1", port: int = 0, *, shared: bool = False
) -> AsyncIterator[int]:
    """Listen for `app` and yield the port, on which other processes may listen too if `shared`. On exit, stop
    accepting connections and finish requests in progress, for at most its `drainTimeoutMs`."""
    http = app.make_http_server(host=host, port=port, shared=shared)
    await http.start()
    try:
        yield http.address[1]
    finally:
        app.drain()
        drain_s = app.current.config.server.drain_timeout_ms / 1000
        try:
            async with asyncio.timeout(drain_s):
                # A handler has nearly all of that time; the rest is for cancelling it.
                await http.close(drain_s * 0.9)
        except TimeoutError:
            log.warning("aborted unfinished requests after %.1f s", drain_s)


async def _serve_alone(config: Config, notice: str, read_config: ReadConfig | None) -> int:
    """Serve as the only process until SIGTERM or SIGINT."""
    stop, hung_up = asyncio.Event(), asyncio.Event()
    _listen_for_signals(stop, hung_up)
    admin = config.server.admin
    app = await create_app(config)
    reloads = Reloads(app, read_config)
    app.admin_pages.actions[RELOAD_PATH] = reload_action(reloads.reload)
    async with (
        _running(app, config, config.server.port, 0 if admin is None else admin.port) as ports,
        LoopWatchdog(),
    ):
        _print_banner(config, *ports, notice)
        sd_notify("READY=1")
        log.info("serving, version %s, pid %s", __version__, os.getpid())
        reloading = Job(partial(_reload_when, hung_up, reloads))
        reloading.start()
        await stop.wait()
        await reloading.close()
        log.info("draining")
    log.info("stopped")
    return 0


async def _reload_when(hung_up: asyncio.Event, reloads: Reloads) -> None:
    """Reload whenever the event is set, until cancelled."""
    while True:
        await hung_up.wait()
        hung_up.clear()
        with suppress(ReloadRefused):  # which is logged
            await reloads.reload()


async def _serve_as_worker(
    config: Config, port: int, admin_port: int, context: WorkerContext, counters_dir: Path
) -> None:
    """Serve as one of several workers until SIGTERM, or until the parent ends."""
    loop = asyncio.get_running_loop()
    stop, orphaned = asyncio.Event(), asyncio.Event()
    # Ending the process group sends SIGTERM twice: directly and through the parent.
    loop.add_signal_handler(signal.SIGTERM, stop.set)

    def on_message() -> None:
        try:
            message = context.channel.recv()
        except (EOFError, OSError):
            loop.remove_reader(context.parent_fd)
            orphaned.set()
            stop.set()
        else:  # the parent sends none to a worker that is not ready
            reloads.received(message)

    loop.add_reader(context.parent_fd, on_message)
    app = await create_app(config, worker=Worker(context.number, counters_dir))
    reloads = WorkerReloads(Reloads(app, None, context.number), context.channel)
    app.admin_pages.actions[RELOAD_PATH] = reload_action(reloads.reload)
    async with _running(app, config, port, admin_port, shared=True):
        log.info("serving, pid %s", os.getpid())
        context.ready()
        _send_heartbeats(loop, context)
        await stop.wait()
        log.info("draining: the parent is gone" if orphaned.is_set() else "draining")
    if orphaned.is_set():
        shutil.rmtree(counters_dir, ignore_errors=True)
    log.info("stopped")


def _send_heartbeats(loop: asyncio.AbstractEventLoop, context: WorkerContext) -> None:
    """Send heartbeats to the parent as long as the event loop runs."""
    context.send_heartbeat()
    loop.call_later(context.heartbeat_s, _send_heartbeats, loop, context)


@asynccontextmanager
async def _running(
    app: App, config: Config, port: int, admin_port: int, *, shared: bool = False
) -> AsyncIterator[tuple[int, int]]:
    """Run the service, and yield the port on which it listens, and that for operators (0 if there is none).
    In the end, close it."""
    async with (
        app,
        _serve_admin(config, app, admin_port, shared=shared) as admin_listening,
        serve_on(app, config.server.host, port, shared=shared) as listening,
    ):
        gc.freeze()  # exempt from garbage collection, which would pause the loop for 26 ms now and then
        yield listening, admin_listening


@asynccontextmanager
async def _serve_admin(config: Config, app: App, port: int, *, shared: bool) -> AsyncIterator[int]:
    """Run the operators' listener, if there is one, and yield its port, else 0."""
    admin = config.server.admin
    if admin is None:
        yield 0
        return
    with _naming_admin():
        listener = AdminListener(app.admin_pages, admin.host, port, shared=shared)
    try:
        yield listener.port
    finally:
        await listener.close()


@contextmanager
def _reserve_admin_port(config: Config) -> Iterator[int]:
    """Reserve the address of the operators' listener for the workers, if there is one, and yield its port,
    else 0."""
    admin = config.server.admin
    if admin is None:
        yield 0
        return
    with ExitStack() as kept:
        with _naming_admin():
            port = kept.enter_context(reserve_address(admin.host, admin.port))
        yield port


@contextmanager
def _naming_admin() -> Iterator[None]:
    """Raise an OSError as a ValueError that names the member."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"server.admin: {error.strerror or error}") from error


def _listen_for_signals(stop: asyncio.Event, hung_up: asyncio.Event) -> None:
    def on_signal() -> None:
        if stop.is_set():
            sys.stderr.write("stopped at once\n")
            os._exit(1)
        stop.set()

    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, on_signal)
    loop.add_signal_handler(signal.SIGHUP, hung_up.set)


_DOCUMENT: Final = '{"data":{"text":"hello"},"baseHash":null}'


def banner(config: Config, port: int, admin_port: int = 0) -> str:
    """Return the banner of a service that listens on `port`, and for operators on `admin_port`."""
    address = origin(config.server.host, port)
    base = address + config.server.mount_path
    admin = config.server.admin
    operators = address if admin is None else origin(admin.host, admin_port)
    facts = {
        "store": config.store.url,
        "coordinator": config.redacted_coordinator,
        "workers": str(config.server.workers) if config.server.workers > 1 else "",
        "plugins": ", ".join(config.plugins),
        "projections": ", ".join(map(projection_name, config.projections)),
        "events": ", ".join(events.collection for events in config.events),
        "health": f"{base}/health",
        "metrics": f"{operators}/metrics",
        "operators": "" if admin is None else f"{operators}/admin",
    }
    lines = [
        f"pysync {__version__} at {base}",
        *(f"  {name:<11}  {value}" for name, value in facts.items() if value),
        "",
        *_next_steps(config, base),
    ]
    pages = _pages(config)
    if pages:
        lines += ["", "Open in two windows of a browser:"]
        lines += [f"  {base}/examples/{name}" for name in pages]
    return "\n".join(lines) + "\n"


def _print_banner(config: Config, port: int, admin_port: int, notice: str) -> None:
    print(*filter(None, (banner(config, port, admin_port), notice)), sep="\n", flush=True)


def origin(host: str, port: int) -> str:
    """Return the URL of a host and port, with brackets around an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _next_steps(config: Config, base: str) -> list[str]:
    """Return a request to try, or without a collection the command that prints a configuration with some."""
    if config.collections or config.namespaces:
        return [
            "`pysync check FILE` prints the routes of a configuration. Try it from another terminal:",
            f"  curl -s {_request(config, base)}",
        ]
    return [
        "No collection is configured, so nothing is served. Begin with a configuration that is open to this",
        "machine (or `pysync init private`, `pysync init rooms`), and start `pysync serve` again beside it:",
        "  pysync init > pysync.yaml",
    ]


def _request(config: Config, base: str) -> str:
    """Return the curl arguments that push a new document to the first collection that is open to anyone. If
    there is none, or if the server seems to be for others than those at this machine, they query its health.
    """
    server = config.server
    has_own_name = not LOOPBACK_HOSTS.issuperset(server.public_hosts)
    is_for_others = server.trusted_proxy_hops or has_own_name or server.admin is not None
    batched = {events.collection for events in config.events}
    for one in () if is_for_others or server.host not in LOOPBACK else config.collections:
        is_open = "public" in one.write_roles and not (one.require_auth or one.pull_only or one.root_only)
        takes_any = one.object_schema is None and not one.enforce_sealed and one.name not in batched
        is_plain = one.append_only is None and not one.key_template.segments[-1].startswith("_")
        if is_open and takes_any and one.accepts_json and is_plain:
            key = one.key_template.fill(dict.fromkeys(one.path_template.params, f"hello-{int(time.time())}"))
            return f"{base}/push/{key} -H 'Content-Type: application/json' -d '{_DOCUMENT}'"
    return f"{base}/health"


def _pages(config: Config) -> list[str]:
    """Return the example pages, except the index."""
    names = [] if config.server.examples is None else file_names(config.server.examples)
    return [name for name in names if name.endswith(".html") and name != INDEX]
