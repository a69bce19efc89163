"""Strangers with forged certificates are refused before these are examined, and starve nobody."""

import base64
import os

import pytest
from support.clients import STRANGER, root_device

from pysync.auth import admission
from pysync.auth.admission import (
    BUDGET_PER_S,
    BURST_S,
    BURST_SHARE,
    FORGERY_MS,
    MAX_ADDRESSES,
    MAX_FORGERIES,
    MAX_WAIT_MS,
    CertificateGate,
    FailureLog,
    VerificationBudget,
    network_of,
)
from pysync.errors import Overloaded, Unauthorized
from pysync.testing import FakeClock

PER_MINUTE = 600
BURST = PER_MINUTE // BURST_SHARE


def forged() -> str:
    return "Cap " + base64.b64encode(os.urandom(30)).decode()


class Gate(CertificateGate):
    """A gate whose clocks are set by hand. Each certificate takes `cost_s`."""

    def __init__(self, clock: FakeClock, cost_s: float = 0.0, per_minute: int = PER_MINUTE) -> None:
        self.clock = clock
        self.cpu = 0.0
        self.cost_s = cost_s
        self.refused: list[str] = []
        super().__init__(per_minute, clock, lambda metric, reason: self.refused.append(reason), self.used)

    def used(self) -> float:
        self.cpu += self.cost_s
        return self.cpu

    def outcome(self, authorization: str, address: str) -> int:
        """The status that a certificate is answered with."""
        try:
            self.open(authorization, address)
        except Unauthorized:
            self.failures.add(address)
            return 401
        except Overloaded:
            return 503
        return 200


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1_000_000)


@pytest.mark.parametrize(
    ("ip", "counted"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("2001:db8:1:2:3:4:5:6", "20010db800010002::/64"),
        ("2001:db8:1:2::1%eth0", "20010db800010002::/64"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("", ""),
        ("no:address", "no:address"),
    ],
)
def test_addresses_count_as_networks(ip: str, counted: str) -> None:
    assert network_of(ip) == counted


def test_two_networks_are_counted_apart() -> None:
    assert network_of("2001:db8:1:2::1") != network_of("2001:db8:1:3::1")


def test_an_address_with_too_many_failures_waits_until_it_has_made_none_for_a_second(
    clock: FakeClock,
) -> None:
    log = FailureLog(PER_MINUTE, clock)
    for _ in range(BURST):
        assert log.wait_ms("a") <= 0
        log.add("a")
    log.add("a")
    assert log.wait_ms("a") > 0
    assert log.wait_ms("b") <= 0
    for _ in range(10 * PER_MINUTE):
        log.add("a")
    assert log.wait_ms("a") == MAX_WAIT_MS
    clock.now_ms += MAX_WAIT_MS
    assert log.wait_ms("a") <= 0


def test_failures_at_the_allowed_rate_are_always_allowed(clock: FakeClock) -> None:
    log = FailureLog(PER_MINUTE, clock)
    for _ in range(10 * PER_MINUTE):
        log.add("a")
        assert log.wait_ms("a") <= 0
        clock.now_ms += 60_000 // PER_MINUTE


def test_the_addresses_that_are_remembered_are_bounded(clock: FakeClock) -> None:
    log = FailureLog(PER_MINUTE, clock)
    for n in range(MAX_ADDRESSES + 1000):
        log.add(f"{n}")
        log.add("busy")
    assert len(log) == MAX_ADDRESSES
    assert log.wait_ms("busy") > 0


def test_without_a_limit_nothing_is_counted(clock: FakeClock) -> None:
    log = FailureLog(0, clock)
    for _ in range(10_000):
        log.add("a")
    assert log.wait_ms("a") <= 0
    assert len(log) == 0


def test_beyond_its_failures_an_address_is_rejected_without_an_examination(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(clock)
    assert [gate.outcome(forged(), "a") for _ in range(BURST)] == [401] * BURST
    gate.failures.add("a")
    monkeypatch.setattr(admission, "open_certificate", None)
    with pytest.raises(Overloaded) as refused:
        gate.open(forged(), "a")
    assert refused.value.headers["Retry-After"] == "1"
    assert gate.refused == ["address"]


def test_another_address_is_admitted_meanwhile(clock: FakeClock) -> None:
    gate = Gate(clock)
    for _ in range(2 * BURST):
        gate.outcome(forged(), "a")
    assert gate.outcome(root_device(STRANGER).authorization, "b") == 200


def test_a_forgery_that_comes_again_is_rejected_without_an_examination(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, forgery = Gate(clock), forged()
    assert gate.outcome(forgery, "a") == 401
    with monkeypatch.context() as patched:
        patched.setattr(admission, "open_certificate", None)
        assert gate.outcome(forgery, "b") == 401
        clock.now_ms += FORGERY_MS - 1
        assert gate.outcome(forgery, "c") == 401
    clock.now_ms += 2 * FORGERY_MS
    assert gate.outcome(forged(), "a") == 401
    clock.now_ms += 2 * FORGERY_MS
    assert gate.outcome(forgery, "a") == 401
    assert gate.refused == ["forged"] * 2


def test_the_forgeries_that_are_remembered_are_bounded(clock: FakeClock) -> None:
    gate = Gate(clock, per_minute=0)
    for _ in range(2 * MAX_FORGERIES + 10):
        assert gate.outcome(forged(), "a") == 401
    assert len(gate._forged) + len(gate._forged_before) <= 2 * MAX_FORGERIES


def test_one_address_leaves_half_of_the_budget_to_others(clock: FakeClock) -> None:
    gate = Gate(clock, cost_s=0.01, per_minute=0)
    outcomes = [gate.outcome(forged(), "a") for _ in range(100)]
    assert outcomes.count(401) == pytest.approx(BURST_S / 2 / 0.01, abs=1)
    assert gate.outcome(root_device(STRANGER).authorization, "b") == 200
    assert set(gate.refused) == {"budget"}


def test_many_addresses_use_no_more_than_the_budget(clock: FakeClock) -> None:
    gate = Gate(clock, cost_s=0.01, per_minute=0)
    for second in range(5):
        for n in range(200):
            gate.outcome(forged(), f"{second} {n}")
        clock.now_ms += 1000
    assert gate.cpu / 2 <= BURST_S + 5 * BUDGET_PER_S + 0.1


def test_the_budget_returns_with_time(clock: FakeClock) -> None:
    budget = VerificationBudget(clock)
    budget.spend("a", 2 * BURST_S)
    assert not budget.admits("b")
    clock.now_ms += int(BURST_S / BUDGET_PER_S * 1000) + 100
    assert budget.admits("b")
