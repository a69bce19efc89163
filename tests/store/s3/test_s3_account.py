"""Where requests for a bucket go: its address in every style, and the region."""

import itertools
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from components import S3Server
from support.s3_stores import new_prefix, opened, without_credentials

from pysync.config import StoreConfig
from pysync.store import NOT_MODIFIED
from pysync.store.s3.credentials import S3Client


async def base(url: str, **members: Any) -> str:
    config = StoreConfig(url=url, access_key_id="a", secret_access_key="b", **members)
    account = await S3Client.open(config, config.s3_location())
    await account.close()
    return account.base


@pytest.mark.parametrize(
    ("bucket", "members", "expected"),
    [
        # The address without a region knows the newer regions not at all, and a new bucket a day late.
        ("b-c", {"region": "eu-south-2"}, "https://b-c.s3.eu-south-2.amazonaws.com"),
        ("b-c", {"region": "us-east-1"}, "https://b-c.s3.amazonaws.com"),
        ("b-c", {"region": "cn-north-1"}, "https://b-c.s3.cn-north-1.amazonaws.com.cn"),
        (
            "b-c",
            {"region": "eu-south-2", "force_path_style": True},
            "https://s3.eu-south-2.amazonaws.com/b-c",
        ),
        ("b-c", {"endpoint": "https://s3.example"}, "https://b-c.s3.example"),
        ("b-c", {"endpoint": "https://s3.example:8443"}, "https://b-c.s3.example:8443"),
        ("b-c", {"endpoint": "https://s3.example", "force_path_style": True}, "https://s3.example/b-c"),
        ("b.c", {"endpoint": "https://s3.example"}, "https://s3.example/b.c"),
        ("b-c", {"endpoint": "http://10.0.0.5:7480"}, "http://10.0.0.5:7480/b-c"),
        ("b-c", {"endpoint": "http://[::1]:7480"}, "http://[::1]:7480/b-c"),
    ],
)
async def test_a_bucket_has_one_address(bucket: str, members: dict[str, Any], expected: str) -> None:
    assert await base(f"s3://{bucket}/prefix", **members) == expected


async def test_the_region_is_the_environments_where_none_is_configured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_credentials(monkeypatch, tmp_path)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-south-2")
    assert await base("s3://b-c") == "https://b-c.s3.eu-south-2.amazonaws.com"
    assert await base("s3://b-c", region="eu-west-1") == "https://b-c.s3.eu-west-1.amazonaws.com"


async def test_the_credentials_of_a_role_are_renewed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_credentials(monkeypatch, tmp_path)
    key_numbers = itertools.count(1)

    async def lend(request: web.Request) -> web.Response:
        # So near its end that each use asks for newer ones.
        ends = datetime.now(UTC) + timedelta(minutes=1)
        lent = {"AccessKeyId": f"key-{next(key_numbers)}", "SecretAccessKey": "hush", "Token": "token"}
        return web.json_response({**lent, "Expiration": ends.strftime("%Y-%m-%dT%H:%M:%SZ")})

    app = web.Application()
    app.router.add_get("/role", lend)
    async with TestServer(app) as server:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", str(server.make_url("/role")))
        config = StoreConfig(url="s3://bucket")
        account = await S3Client.open(config, config.s3_location())
        keys = [(await account.signer()).credentials.access_key for _ in range(2)]
        await account.close()
    assert keys[0] != keys[1]
    assert all(key.startswith("key-") for key in keys)


async def test_a_bucket_with_a_host_of_its_own_is_served(
    moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved = socket.getaddrinfo

    def at_home(host: Any, *rest: Any, **options: Any) -> Any:
        return resolved("127.0.0.1" if str(host).endswith(".localhost") else host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", at_home)
    endpoint = moto.endpoint.replace("127.0.0.1", "localhost")
    prefix = new_prefix()
    async with opened(moto, prefix, endpoint, force_path_style=False) as store:
        assert store.bucket.url.startswith(f"http://{moto.bucket}.localhost:")
        etag = await store.put("a/é", b'{"data":1}')
        assert await store.get("a/é", etag) is NOT_MODIFIED
        assert await store.list("a", None, 10) == ["é"]
    async with opened(moto, prefix) as neighbour:
        assert await neighbour.list("a", None, 10) == ["é"]
