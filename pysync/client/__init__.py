"""A client of the protocol: `Client` speaks to a server, `SyncDocument` keeps one document in step."""

from pysync.client.client import Backoff, Client, PullResult, PushResult, Unreachable
from pysync.client.sync import SyncDocument, merge_remote_wins

__all__ = [
    "Backoff",
    "Client",
    "PullResult",
    "PushResult",
    "SyncDocument",
    "Unreachable",
    "merge_remote_wins",
]
