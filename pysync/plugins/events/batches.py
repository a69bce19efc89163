"""Batch ids, and what is known of a batch that is to be stored (service, Events plugin 4)."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, NamedTuple

from pysync.changelog import Change, Subject
from pysync.clock import Tick

BATCH_ID: Final = "batchId"
"""The member of an answer that holds the id. The path parameter that stands for it may have another name."""
SUFFIX: Final = ".parquet"


def place(tick: Tick) -> str:
    """The part of an id that says where in the order of batches it is: such texts have the order of ticks."""
    return f"{tick.ms:013d}-{tick.number:06d}"


class Tokens:
    """Random texts of 12 hex digits. Randomness is fetched for many of them: whoever asks the system for some
    lets another thread of the process go first."""

    def __init__(self, random_bytes: Callable[[int], bytes]) -> None:
        self._random_bytes = random_bytes
        self._digits = ""

    def next(self) -> str:
        if not self._digits:
            self._digits = self._random_bytes(6 * 256).hex()
        token, self._digits = self._digits[:12], self._digits[12:]
        return token


def received_at(ms: int) -> str:
    """Milliseconds since the epoch as ISO 8601 in UTC."""
    return f"{datetime.fromtimestamp(ms // 1000, UTC).isoformat()[:19]}.{ms % 1000:03d}Z"


class Batch(NamedTuple):
    """A batch that is to be stored in `folder`, under an id that ends in `token` (12 hex digits); and of what
    it is a change, whose parameter `id_name` is still the client's. `tick` is what its push remembers of the
    order."""

    folder: str
    subject: Subject
    token: str
    received_ms: int
    tick: Tick
    id_name: str = BATCH_ID

    @property
    def ending(self) -> str:
        """What the name of this batch's file ends with, and no other's."""
        return f"-{self.token}{SUFFIX}"

    def id(self, tick: Tick) -> str:
        """Its id, in that place."""
        return f"{place(tick)}-{self.token}"

    def key(self, tick: Tick) -> str:
        """The key of its file, in that place."""
        return f"{self.folder}/{place(tick)}{self.ending}"

    def params(self, id_: str) -> dict[str, str]:
        """The parameters of the path at which it is pulled."""
        return {**self.subject.params, self.id_name: id_}

    def change(self, tick: Tick, sha256: str) -> Change:
        """What is told of it, in that place."""
        subject = self.subject._replace(params=self.params(self.id(tick)), key=self.key(tick))
        return subject.change(sha256, self.received_ms)
