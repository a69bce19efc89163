"""Where a store lies. In the URL of an `s3:` store query members stand for those of the store's object."""

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from pysync.config.tree import StoreConfig

is_store_url = re.compile(r"memory:|file:[^\0]+|s3://[a-z0-9][a-z0-9.-]+(/[^\s?#]*)?(\?[^\s#]*)?").fullmatch
"""Whether a text has the form of a store's URL."""
_MEMBERS = ("endpoint", "region", "path_style")


@dataclass(frozen=True, slots=True)
class S3Place:
    """`prefix` has no slash at its ends. `endpoint` None is AWS, `region` None what the environment says."""

    bucket: str
    prefix: str
    endpoint: str | None
    region: str | None
    path_style: bool


def s3_place(store: StoreConfig) -> S3Place:
    """Where `store`, whose URL begins with `s3://`, lies; what its URL says wins over the members beside it.
    Raises ValueError for a URL that says what none may; the text quotes no value."""
    parts = urlsplit(store.url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in query:
        if name not in _MEMBERS:
            raise ValueError(f"the URL's query may hold {', '.join(_MEMBERS)}, and not {ascii(name)[:60]}")
    path_style = query.get("path_style")
    if path_style not in (None, "true", "false"):
        raise ValueError("the URL's path_style must be true or false")
    prefix = parts.path.strip("/")
    if not {"", ".", ".."}.isdisjoint(prefix.split("/")) and prefix:
        raise ValueError("the prefix may not hold //, /./ or /../")
    endpoint = query.get("endpoint") or store.endpoint
    if endpoint is not None and not _is_server(endpoint):
        raise ValueError("the endpoint must be http://host:port or https://host")
    return S3Place(
        parts.netloc,
        prefix,
        endpoint,
        query.get("region") or store.region,
        store.force_path_style if path_style is None else path_style == "true",
    )


def _is_server(url: str) -> bool:
    parts = urlsplit(url)
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and "@" not in parts.netloc  # a user or a password, which would be shown and logged
        and not (parts.query or parts.fragment)
    )
