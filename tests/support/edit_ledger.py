"""What replicas report of their edits while they are killed, and the check that none is lost or doubled."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any


class Ledger:
    """The edits that `writers` have made. The entries of each begin with its name, and count up."""

    def __init__(self, writers: Iterable[str]) -> None:
        self._writers = tuple(writers)
        self.added: dict[str, set[str]] = defaultdict(set)
        """The entries that were added to each shared document."""
        self.seen: dict[str, set[str]] = defaultdict(set)
        """The entries that a device saw in a shared document which it then deleted."""
        self.appended: dict[str, list[str]] = defaultdict(list)
        self.owned: dict[str, set[str | None]] = {}
        """What each document of one device may be: what was accepted last, or what was begun since."""

    def note(self, members: dict[str, Any]) -> None:
        """Note a report of a device."""
        match members:
            case {"done": "add", "key": key, "entry": entry}:
                self.added[key].add(entry)
            case {"done": "append", "key": key, "entry": entry}:
                self.appended[key].append(entry)
            case {"begun": "drop", "key": key, "seen": seen}:
                self.seen[key].update(seen)
            case {"begun": "own", "key": key, "entry": entry}:
                self.owned.setdefault(key, {None}).add(entry)
            case {"done": "own", "key": key, "entry": entry}:
                self.owned[key] = {entry}

    def check_documents(self, stored: dict[str, dict[str, Any]]) -> None:
        for key, added in self.added.items():
            lost = added - set(entries_of(stored.get(key, {}))) - self.seen[key]
            assert not lost, f"{key} lacks {sorted(lost)}"
        for key, allowed in self.owned.items():
            assert stored.get(key, {}).get("id") in allowed, key

    def check_log(self, key: str, stored: list[str]) -> None:
        assert len(stored) == len(set(stored)), "no append is doubled"
        assert set(self.appended[key]) <= set(stored), "no append is lost"
        for writer in self._writers:
            own = [entry for entry in stored if entry.startswith(writer)]
            assert own == sorted(own), "the appends of a device keep their order"


def entries_of(data: dict[str, Any]) -> list[str]:
    """Return the entries of a shared document, those of its members first."""
    return [*(name for name in data if name != "items"), *(item["id"] for item in data.get("items", []))]
