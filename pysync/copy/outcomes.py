"""The outcome of a copy, object by object."""

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["copied", "healed", "already_there", "corrupt", "different", "refused", "unreadable"]


@dataclass(slots=True)
class Outcomes:
    """Numbers of objects by outcome, and the bytes of those that were put. A `healed` object replaced a
    damaged one. A `different` one was kept out by another at the key. A `refused` one has a key that the
    store does not take, or names something that is missing. An `unreadable` one is lost, or the disk or
    server does not return it."""

    copied: int = 0
    healed: int = 0
    already_there: int = 0
    corrupt: int = 0
    different: int = 0
    refused: int = 0
    unreadable: int = 0
    bytes: int = 0

    @property
    def is_whole(self) -> bool:
        """True if the target now holds everything."""
        return not (self.corrupt or self.different or self.refused or self.unreadable)
