"""A service with collections of Parquet files and of events, whose files DuckDB reads where they lie."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from components import S3Server
from support import duckdb_connection as duck
from support.clients import Browser, Start
from support.collections import collection
from support.configurations import ROOT
from support.s3_stores import new_prefix

from pysync.config import Config, StoreConfig, parse
from pysync.parquet import (
    PARQUET_MIME_TYPES,
    create_parquet_collection,
    create_sealed_parquet_collection,
    duckdb_read_parquet_sql,
    resolve_document_key,
)
from pysync.plugins.events import create_events_plugin
from pysync.server.app import create_app
from pysync.store import open_store

REPORT = "reports/{team}/{id}"
EVENTS = "events/{app}/{batchId}"
SERVICE: dict[str, Any] = {
    "configEndpoint": {"auth": "public"},
    "collections": [
        {"preset": "parquet", "name": "reports", "storagePath": REPORT, "write": "public"},
        {"preset": "sealedParquet", "name": "vault", "storagePath": "vault/{id}", "read": "public"},
        collection("events", EVENTS, listable=True),
    ],
    "events": [{"collection": "events", "storagePath": EVENTS}],
}


def parquet(*rows: int) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"n": list(rows)}), sink)
    return bytes(sink.getvalue())


async def push(browser: Browser, key: str, body: bytes, media_type: str) -> int:
    return (await browser.request("POST", f"/push/{key}", body, {"Content-Type": media_type})).status


@pytest.fixture(params=["file", "moto", "radosgw"])
def store_config(request: pytest.FixtureRequest, tmp_path: Path) -> StoreConfig:
    if request.param == "file":
        return StoreConfig(url=f"file:{tmp_path}/data")
    server: S3Server = request.getfixturevalue(request.param)
    return server.store(new_prefix())


async def test_pushed_events_are_queried_in_the_store(
    start: Start, session: aiohttp.ClientSession, store_config: StoreConfig, tmp_path: Path
) -> None:
    browser = Browser(await start(SERVICE, await open_store(store_config)), session)
    key = resolve_document_key(REPORT, {"team": "sales", "id": "1.parquet"})
    assert await push(browser, key, parquet(1, 2), PARQUET_MIME_TYPES[0]) == 200
    assert await push(browser, "reports/sales/2.parquet", parquet(3), PARQUET_MIME_TYPES[2]) == 200
    assert await push(browser, "reports/other/3.parquet", parquet(4), PARQUET_MIME_TYPES[1]) == 200
    for names in (["a", "b'c"], ["d"]):
        batch = {"events": [{"event": name, "ts": 1} for name in names]}
        assert (await browser.push("events/app/any", batch)).status == 200

    def queried() -> list[Any]:
        with duck.connected(tmp_path / "extensions") as connection:
            return [
                sorted(connection.sql(query.sql).project(column).fetchall())
                for query, column in (
                    (duckdb_read_parquet_sql(store_config, key), "n"),
                    (duckdb_read_parquet_sql(store_config, "reports/sales", glob=True), "n"),
                    (duckdb_read_parquet_sql(store_config, "events/app", glob=True), "event, ts"),
                )
            ]

    assert await asyncio.to_thread(queried) == [
        [(1,), (2,)],
        [(1,), (2,), (3,)],
        [("a", "1"), ("b'c", "1"), ("d", "1")],
    ]


async def test_a_preset_is_served_as_what_it_stands_for(start: Start, session: aiohttp.ClientSession) -> None:
    browser = Browser(await start(SERVICE), session)
    body = parquet(1)
    for at, media_type in enumerate(PARQUET_MIME_TYPES):
        assert await push(browser, f"reports/a/{at}", body, media_type) == 200
        pulled = await browser.pull(f"reports/a/{at}")
        assert (pulled.body, pulled.headers["Content-Type"]) == (body, PARQUET_MIME_TYPES[0])
        known = {"If-None-Match": pulled.headers["ETag"]}
        assert (await browser.pull(f"reports/a/{at}", known)).status == 304
    assert (await browser.request("GET", "/list/reports/a")).json["items"] == ["0", "1", "2"]
    assert await push(browser, "reports/a/3", body, "text/html") == 415
    assert await push(browser, "reports/a/3", body, "application/json") == 415
    assert await push(browser, "vault/1", body, PARQUET_MIME_TYPES[2]) == 401
    listed = (await browser.request("GET", "/config")).json["collections"]
    assert listed[1] == {
        "name": "vault",
        "maxBodyBytes": 1_048_576,
        "encryption": "none",
        "allowedMimeTypes": ["application/octet-stream"],
    }


async def test_a_service_made_in_python_is_that_of_the_file(
    start: Start, session: aiohttp.ClientSession
) -> None:
    plain = parse({"collections": [SERVICE["collections"][2]]}).collections
    reports = create_parquet_collection(name="reports", storage_path=REPORT, write="public")
    vault = create_sealed_parquet_collection(name="vault", storage_path="vault/{id}", read="public")
    memory = StoreConfig(url="memory:")
    made = Config(store=memory, collections=(reports, vault, *plain))
    assert made.collections == parse(SERVICE).collections
    plugin = create_events_plugin("events", EVENTS)
    async with await create_app(made, await open_store(memory), plugins=[plugin]):
        pass


@pytest.mark.process
def test_service_without_parquet_does_not_load_it() -> None:
    """It would cost each process of a service its time to start, and its memory."""
    command = (
        "import sys, pysync.parquet, pysync.server.process.serve\n"
        "sys.exit({'pyarrow', 'duckdb'} & {*sys.modules} or 0)"
    )
    subprocess.run([sys.executable, "-c", command], check=True, cwd=ROOT)
