"""Names of media types that client and server both know."""

from typing import Final

JSON_TYPE: Final = "application/json"
OPAQUE_TYPE: Final = "application/octet-stream"
PARQUET_TYPE: Final = "application/vnd.apache.parquet"
PARQUET_MIME_TYPES: Final = (PARQUET_TYPE, "application/x-parquet", OPAQUE_TYPE)
"""What Parquet may be pushed as (service, Columnar collections)."""
