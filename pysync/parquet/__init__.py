"""Parquet files: their collections and keys, and the SQL that queries them in the store.

Nothing here imports pyarrow or duckdb before it is used.
"""

from pysync.config.key_templates import resolve_document_key
from pysync.parquet.collections import create_parquet_collection, create_sealed_parquet_collection
from pysync.parquet.duckdb import ReadParquet, duckdb_read_parquet_sql
from pysync.protocol import PARQUET_MIME_TYPES

__all__ = [
    "PARQUET_MIME_TYPES",
    "ReadParquet",
    "create_parquet_collection",
    "create_sealed_parquet_collection",
    "duckdb_read_parquet_sql",
    "resolve_document_key",
]
