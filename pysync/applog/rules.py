"""What a collection says of its logs."""

from dataclasses import dataclass

from pysync._core import LogHead
from pysync.config import Collection
from pysync.errors import CheckpointTooOld


@dataclass(frozen=True, slots=True)
class LogRules:
    """The members of `appendOnly`, their defaults filled in, and of its collection `ttlMs` and
    `forceFullFetch`."""

    field: str = "items"
    persist: bool = True
    max_items: int | None = None
    chunk_size: int | None = None
    require_author_signature: bool = True
    allow_full: bool = True
    max_pull_limit: int | None = None
    max_checkpoint_age_ms: int | None = None
    ttl_ms: int | None = None
    force_full: bool = False

    @classmethod
    def of(cls, collection: Collection) -> "LogRules":
        """The rules of `collection`, which is append-only."""
        said = collection.append_only
        assert said is not None, "only an append-only collection has them"
        return cls(
            field="items" if said.field is None else said.field,
            persist=said.persist is not False,
            max_items=said.max_items,
            chunk_size=said.chunk_size,
            require_author_signature=said.require_author_signature is not False,
            allow_full=said.allow_full is not False,
            max_pull_limit=said.max_pull_limit,
            max_checkpoint_age_ms=said.max_checkpoint_age_ms,
            ttl_ms=collection.ttl_ms,
            force_full=collection.force_full_fetch,
        )

    def expired(self, head: LogHead, now_ms: int) -> bool:
        """Whether the log reads as missing."""
        return self.ttl_ms is not None and head.written_ms + self.ttl_ms < now_ms

    def check_age(self, since: int | None, now_ms: int) -> None:
        """Raise CheckpointTooOld where `since` lies further back than the log allows."""
        age_ms = self.max_checkpoint_age_ms
        if since is not None and age_ms is not None and since < now_ms - age_ms:
            raise CheckpointTooOld
