"""What a bucket's server keeps of S3's promises, as the probe at start found it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bucket:
    """`url` is the bucket's. `creates` and `replaces`: `If-None-Match: *` and `If-Match` of a put are
    honoured; `deletes`: `If-Match` of a delete is. `quotes`: etags go into conditions with their quotes.
    `skew_ms`: how far this machine's clock is ahead of the server's, to a second."""

    url: str
    creates: bool
    replaces: bool
    deletes: bool
    quotes: bool
    skew_ms: int

    @property
    def is_conditional(self) -> bool:
        """Whether several processes may write to it."""
        return self.creates and self.replaces

    @property
    def ignored(self) -> list[str]:
        """The conditions of a put that its server ignores."""
        kept = {"If-None-Match": self.creates, "If-Match": self.replaces}
        return [name for name, is_kept in kept.items() if not is_kept]

    def condition(self, etag: str) -> str:
        """An etag as the value of If-Match and If-None-Match."""
        return f'"{etag}"' if self.quotes else etag
