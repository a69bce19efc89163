"""The SQL that reads a store's Parquet files: in a real DuckDB, of a folder and of buckets."""

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from components import S3Server
from contracts.files import chunks_of
from support import duckdb_connection as duck
from support.configurations import ROOT
from support.s3_stores import new_prefix, opened, without_credentials

from pysync.config import StoreConfig
from pysync.parquet import PARQUET_MIME_TYPES, ReadParquet, duckdb_read_parquet_sql
from pysync.store import open_store

AWS = StoreConfig(url="s3://lake/events", access_key_id="AKIA", secret_access_key="hush'hush")
HOSTILE = ["a'b", "'); DROP TABLE t; --", 'a"b', "*", "**", "[ab]", "[", "a]", "{a}", "%2F", "a=b", "~", "é"]
"""What may stand in the name of a folder, and mean something else somewhere."""


def parquet(*rows: str) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"name": list(rows)}), file)
    return file.getvalue()


async def write(store: Any, key: str, *rows: str) -> None:
    await store.write(key, chunks_of(parquet(*rows)), PARQUET_MIME_TYPES[0])


@pytest.fixture
def duckdb_(tmp_path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    with duck.connected(tmp_path / "extensions") as connection:
        yield connection


def names(connection: duckdb.DuckDBPyConnection, query: ReadParquet) -> list[str]:
    return sorted(name for (name, *_) in connection.execute(query.sql).fetchall())


# --- in a folder -----------------------------------------------------------------------------------------


async def test_file_of_a_folder_is_read_with_its_neighbours(
    tmp_path: Path, duckdb_: duckdb.DuckDBPyConnection
) -> None:
    url = f"file:{tmp_path}/data"
    store = await open_store(StoreConfig(url=url))
    await write(store, "events/app/1.parquet", "a", "b")
    await write(store, "events/app/2.parquet", "c")
    await write(store, "events/other/3.parquet", "d")
    one = duckdb_read_parquet_sql(url, "events/app/1.parquet")
    assert one.uri == f"{tmp_path}/data/files/events/app/1.parquet"
    assert names(duckdb_, one) == ["a", "b"]
    assert names(duckdb_, duckdb_read_parquet_sql(url, "events/app", glob=True)) == ["a", "b", "c"]
    assert duckdb_read_parquet_sql(url, "events/app/", glob=True).uri.endswith("/events/app/*.parquet")
    everywhere = f"SELECT name FROM '{tmp_path}/data/files/**/*.parquet'"
    assert len(duckdb_.execute(everywhere).fetchall()) == 4, "a glob over the folder of files finds all"
    await store.close()


async def test_the_top_of_a_store_is_a_folder_too(
    tmp_path: Path, duckdb_: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = await open_store(StoreConfig(url="file:data"))
    await write(store, "1.parquet", "a")
    query = duckdb_read_parquet_sql("file:data", "", glob=True)
    await store.close()
    monkeypatch.chdir("/")
    assert query.uri == f"{tmp_path}/data/files/*.parquet", "wherever DuckDB runs"
    assert names(duckdb_, query) == ["a"]


@pytest.mark.parametrize("folder", [*HOSTILE, "a?b", "a b", "a\nb", ";"])
def test_the_name_of_a_folder_means_nothing_else(
    tmp_path: Path, duckdb_: duckdb.DuckDBPyConnection, folder: str
) -> None:
    duckdb_.execute("CREATE TABLE t(x INTEGER)")
    for name in (folder, "beside"):
        (tmp_path / name / "files/x").mkdir(parents=True)
        (tmp_path / name / "files/x/1.parquet").write_bytes(parquet(name))
    for key, glob in (("x/1.parquet", False), ("x", True)):
        query = duckdb_read_parquet_sql(f"file:{tmp_path}/{folder}", key, glob=glob)
        assert names(duckdb_, query) == [folder]
    assert duckdb_.execute("SELECT count(*) FROM t").fetchall() == [(0,)]


async def test_examples_of_the_documentation_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/how-to/query-parquet-files.md").read_text()
    monkeypatch.chdir(tmp_path)
    store = await open_store(StoreConfig(url="file:data"))
    await write(store, "reports/sales/2026-11.parquet", "a")
    await store.close()
    made: dict[str, Any] = {}
    exec(page.split('```python title="query.py"')[1].split("```")[0], made)
    assert capsys.readouterr().out.splitlines() == ["[('a',)]"] * 2
    assert made["all_of_sales"].uri == f"{tmp_path}/data/files/reports/sales/*.parquet"


# --- in a bucket -----------------------------------------------------------------------------------------


@pytest.fixture(params=["moto", "radosgw"])
def server(request: pytest.FixtureRequest) -> S3Server:
    """moto lets anybody in, radosgw checks signatures."""
    found: S3Server = request.getfixturevalue(request.param)
    return found


async def test_file_of_a_bucket_is_read_with_its_neighbours(
    server: S3Server, duckdb_: duckdb.DuckDBPyConnection
) -> None:
    prefix = new_prefix()
    async with opened(server, prefix) as store:
        await write(store, "events/app/1.parquet", "a", "b")
        await write(store, "events/app/2.parquet", "c")
        await write(store, "events/other/3.parquet", "d")
    config = server.store(prefix)
    one = duckdb_read_parquet_sql(config, "events/app/1.parquet")
    assert one.uri == f"s3://{server.bucket}/{prefix}/events/app/1.parquet"
    assert names(duckdb_, one) == ["a", "b"]
    assert names(duckdb_, duckdb_read_parquet_sql(config, "events/app", glob=True)) == ["a", "b", "c"]
    everywhere = f"SELECT name FROM 's3://{server.bucket}/{prefix}/**/*.parquet'"
    assert len(duckdb_.execute(everywhere).fetchall()) == 4


@pytest.mark.parametrize("prefix", ["*", "**", "[ab]", "[", "a'b\"]{x}~é%2F=+", "');DROP/**/TABLE/**/t;--"])
async def test_the_prefix_of_a_bucket_means_nothing_else(
    moto: S3Server, duckdb_: duckdb.DuckDBPyConnection, prefix: str
) -> None:
    duckdb_.execute("CREATE TABLE t(x INTEGER)")
    above = new_prefix()
    for name in (prefix, "beside"):
        async with opened(moto, f"{above}/{name}") as store:
            await write(store, "x/1.parquet", name)
    config = moto.store(f"{above}/{prefix}")
    assert names(duckdb_, duckdb_read_parquet_sql(config, "x/1.parquet")) == [prefix]
    assert names(duckdb_, duckdb_read_parquet_sql(config, "x", glob=True)) == [prefix]
    assert duckdb_.execute("SELECT count(*) FROM t").fetchall() == [(0,)]


async def test_settings_of_the_connection_before_and_after_do_not_matter(
    radosgw: S3Server, moto: S3Server, duckdb_: duckdb.DuckDBPyConnection
) -> None:
    queries = []
    for server, bucket in ((radosgw, radosgw.bucket), (moto, "other.bucket")):
        server.make_bucket(bucket)
        config = replace(server.store(), url=f"s3://{bucket}")
        store = await open_store(config)
        await write(store, "both/1.parquet", server.name)
        await store.close()
        queries.append(duckdb_read_parquet_sql(config, "both/1.parquet"))
    duckdb_.execute("LOAD httpfs; SET s3_endpoint = '127.0.0.1:1'; SET s3_session_token = 'of others'")
    duckdb_.execute("CREATE SECRET (TYPE s3, KEY_ID 'x', SECRET 'y', ENDPOINT '127.0.0.1:1')")
    for query in queries:
        duckdb_.execute(query.sql)
    both = " UNION ALL ".join(query.sql.splitlines()[-1] for query in queries)
    assert sorted(duckdb_.execute(both).fetchall()) == [("moto",), ("radosgw",)]


# --- what DuckDB is told ---------------------------------------------------------------------------------


def test_every_setting_of_a_bucket_is_passed_on() -> None:
    store = replace(AWS, endpoint="http://s3.example:9000", region="eu-1", force_path_style=True)
    assert duckdb_read_parquet_sql(store, "a/b.parquet").sql.splitlines() == [
        "INSTALL httpfs;",
        "LOAD httpfs;",
        "CREATE OR REPLACE TEMPORARY SECRET \"pysync lake\" (TYPE s3, SCOPE 's3://lake/', "
        "ENDPOINT 's3.example:9000', REGION 'eu-1', URL_STYLE 'path', USE_SSL false, "
        "KEY_ID 'AKIA', SECRET 'hush''hush', SESSION_TOKEN '');",
        "SELECT * FROM read_parquet('s3://lake/events/a/b.parquet')",
    ]


@pytest.mark.parametrize(
    ("members", "settings"),
    [
        ({}, "ENDPOINT 's3.amazonaws.com', REGION 'us-east-1', URL_STYLE 'vhost', USE_SSL true"),
        (
            {"endpoint": "https://s3.example"},
            "ENDPOINT 's3.example', REGION 'us-east-1', URL_STYLE 'vhost', USE_SSL true",
        ),
        (
            {"url": "s3://lake?endpoint=http://h:1/&region=r&path_style=true"},
            "ENDPOINT 'h:1', REGION 'r', URL_STYLE 'path', USE_SSL false",
        ),
        (
            {"endpoint": "http://127.0.0.1:9000"},
            "ENDPOINT '127.0.0.1:9000', REGION 'us-east-1', URL_STYLE 'path', USE_SSL false",
        ),
    ],
)
def test_missing_settings_have_the_defaults_of_the_store(members: dict[str, Any], settings: str) -> None:
    assert settings in duckdb_read_parquet_sql(replace(AWS, **members), "a").sql


def test_the_secret_is_in_the_sql_and_nowhere_else() -> None:
    query = duckdb_read_parquet_sql(AWS, "a", session_token="token")
    assert "SECRET 'hush''hush', SESSION_TOKEN 'token'" in query.sql
    assert "KEY_ID 'AKIA', SECRET '***', SESSION_TOKEN '***'" in query.loggable_sql
    for text in (query.loggable_sql, repr(query), str(query), query.uri):
        assert "hush" not in text
        assert "token'" not in text
    shown = re.sub(r"\*\*\*", "", query.loggable_sql)
    assert shown == query.sql.replace("hush''hush", "").replace("'token'", "''")


def test_no_error_of_duckdb_quotes_the_secret(moto: S3Server, duckdb_: duckdb.DuckDBPyConnection) -> None:
    config = replace(moto.store(new_prefix()), secret_access_key="hush-hush")
    for glob in (False, True):
        query = duckdb_read_parquet_sql(config, "missing", glob=glob)
        with pytest.raises(duckdb.Error) as failed:
            duckdb_.execute(query.sql)
        assert "hush" not in str(failed.value)
        with pytest.raises(duckdb.Error) as failed:
            duckdb_.execute(query.sql + " WHERE (")
        assert "hush" not in str(failed.value)
    secrets = duckdb_.execute("SELECT * FROM duckdb_secrets()").fetchall()
    assert "pysync pysync" in str(secrets)
    assert "hush" not in str(secrets)


class Seen(BaseHTTPRequestHandler):
    """Answers 404, and remembers with which credentials it was asked."""

    requests: list[tuple[str | None, str | None]]

    def do_HEAD(self) -> None:
        signed = self.headers["Authorization"]
        key_id = signed and re.search("Credential=([^/]*)", signed)
        self.requests.append((key_id and key_id[1], self.headers["x-amz-security-token"]))
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def seen() -> Iterator[tuple[str, list[tuple[str | None, str | None]]]]:
    """The URL of a server, and the key ids and tokens that it was asked with."""
    requests: list[tuple[str | None, str | None]] = []
    handler = type("SeenHere", (Seen,), {"requests": requests})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        thread = Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}", requests
        listening.shutdown()
        thread.join()


@pytest.mark.parametrize("configured", [True, False])
@pytest.mark.parametrize("in_environment", [True, False])
def test_credentials_are_those_of_the_store_else_of_the_environment_else_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    duckdb_: duckdb.DuckDBPyConnection,
    seen: tuple[str, list[tuple[str | None, str | None]]],
    configured: bool,
    in_environment: bool,
) -> None:
    without_credentials(monkeypatch, tmp_path)
    if in_environment:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            monkeypatch.setenv(name, "environment")
    url, requests = seen
    store = replace(AWS, endpoint=url) if configured else StoreConfig(url="s3://lake", endpoint=url)
    with pytest.raises(duckdb.HTTPException):
        duckdb_.execute(duckdb_read_parquet_sql(store, "a.parquet").sql)
    theirs = ("environment", "environment") if in_environment else (None, None)
    assert set(requests) == {("AKIA", None) if configured else theirs}


@pytest.mark.parametrize(
    ("store", "key", "message"),
    [
        ("memory:", "a", "the store must be file:DIR or s3://bucket/prefix"),
        ("s3://b'; DROP TABLE t; --", "a", "the store must be"),
        ("s3://lake?endpoint=nowhere", "a", "the endpoint must be"),
        (replace(AWS, endpoint="http://h/s3"), "a", "an endpoint without a path"),
        (replace(AWS, secret_access_key=None), "a", "belong together"),
        (replace(AWS, secret_access_key="a\0b"), "a", "an SQL text cannot contain a NUL character"),
        ("s3://lake/a\0b", "a", "an SQL text cannot contain a NUL character"),
        ("s3://lake/a\\b", "a", "that contains a \\"),
        ("file:/srv/a\\b", "a", "that contains a \\"),
        (AWS, "a?s3_endpoint=evil", "DuckDB would read the text after a ?"),
        (AWS, "", "not a key"),
        (AWS, "../a", "not a key"),
        (AWS, "a//b", "not a key"),
        ("file:data", "a\0", "not a key"),
    ],
)
@pytest.mark.parametrize("glob", [True, False])
def test_keys_that_duckdb_would_misread_are_rejected(
    store: StoreConfig | str, key: str, message: str, glob: bool
) -> None:
    if glob and not key:
        assert duckdb_read_parquet_sql(store, key, glob=True).uri == "s3://lake/events/*.parquet"
        return
    with pytest.raises(ValueError, match=re.escape(message)) as rejected:
        duckdb_read_parquet_sql(store, key, glob=glob)
    assert "hush" not in str(rejected.value)


def test_a_session_token_needs_credentials() -> None:
    with pytest.raises(ValueError, match="belong together"):
        duckdb_read_parquet_sql("s3://lake", "a", session_token="token")
