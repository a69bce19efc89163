"""Presets: collections of Parquet files, described by a few members
(docs/reference/protocol.md#parquet-files)."""
# ruff: noqa: RUF009 (`option` and `_field_like` make `dataclasses.field`)

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pysync.config.key_templates import KeyTemplate
from pysync.config.schema import Collection, RateLimit, option
from pysync.protocol import OCTET_STREAM, PARQUET_MIME_TYPES

AccessLevel = Literal["public", "authenticated", "none"]


def _field_like(name: str) -> Any:
    """Return a field with the default and documentation of a collection's member."""
    (found,) = (field for field in dataclasses.fields(Collection) if field.name == name)
    return dataclasses.field(default=found.default, metadata=found.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetPreset:
    """A short form of a collection of files. Its roles decide who has access; `requireAuth` stays absent."""

    preset: Literal["parquet", "sealedParquet"] = option(
        "`parquet`: Parquet files, with all media types that they are sent as; `sealedParquet`: the same, "
        "sealed by clients, as `application/octet-stream`. `encryption` is `none`, and `listable` true where "
        "the last segment of `storagePath` is a parameter."
    )
    name: str = _field_like("name")
    storage_path: str = _field_like("storage_path")
    read: AccessLevel | tuple[str, ...] | None = option(
        "Access to pulls: `public`; `authenticated`, which is the role `cap:read:NAME`; `none`: there is no "
        "pull route; or a list of roles. Absent: `public`, of `sealedParquet` `authenticated`.",
        None,
    )
    write: AccessLevel | tuple[str, ...] = option(
        "Access to pushes, likewise: `authenticated` is the role `cap:write:NAME`.", "authenticated"
    )
    max_body_bytes: int = _field_like("max_body_bytes")
    rate_limit: RateLimit | Literal[False] | None = _field_like("rate_limit")
    cache_duration_ms: int | None = _field_like("cache_duration_ms")
    trusted_issuers: tuple[str, ...] | None = _field_like("trusted_issuers")
    identity_roles: Mapping[str, tuple[str, ...]] | None = _field_like("identity_roles")

    @property
    def is_inaccessible(self) -> bool:
        """True if neither pulls nor pushes are possible, which is not allowed."""
        return self.read == self.write == "none"

    def collection(self) -> Collection:
        """Return the collection that the preset describes."""
        is_sealed = self.preset == "sealedParquet"
        read = self.read if self.read is not None else "authenticated" if is_sealed else "public"
        return Collection(
            name=self.name,
            storage_path=self.storage_path,
            read_roles=self._roles("read", read),
            write_roles=self._roles("write", self.write),
            encryption="none",
            max_body_bytes=self.max_body_bytes,
            allowed_mime_types=(OCTET_STREAM,) if is_sealed else PARQUET_MIME_TYPES,
            pull_only=self.write == "none",
            push_only=read == "none" and not self.is_inaccessible,
            listable=KeyTemplate.of(self.storage_path).ends_in_param,
            rate_limit=self.rate_limit,
            cache_duration_ms=self.cache_duration_ms,
            trusted_issuers=self.trusted_issuers,
            identity_roles=self.identity_roles,
        )

    def _roles(self, verb: str, access: AccessLevel | tuple[str, ...]) -> tuple[str, ...]:
        match access:
            case "public":
                return ("public",)
            case "authenticated":
                return (f"cap:{verb}:{self.name}",)
            case "none":
                return ()
            case roles:
                return roles
