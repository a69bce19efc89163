"""A client of the protocol: `Client` speaks to a server, `SyncDocument` keeps one document in step."""

from pysync.client.client import Client, fetch_server_config
from pysync.client.connection import Backoff, Unreachable
from pysync.client.results import BatchEntry, CollectionInfo, PullResult, PushResult, ServerConfig
from pysync.client.spaces import SpacesAccess, read_spaces_access
from pysync.client.sync import SyncDocument, merge_remote_wins

__all__ = [
    "Backoff",
    "BatchEntry",
    "Client",
    "CollectionInfo",
    "PullResult",
    "PushResult",
    "ServerConfig",
    "SpacesAccess",
    "SyncDocument",
    "Unreachable",
    "fetch_server_config",
    "merge_remote_wins",
    "read_spaces_access",
]
