"""The store in a folder: documents in a SQLite database, files beside it."""

from pysync.store.local.store import LocalStore

__all__ = ["LocalStore"]
