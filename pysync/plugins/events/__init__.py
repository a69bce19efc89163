"""Events: pushed in batches of JSON, stored as Parquet, one file for each push
(docs/reference/protocol.md#events).

A batch's id contains the time at which its file was stored, so a reader that lists a folder from the last id
that it knows misses none.
"""

from collections.abc import Sequence

from pysync.config import Config
from pysync.plugins.events.plugin import Events, create_events_plugin

__all__ = ["Events", "create_events_plugin", "events_of"]


def events_of(config: Config) -> Sequence[Events]:
    """Return the plugins that store events pushed to the collections of the `events` section."""
    return [
        Events(
            section.collection,
            section.storage_path,
            compact_every_ms=section.compact_every_ms,
            compact_older_than_ms=section.compact_older_than_ms,
            compact_to_bytes=section.compact_to_bytes,
        )
        for section in config.events
    ]
