"""The bench of overload: what it tells of a row, and that a generator which limits says so."""

import dataclasses
import json
import math
from array import array

import pytest

from benches import overload
from benches.attacks import PARTS
from benches.open_loop import Sent, Timeline
from benches.overload import ROWS, Outcome, Row, Settings

SHORT = Settings(seconds=0.5, recover_s=0.5, rate=100.0, scale=0.02)
ROW = {row.name: row for row in ROWS}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("name", ["junk-5", "streams-5000"])
def test_a_row_is_measured(name: str) -> None:
    found = overload.measure(ROW[name], SHORT)
    assert found.row == name
    assert 0.0 <= found.share <= 1.0
    assert 0.0 <= found.p50_ms <= found.p99_ms
    assert sum(found.tally.values()) > 0
    assert 0.0 < found.before_mb <= found.peak_mb
    assert found.admin_ms is None or found.admin_ms >= 0.0
    assert json.loads(json.dumps(dataclasses.asdict(found)))["row"] == name
    lines = overload.table({name: found}).splitlines()
    assert len(lines) == 3
    assert len({line.count("|") for line in lines}) == 1


def test_every_row_has_a_part_and_a_name_of_its_own() -> None:
    assert {row.part for row in ROWS} <= set(PARTS)
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_timelines_are_merged_in_the_order_of_what_is_due() -> None:
    good = Timeline.evenly([b"a", b"b"], rate=1.0)
    junk = Timeline.evenly([b"x"], rate=1.0, kind=1, first_s=0.5)
    merged = good.merged(junk)
    assert (merged.requests, list(merged.due_s), merged.kinds) == (
        [b"a", b"x", b"b"],
        [0.0, 0.5, 1.0],
        b"\0\1\0",
    )


def sent(*answers: tuple[float, int, float]) -> Sent:
    """When each request was due, its status, and what it took."""
    due, statuses, took = zip(*answers, strict=True)
    none = array("d", bytes(8 * len(due)))
    return Sent(array("d", due), bytes(len(due)), array("H", statuses), array("d", took), none, 0)


def test_it_is_over_when_all_are_answered_in_time_for_a_while() -> None:
    good = [(1.0 + n / 10 + 0.01, 200, 0.05) for n in range(20)]
    assert overload._recovery(sent(*good), 1.0, 3.0) == 0.0
    slow = [(due, 200, 0.5 if due < 1.7 else took) for due, _, took in good]
    assert overload._recovery(sent(*slow), 1.0, 3.0) == pytest.approx(0.7)
    lost = [(due, 0, 0.0) for due, *_ in good]
    assert overload._recovery(sent(*lost), 1.0, 3.0) is None


@pytest.mark.parametrize("changed", [{"lag_ms": 50.0}, {"busy": 0.99}, {"held": 1}])
def test_a_generator_that_limits_says_so(changed: dict[str, float]) -> None:
    found = Outcome(
        "junk-5",
        0.5,
        1.0,
        2.0,
        2000.0,
        {"none": 3},
        9.0,
        None,
        80.0,
        math.nan,
        math.nan,
        None,
        {},
        1.0,
        0,
        0.2,
    )
    row = Row("junk-5", "junk", 5, 0.85, "")
    assert "it limits" not in overload.table({"junk-5": found}, [row])
    assert "it limits" in overload.table({"junk-5": dataclasses.replace(found, **changed)}, [row])  # type: ignore[arg-type]
