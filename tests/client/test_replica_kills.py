"""Replicas whose processes are killed again and again lose no edit, and double none."""

from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.depth import depth
from support.replica_process import Life, device_process, entries_of

pytestmark = [pytest.mark.process, pytest.mark.slow]

KILLS = depth(30, 300)
AWAY = "http://127.0.0.1:9"
"""An address at which nobody listens."""


class Ledger:
    """The edits that devices have made, and the check that none is lost."""

    def __init__(self) -> None:
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

    def check_documents(self, found: dict[str, dict[str, Any]]) -> None:
        for key, added in self.added.items():
            lost = added - set(entries_of(found.get(key, {}))) - self.seen[key]
            assert not lost, f"{key} lacks {sorted(lost)}"
        for key, allowed in self.owned.items():
            assert found.get(key, {}).get("id") in allowed, key

    def check_log(self, key: str, found: list[str]) -> None:
        assert len(found) == len(set(found)), "no append is doubled"
        assert set(self.appended[key]) <= set(found), "no append is lost"
        for device in ("phone",):
            own = [entry for entry in found if entry.startswith(device)]
            assert own == sorted(own), "the appends of a device keep their order"


@pytest.mark.timeout(depth(60, 600))
async def test_no_accepted_edit_is_lost_when_processes_without_a_server_are_killed(tmp_path: Path) -> None:
    random, ledger, last = Random(31), Ledger(), dict[str, Any]()
    async with device_process() as phone:
        for number in range(KILLS):
            left = random.randint(1, 8)

            def on_report(members: dict[str, Any]) -> None:
                nonlocal left
                ledger.note(members)
                left -= "done" in members
                if left == 0 or "idle" in members:
                    phone.kill()

            seed = random.randrange(1 << 32)
            await phone.live(Life(str(tmp_path / "app.db"), AWAY, "phone", number, seed, 8), on_report)

        def on_last(members: dict[str, Any]) -> None:
            last.update(members)
            if "idle" in members:
                phone.kill()

        await phone.live(Life(str(tmp_path / "app.db"), AWAY, "phone", KILLS, 0, 0), on_last)
    assert ledger.added
    assert ledger.appended
    ledger.check_documents(last["documents"])
    for key, found in last["logs"].items():
        ledger.check_log(key, found)
