"""Events: batches of them pushed as JSON and stored as Parquet, one file a push.

    plugin      the plugin Events: claims, encodes and stores each push
    batch_ids   batch ids, and the keys of their files
    compaction  small files become larger ones

A batch's id is made of the tick that its file was stored with, so that who lists a folder from the last id
that it knows misses none.

See docs/reference/protocol.md#events.
"""

from collections.abc import Sequence

from pysync.config import Config
from pysync.plugins.events.plugin import Events, create_events_plugin

__all__ = ["Events", "create_events_plugin", "events_of"]


def events_of(config: Config) -> Sequence[Events]:
    """Return the plugins that store events pushed to the collections of the `events` section."""
    return [
        Events(
            said.collection,
            said.storage_path,
            compact_every_ms=said.compact_every_ms,
            compact_older_than_ms=said.compact_older_than_ms,
            compact_to_bytes=said.compact_to_bytes,
        )
        for said in config.events
    ]
