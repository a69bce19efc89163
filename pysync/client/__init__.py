"""A client of the protocol: `Client` sends requests to a server, and `Client.watch` receives changes;
`SyncDocument` keeps one document in sync, `Replica` whole collections, `LogCursor` follows a log.
`IdentityKeys` sign. `pysync.client.sealed` encrypts what the server must not read."""

from pysync.auth.certificates import Certificate, CertificateError
from pysync.auth.certificates import parse as parse_certificate
from pysync.auth.identity_keys import IdentityKeys
from pysync.client.client import Client, SpacesAccess, fetch_server_config, read_spaces_access
from pysync.client.files import File, FileChanged, FileInfo, FileStream, FileTooLarge
from pysync.client.log_cursor import BadAuthorProof, LogCursor
from pysync.client.merge import MISSING, Dropped, MergeConflict, ThreeWayMerge, local_wins, merge_remote_wins
from pysync.client.models import (
    BatchEntry,
    CollectionInfo,
    DocumentVersion,
    LogElement,
    LogRange,
    PullResult,
    PushResult,
    QuotaUsage,
    ServerConfig,
    UsageReport,
)
from pysync.client.replica.file import RejectedEdit, ReplicaFileError
from pysync.client.replica.replica import Replica, Status
from pysync.client.sync import Cipher, SyncDocument, UnknownBase
from pysync.client.transport import RetryPolicy, Unreachable
from pysync.client.watch import ChangeEvent, ChangesPage, Reset, Watch

__all__ = [
    "MISSING",
    "BadAuthorProof",
    "BatchEntry",
    "Certificate",
    "CertificateError",
    "ChangeEvent",
    "ChangesPage",
    "Cipher",
    "Client",
    "CollectionInfo",
    "DocumentVersion",
    "Dropped",
    "File",
    "FileChanged",
    "FileInfo",
    "FileStream",
    "FileTooLarge",
    "IdentityKeys",
    "LogCursor",
    "LogElement",
    "LogRange",
    "MergeConflict",
    "PullResult",
    "PushResult",
    "QuotaUsage",
    "RejectedEdit",
    "Replica",
    "ReplicaFileError",
    "Reset",
    "RetryPolicy",
    "ServerConfig",
    "SpacesAccess",
    "Status",
    "SyncDocument",
    "ThreeWayMerge",
    "UnknownBase",
    "Unreachable",
    "UsageReport",
    "Watch",
    "fetch_server_config",
    "local_wins",
    "merge_remote_wins",
    "parse_certificate",
    "read_spaces_access",
]
