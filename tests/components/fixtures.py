"""The components as pytest fixtures: started when a test first asks, ended with the session or the test.

A test whose component is not installed is not run, and a section at the end of pytest's output names it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

import components

NOT_RUN: Final = "component missing: "

StartRedis = Callable[..., components.RedisServer]
StartCaddy = Callable[[str, int], components.Caddy]
StartNginx = Callable[[str, int], components.Nginx]


@pytest.fixture(scope="session")
def radosgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[components.S3Server]:
    """Ceph's S3 gateway. Tests share its bucket, each below a prefix of its own."""
    with or_not_run(), components.radosgw(tmp_path_factory.mktemp("radosgw")) as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[components.S3Server]:
    """moto's S3. Tests share its bucket, each below a prefix of its own."""
    with or_not_run(), components.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[components.RedisServer]:
    """A Redis in memory. Tests share it, so none of them stops it or relies on it being empty."""
    with or_not_run(), components.redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def start_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartRedis]:
    """Starts Redis servers for one test, each empty: `start_redis("--appendonly", "yes")`."""
    with ExitStack() as stack:

        def start(*options: str) -> components.RedisServer:
            with or_not_run():
                return stack.enter_context(
                    components.redis_server(tmp_path_factory.mktemp("redis"), *options)
                )

        yield start


@pytest.fixture
def redis(start_redis: StartRedis) -> components.RedisServer:
    """A Redis in memory for one test, which may stop it."""
    return start_redis()


@pytest.fixture
def start_nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartNginx]:
    """Starts nginx for one test: `start_nginx(http, port)` as `components.nginx` has it."""
    with ExitStack() as stack:

        def start(http: str, port: int) -> components.Nginx:
            with or_not_run():
                return stack.enter_context(components.nginx(tmp_path_factory.mktemp("nginx"), http, port))

        yield start


@pytest.fixture
def start_caddy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartCaddy]:
    """Starts Caddy for one test: `start_caddy(caddyfile, port)` as `components.caddy` has it."""
    with ExitStack() as stack:

        def start(caddyfile: str, port: int) -> components.Caddy:
            with or_not_run():
                folder = tmp_path_factory.mktemp("caddy")
                return stack.enter_context(components.caddy(folder, caddyfile, port))

        yield start


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The WebSocket of a Chromium. Tests share it, each with windows of its own (`browser.py`)."""
    with or_not_run(), components.chromium(tmp_path_factory.mktemp("chromium")) as url:
        yield url


@pytest.fixture(scope="session")
def systemd_analyze() -> str:
    """The path of systemd-analyze."""
    with or_not_run():
        return components.program("systemd-analyze")


@pytest.fixture(scope="session")
def promtool() -> str:
    """The path of promtool, which checks rules of Prometheus."""
    with or_not_run():
        return components.program("promtool")


@pytest.fixture(scope="session")
def starfish_python() -> Path:
    """The virtual environment of the published Python clients."""
    with or_not_run():
        return components.in_target("starfish-python") / "python"


@pytest.fixture(scope="session")
def starfish_npm() -> Path:
    """The folder `node_modules` with the published npm clients."""
    with or_not_run():
        return components.in_target("starfish-npm") / "node_modules"


@pytest.fixture(scope="session")
def typescript() -> Path:
    """The path of `tsc`, the compiler of TypeScript."""
    with or_not_run():
        return components.in_target("typescript") / "node_modules/.bin/tsc"


@contextmanager
def or_not_run() -> Iterator[None]:
    """A test that finds a component missing within is not run."""
    try:
        yield
    except components.Missing as missing:
        pytest.skip(NOT_RUN + missing.component)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests that were not run, each with what it lacks."""
    missing = {}
    for report in terminalreporter.getreports("skipped"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        _, found, component = reason.partition(NOT_RUN)
        if found:
            missing[report.nodeid] = component
    if missing:
        terminalreporter.section(f"NOT RUN: {len(missing)} tests lack a component", red=True, bold=True)
        for nodeid, component in missing.items():
            terminalreporter.write_line(f"{nodeid}: {component} is not installed")
        terminalreporter.write_line(
            "tests/components/install installs them on Debian (see docs/explanation/architecture.md)."
        )
