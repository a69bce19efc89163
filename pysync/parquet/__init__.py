"""Parquet files: collections of them, their keys, and the SQL that queries them where they lie.

Nothing here imports pyarrow or duckdb before it is used.
"""

from pysync.config.media import PARQUET_MIME_TYPES
from pysync.config.template import resolve_document_key
from pysync.parquet.factories import create_parquet_collection, create_sealed_parquet_collection

__all__ = [
    "PARQUET_MIME_TYPES",
    "create_parquet_collection",
    "create_sealed_parquet_collection",
    "resolve_document_key",
]
