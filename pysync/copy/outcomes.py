"""What became of the objects of a copy."""

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["copied", "healed", "already_there", "corrupt", "different", "refused", "unreadable"]


@dataclass(slots=True)
class Outcomes:
    """How many objects met which end, and the bytes of those that were put. The `healed` took the place of a
    damaged object. Of the `different` another lies at the key already; the `refused` have a key that the
    store does not take, or name what is not there; the `unreadable` are lost, or the disk or server does not
    return them."""

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
        """Whether everything is there now."""
        return not (self.corrupt or self.different or self.refused or self.unreadable)
