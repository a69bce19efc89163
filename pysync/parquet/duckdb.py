"""SQL with which DuckDB reads the Parquet files of a store in place.

See docs/reference/protocol.md#parquet-files.
"""

import re
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pysync._core import split_key
from pysync.config import StoreConfig
from pysync.config.schema import is_store_url

_AWS: Final = "s3.amazonaws.com"
"""DuckDB derives the host of a region from it."""
_SECRET_OPTIONS: Final = ("SECRET", "SESSION_TOKEN")
_WILDCARD: Final = re.compile(r"[*?[]")


@dataclass(frozen=True, slots=True)
class ReadParquet:
    """SQL that reads Parquet files. `uri` names the files, `sql` reads all their rows in DuckDB, and
    `loggable_sql` is the same with `***` in place of secrets. Each statement is a line of its own, because
    errors of DuckDB quote the line at fault."""

    uri: str
    sql: str = field(repr=False)
    loggable_sql: str


def duckdb_read_parquet_sql(
    store: StoreConfig | str, key: str, *, glob: bool = False, session_token: str | None = None
) -> ReadParquet:
    r"""Return the SQL that reads the file at `key` of a store (its configuration or its URL). With `glob` it
    reads all `*.parquet` directly below `key`, which may then be `""`.

    For a bucket the SQL loads the DuckDB extension httpfs (`INSTALL` downloads it if it is not installed yet)
    and creates a temporary secret for this bucket. It therefore changes no setting of the connection, and
    takes precedence over a secret that the connection has for all buckets. Without credentials in the store,
    DuckDB takes `AWS_ACCESS_KEY_ID` and related variables from the environment of its process, or else sends
    unsigned requests. It finds credentials in shared files and of a machine's role only with its extension
    aws. `session_token` belongs to temporary credentials. A relative folder is made absolute here.

    Raises ValueError for a store that DuckDB cannot read, for an invalid key, and for characters that DuckDB
    would interpret: a `\` in a key, prefix or folder, and for a bucket a `?` in any part of the location.
    """
    config = StoreConfig(url=store) if isinstance(store, str) else store
    if not is_store_url(config.url) or config.url == "memory:":
        raise ValueError("the store must be file:DIR or s3://bucket/prefix")
    key = key.removesuffix("/") if glob else key
    if key or not glob:
        split_key(key)
    if config.url.startswith("file:"):
        uri = _uri(f"{Path(config.url.removeprefix('file:')).absolute()}/files", key, glob)
        return ReadParquet(uri, _select(uri), _select(uri))
    location = config.s3_location()
    uri = _uri(f"s3://{location.bucket}/{location.prefix}".rstrip("/"), key, glob)
    if "?" in uri:
        raise ValueError(
            "DuckDB would read the text after a ? in a key, prefix or bucket as options of its own"
        )
    options = _options(config, session_token)
    hidden = {name: "***" if name in _SECRET_OPTIONS and text else text for name, text in options.items()}
    sql, loggable = (
        "\n".join(("INSTALL httpfs;", "LOAD httpfs;", _secret(location.bucket, each), _select(uri)))
        for each in (options, hidden)
    )
    return ReadParquet(uri, sql, loggable)


def _uri(root: str, key: str, glob: bool) -> str:
    """Return the URI of the files below `root`, with the wildcards in its path escaped."""
    path = f"{root}/{key}" if key else root
    if "\\" in path:
        raise ValueError("DuckDB cannot read a key, prefix or folder that contains a \\")
    return _WILDCARD.sub(r"[\g<0>]", path) + ("/*.parquet" if glob else "")


def _options(config: StoreConfig, session_token: str | None) -> dict[str, str | bool]:
    """Return the options of the secret for the bucket."""
    location = config.s3_location()
    endpoint = urlsplit(location.endpoint or f"https://{_AWS}")
    if endpoint.path.strip("/"):
        raise ValueError("DuckDB accepts only an endpoint without a path")
    options: dict[str, str | bool] = {
        "ENDPOINT": endpoint.netloc,
        "REGION": location.region or "us-east-1",
        "URL_STYLE": "path" if location.path_style or _is_number(endpoint.hostname) else "vhost",
        "USE_SSL": endpoint.scheme == "https",
    }
    given = config.access_key_id, config.secret_access_key
    if session_token is None and given == (None, None):
        return options
    key_id, secret = given
    if key_id is None or secret is None:
        raise ValueError("accessKeyId, secretAccessKey and a session token belong together")
    # An empty token keeps DuckDB from using the one of its environment, which belongs to other credentials.
    return options | {"KEY_ID": key_id, "SECRET": secret, "SESSION_TOKEN": session_token or ""}


def _secret(bucket: str, options: dict[str, str | bool]) -> str:
    settings = ", ".join(f"{name} {_quote(value)}" for name, value in options.items())
    scope = _quote(f"s3://{bucket}/")
    return f'CREATE OR REPLACE TEMPORARY SECRET "pysync {bucket}" (TYPE s3, SCOPE {scope}, {settings});'


def _select(uri: str) -> str:
    return f"SELECT * FROM read_parquet({_quote(uri)})"  # noqa: S608 (quoted)


def _quote(value: str | bool) -> str:
    """Return the value as an SQL literal. Inside quotes only a quote has a meaning."""
    if isinstance(value, bool):
        return str(value).lower()
    if "\0" in value:
        raise ValueError("an SQL text cannot contain a NUL character")
    return "'" + value.replace("'", "''") + "'"


def _is_number(host: str | None) -> bool:
    """Return True if the host is an IP address, which cannot have a bucket in front of it."""
    try:
        return bool(ip_address(host or ""))
    except ValueError:
        return False
