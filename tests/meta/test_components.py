"""The servers that tests run against: they start, fail and end as asked, and nobody misses one unheard."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier
from typing import Any
from urllib.request import urlopen

import components
import pytest
from aiobotocore.session import get_session
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.session import Session
from components.fixtures import StartNginx, StartRedis, or_not_run
from support.s3_fault_proxy import FaultProxy

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["radosgw", "moto"])
def s3(request: pytest.FixtureRequest) -> components.S3Server:
    server: components.S3Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def make_client(s3: components.S3Server) -> Iterator[Callable[[], Any]]:
    """Makes clients of the server, whom nothing is sent a second time for."""
    with ExitStack() as stack:

        def make() -> Any:
            client = Session().create_client(
                "s3",
                endpoint_url=s3.endpoint,
                region_name=s3.region,
                aws_access_key_id=s3.access_key_id,
                aws_secret_access_key=s3.secret_access_key,
                config=Config(retries={"total_max_attempts": 1}),
            )
            stack.callback(client.close)
            return client

        yield make


def test_an_s3_server_has_a_bucket_and_keeps_conditions(
    s3: components.S3Server, make_client: Callable[[], Any]
) -> None:
    client = make_client()
    client.put_object(Bucket=s3.bucket, Key="a/b", Body=b"one", IfNoneMatch="*")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket=s3.bucket, Key="a/b", Body=b"two", IfNoneMatch="*")
    assert client.get_object(Bucket=s3.bucket, Key="a/b")["Body"].read() == b"one"


@pytest.mark.slow
def test_of_writers_at_once_one_wins(s3: components.S3Server, make_client: Callable[[], Any]) -> None:
    clients = [make_client() for _ in range(8)]
    barrier = Barrier(len(clients))

    def create(client: Any, key: str) -> int:
        barrier.wait()
        try:
            client.put_object(Bucket=s3.bucket, Key=key, Body=os.urandom(8), IfNoneMatch="*")
        except ClientError:
            return 0
        return 1

    with ThreadPoolExecutor(len(clients)) as threads:
        for round_ in range(20):
            keys = [f"race/{round_}"] * len(clients)
            assert sum(threads.map(create, clients, keys)) == 1


def test_a_store_is_configured_for_the_server_or_for_a_proxy_before_it(s3: components.S3Server) -> None:
    direct, through = s3.store("a/b"), s3.store("", "http://127.0.0.1:1")
    assert (direct.url, direct.endpoint) == ("s3://pysync/a/b", s3.endpoint)
    assert (through.url, through.endpoint) == ("s3://pysync", "http://127.0.0.1:1")


async def test_signatures_hold_through_a_proxy(radosgw: components.S3Server) -> None:
    async with FaultProxy(radosgw.endpoint) as proxy:
        credentials = {
            "aws_access_key_id": radosgw.access_key_id,
            "aws_secret_access_key": radosgw.secret_access_key,
        }
        client = get_session().create_client(
            "s3", endpoint_url=proxy.url, region_name=radosgw.region, **credentials
        )
        async with client as s3:
            await s3.put_object(Bucket=radosgw.bucket, Key="é /+%/b", Body=b"one")
            found = await s3.get_object(Bucket=radosgw.bucket, Key="é /+%/b")
            assert await found["Body"].read() == b"one"
            listed = await s3.list_objects_v2(Bucket=radosgw.bucket, Prefix="é /")
            assert [listed["Key"] for listed in listed["Contents"]] == ["é /+%/b"]
        assert proxy.calls == {"PUT": 1, "GET": 1, "LIST": 1}


def ping(server: components.RedisServer) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"PING\r\n")
        return connection.recv(16)


def test_redis_fails_and_comes_back_at_its_address(start_redis: StartRedis) -> None:
    server = start_redis()
    other = start_redis()
    for end in (server.stop, server.kill):
        assert ping(server) == b"+PONG\r\n"
        end()
        with pytest.raises(ConnectionRefusedError):
            ping(server)
        server.start()
    server.pause()
    with socket.create_connection(("127.0.0.1", server.port), timeout=0.05) as connection:
        connection.sendall(b"PING\r\n")
        with pytest.raises(TimeoutError):
            connection.recv(16)
    assert ping(other) == b"+PONG\r\n"
    server.resume()
    assert ping(server) == b"+PONG\r\n"


@pytest.mark.component
def test_a_paused_redis_ends_with_its_test(tmp_path: Path) -> None:
    with or_not_run(), components.redis_server(tmp_path) as server:
        server.pause()
    with pytest.raises(ConnectionRefusedError):
        ping(server)


def test_nginx_answers_as_it_is_configured(start_nginx: StartNginx) -> None:
    port = components.free_port()
    server = start_nginx(f"server {{ listen 127.0.0.1:{port}; return 200 hello; }}", port)
    with urlopen(server.url) as answer:
        assert answer.read() == b"hello"
    server.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()


def test_component_that_does_not_start_says_why(start_nginx: StartNginx) -> None:
    with pytest.raises(RuntimeError, match="unknown directive"):
        start_nginx("nonsense on;", components.free_port())


TESTS = """
def test_without(): pass
def test_shared(redis_server): pass
def test_own(start_redis): start_redis()
def test_another_way(start_redis): start_redis("--appendonly", "yes")
"""


@pytest.mark.process
def test_tests_without_their_component_are_named_and_the_others_pass(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "components.fixtures",
        "--basetemp=base",
        "test_some.py",
    ]
    environment = {
        **os.environ,
        "PATH": str(tmp_path),
        "PYTHONPATH": str(ROOT / "tests"),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    passed, _, listed = ended.stdout.partition("NOT RUN: 3 tests lack a component")
    assert "1 passed" in passed + listed
    for name in ("shared", "own", "another_way"):
        assert f"test_some.py::test_{name}: redis-server is not installed" in listed
    assert "test_without" not in listed


@pytest.mark.process
def test_the_installer_says_what_it_cannot_install_and_goes_on(tmp_path: Path) -> None:
    ended = subprocess.run(
        ["/bin/bash", ROOT / "tests/components/install"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "not installed: redis-server, so its tests will not run (there is no apt-get)" in ended.stdout
