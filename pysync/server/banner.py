"""The banner that `pysync serve` prints once it listens: its address, its store, and a command to try."""

import time
from typing import Final

from pysync import __version__
from pysync.config import Config, redacted_coordinator
from pysync.config.derived import accepts_json
from pysync.config.plugin_validation import projection_name
from pysync.server.handlers.service import INDEX, file_names

_DOCUMENT: Final = '{"data":{"text":"hello"},"baseHash":null}'


def banner(config: Config, port: int) -> str:
    """Return the banner of a service that listens on `port`."""
    address = origin(config.server.host, port)
    base = address + config.server.mount_path
    facts = {
        "store": config.store.url,
        "coordinator": redacted_coordinator(config),
        "workers": str(config.server.workers) if config.server.workers > 1 else "",
        "plugins": ", ".join(config.plugins),
        "projections": ", ".join(map(projection_name, config.projections)),
        "events": ", ".join(events.collection for events in config.events),
        "health": f"{base}/health",
        "metrics": f"{address}/metrics",
    }
    lines = [
        f"pysync {__version__} at {base}",
        *(f"  {name:<11}  {value}" for name, value in facts.items() if value),
        "",
        "`pysync check FILE` prints the routes of a configuration. Try it from another terminal:",
        f"  curl -s {_request(config, base)}",
    ]
    pages = _pages(config)
    if pages:
        lines += ["", "Open in two windows of a browser:"]
        lines += [f"  {base}/examples/{name}" for name in pages]
    return "\n".join(lines) + "\n"


def origin(host: str, port: int) -> str:
    """Return the URL of a host and port, with brackets around an IPv6 address."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _request(config: Config, base: str) -> str:
    """Return the curl arguments that push a new document to the first collection that is open to anyone, or
    that query the health of the service if there is none."""
    batched = {events.collection for events in config.events}
    for one in config.collections:
        is_open = "public" in one.write_roles and not (one.require_auth or one.pull_only or one.root_only)
        takes_any = one.object_schema is None and not one.enforce_sealed and one.name not in batched
        if is_open and takes_any and accepts_json(one) and one.append_only is None:
            key = one.key_template.fill(dict.fromkeys(one.path_template.params, f"hello-{int(time.time())}"))
            return f"{base}/push/{key} -H 'Content-Type: application/json' -d '{_DOCUMENT}'"
    return f"{base}/health"


def _pages(config: Config) -> list[str]:
    """Return the example pages, except the index."""
    names = [] if config.server.examples is None else file_names(config.server.examples)
    return [name for name in names if name.endswith(".html") and name != INDEX]
