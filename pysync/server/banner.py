"""What `pysync serve` prints when it listens: what is served where, and lines to try."""

import time
from itertools import islice
from typing import Final

from pysync import __version__
from pysync.config import Collection, Config, redacted_coordinator
from pysync.config.derived import accepts_json, file_types, matches_media_type
from pysync.config.plugin_validation import projection_name
from pysync.config.schema import ProjectionConfig
from pysync.server.handlers.service import INDEX, file_names

_TEXT: Final = "text/plain"
"""What is tried as a file."""


def banner(config: Config, port: int) -> str:
    """The text for a service that listens on `port`."""
    address = origin(config.server.host, port)
    base = address + config.server.mount_path
    lines = [
        f"pysync {__version__} at {base}",
        f"  store        {config.store.url}",
        f"  coordinator  {redacted_coordinator(config)}",
        *([f"  workers      {config.server.workers}"] if config.server.workers > 1 else []),
        *([f"  plugins      {', '.join(config.plugins)}"] if config.plugins else []),
        *(f"  projection   {_projection(found)}" for found in config.projections),
        *(
            f"  events       {found.collection}, as Parquet in {found.storage_path}"
            for found in config.events
        ),
        "",
        *_table(config),
        "",
        f"  health {base}/health   metrics {address}/metrics",
    ]
    tried = _example_commands(config, base)
    if tried:
        lines += ["", "Try it from another terminal:", *tried, f"  curl -s {base}/health"]
    pages = _pages(config, base)
    if pages:
        lines += ["", "Open in two windows of a browser:", *pages]
    return "\n".join(lines) + "\n"


def origin(host: str, port: int) -> str:
    """The URL of a host and port, brackets around an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _pages(config: Config, base: str) -> list[str]:
    """The pages among the examples, but for the one that lists them."""
    folder = config.server.examples
    names = [] if folder is None else file_names(folder)
    return [f"  {base}/examples/{name}" for name in names if name.endswith(".html") and name != INDEX]


def _projection(projection: ProjectionConfig) -> str:
    return f"{projection_name(projection)}, of {', '.join(projection.source)}"


def _table(config: Config) -> list[str]:
    rows = [
        (f"{namespace}/{collection.name}" if namespace else collection.name, collection)
        for namespace, _, collections in config.each_namespace()
        for collection in collections
    ]
    if not rows:
        return ["  no collections: nothing can be pulled or pushed"]
    width = max(len(name) for name, _ in rows)
    path_width = max(len(collection.storage_path) for _, collection in rows)
    return [
        f"  {name:<{width}}  {collection.storage_path:<{path_width}}  {_access(collection)}"
        for name, collection in rows
    ]


def _access(collection: Collection) -> str:
    readers, writers = collection.read_roles or ("nobody",), collection.write_roles or ("nobody",)
    reads = "not pulled" if collection.push_only else f"read {', '.join(readers)}"
    log = collection.append_only
    verb = "write" if log is None else "append"
    proof = "" if log is None or log.require_author_signature is False else " with author proof"
    writes = "not pushed" if collection.pull_only else f"{verb} {', '.join(writers)}{proof}"
    bundled = "" if collection.bundle is None else f"; in bundle {collection.bundle}"
    return f"{reads}; {writes}{bundled}"


def _example_commands(config: Config, base: str) -> list[str]:
    """Lines to try, for the first collection of each kind that is open to all."""
    batched = {events.collection for events in config.events}
    found = _open_to_all(config)
    plain = [collection for collection in found if collection.name not in batched]
    return [
        line
        for lines_of, collections in (
            (_try_lines, filter(_accepts_json, plain)),
            (_try_log_lines, filter(_is_plain_log, plain)),
            (_try_file_lines, filter(_accepts_text, plain)),
            (_try_events_lines, (collection for collection in found if collection.name in batched)),
        )
        for collection in islice(collections, 1)
        for line in lines_of(base, collection)
    ]


def _open_to_all(config: Config) -> list[Collection]:
    """The root collections that anybody may read and write, and that take any data."""
    return [
        collection
        for collection in config.collections
        if (
            collection.bundle is None
            and not (collection.pull_only or collection.push_only or collection.require_auth)
            and "public" in collection.read_roles
            and "public" in collection.write_roles
            and collection.object_schema is None
        )
    ]


def _accepts_json(collection: Collection) -> bool:
    return collection.append_only is None and accepts_json(collection)


def _accepts_text(collection: Collection) -> bool:
    return matches_media_type(file_types(collection), _TEXT)


def _is_plain_log(collection: Collection) -> bool:
    """Whether appends need no author proof, and are there to be pulled."""
    log = collection.append_only
    return log is not None and log.require_author_signature is False and log.persist is not False


def _fresh_key(collection: Collection) -> str:
    fresh = f"hello-{int(time.time())}"
    return "/".join(fresh if part.startswith("{") else part for part in collection.storage_path.split("/"))


def _try_log_lines(base: str, log: Collection) -> list[str]:
    key = _fresh_key(log)
    return [
        f"  curl -s {base}/push/{key} -H 'Content-Type: application/json' "
        """-d '{"data":{"text":"hello"}}'""",
        f"  curl -s '{base}/pull/{key}?last=10'",
    ]


def _try_file_lines(base: str, collection: Collection) -> list[str]:
    key = _fresh_key(collection)
    return [
        f"  curl -s {base}/push/{key} -H 'Content-Type: {_TEXT}' --data-binary 'hello'",
        f"  curl -s {base}/pull/{key}",
        *_try_list_lines(base, collection, key),
    ]


def _try_events_lines(base: str, collection: Collection) -> list[str]:
    key = _fresh_key(collection)
    return [
        f"  curl -s {base}/push/{key} -H 'Content-Type: application/json' "
        """-d '{"data":{"events":[{"event":"hello"}]}}'""",
        *_try_list_lines(base, collection, key),
    ]


def _try_list_lines(base: str, collection: Collection, key: str) -> list[str]:
    if not collection.listable:
        return []
    return [f"  curl -s {base}/list/{key.rpartition('/')[0]}".rstrip("/")]


def _try_lines(base: str, collection: Collection) -> list[str]:
    key = _fresh_key(collection)
    return [
        f"  curl -s {base}/push/{key} -H 'Content-Type: application/json' "
        """-d '{"data":{"text":"hello"},"baseHash":null}'""",
        f"  curl -s {base}/pull/{key}",
        *_try_list_lines(base, collection, key),
    ]
