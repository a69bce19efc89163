"""What `pysync serve` prints when it listens: what is served where, and lines to try."""

import time

from pysync import __version__
from pysync.config import Collection, Config, effective_coordinator
from pysync.server.app import is_served


def banner(config: Config, port: int) -> str:
    """The text for a service that listens on `port`."""
    host = config.server.host
    shown = f"[{host}]" if ":" in host else host
    base = f"http://{shown}:{port}{config.server.mount_path}"
    lines = [
        f"pysync {__version__} at {base}",
        f"  store        {config.store.url}",
        f"  coordinator  {effective_coordinator(config)}",
        "",
        *_table(config),
        "",
        f"  health {base}/health   metrics http://{shown}:{port}/metrics",
    ]
    example = _open_to_all(config)
    if example is not None:
        lines += ["", "Try it from another terminal:", *_try_lines(base, example)]
    return "\n".join(lines) + "\n"


def _table(config: Config) -> list[str]:
    rows = [(collection.name, collection.storage_path, collection) for collection in config.collections]
    for name, namespace in config.namespaces.items():
        rows += [
            (f"{name}/{collection.name}", collection.storage_path, collection)
            for collection in namespace.collections
        ]
    if not rows:
        return ["  no collections: nothing can be pulled or pushed"]
    width = max(len(name) for name, _, _ in rows)
    path_width = max(len(path) for _, path, _ in rows)
    return [f"  {name:<{width}}  {path:<{path_width}}  {_access(found)}" for name, path, found in rows]


def _access(collection: Collection) -> str:
    if not is_served(collection):
        return "not served by this version"
    readers, writers = collection.read_roles or ("nobody",), collection.write_roles or ("nobody",)
    reads = "not pulled" if collection.push_only else f"read {', '.join(readers)}"
    writes = "not pushed" if collection.pull_only else f"write {', '.join(writers)}"
    bundled = "" if collection.bundle is None else f"; in bundle {collection.bundle}"
    return f"{reads}; {writes}{bundled}"


def _open_to_all(config: Config) -> Collection | None:
    """A root collection that anybody may read and write, and that takes any data."""
    for collection in config.collections:
        if (
            is_served(collection)
            and collection.bundle is None
            and not (collection.pull_only or collection.push_only or collection.require_auth)
            and "public" in collection.read_roles
            and "public" in collection.write_roles
            and collection.object_schema is None
        ):
            return collection
    return None


def _try_lines(base: str, collection: Collection) -> list[str]:
    fresh = f"hello-{int(time.time())}"
    key = "/".join(fresh if part.startswith("{") else part for part in collection.storage_path.split("/"))
    lines = [
        f"  curl -s {base}/push/{key} -H 'Content-Type: application/json' "
        """-d '{"data":{"text":"hello"},"baseHash":null}'""",
        f"  curl -s {base}/pull/{key}",
    ]
    if collection.listable:
        lines.append(f"  curl -s {base}/list/{key.rpartition('/')[0]}".rstrip("/"))
    return [*lines, f"  curl -s {base}/health"]
