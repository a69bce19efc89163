"""The judge on histories of a service in miniature: the good one passes, each flawed one is found out."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.depth import depth

from proof.judge import judge_operations
from proof.simulated import Clients, Flaw


@settings(max_examples=depth(20, 240))
@given(seed=st.integers(0, 2**32), clients=st.integers(1, 12), ticks=st.integers(0, 1500))
def test_a_service_that_keeps_its_promises_always_passes(seed: int, clients: int, ticks: int) -> None:
    history = Clients(Random(seed), clients=clients).run(ticks)
    assert str(judge_operations(history)).endswith("every promise was kept")


@pytest.mark.parametrize(
    ("flaw", "promise"),
    [
        ("forgets a push", "nothing lost"),
        ("ignores a base", "one winner"),
        ("writes and says conflict", "refused is not done"),
        ("pulls what was", "real time"),
        ("forgets an append", "nothing lost"),
        ("appends twice", "once"),
        ("appends first", "true answers"),
        ("tells an old tail", "real time"),
        ("forgets a file", "real time"),
        ("writes a file twice", "real time"),
        ("tears a file", "whole files"),
        ("pulls an old file", "real time"),
        ("forgets a nonce", "no replay"),
        ("remembers no Idempotency-Key", "once"),
        ("counts each node apart", "limits hold"),
        ("feeds not every change", "fed each write"),
        ("feeds an older version", "fed each write"),
        ("feeds a change again", "fed once"),
        ("forgets its feed", "fed from the oldest"),
        ("leads back", "fed in order"),
    ],
)
def test_each_flaw_is_found(flaw: Flaw, promise: str) -> None:
    for seed in range(2, 5):
        history = Clients(Random(seed), flaw).run(2500)
        found = {violation.promise for violation in judge_operations(history).violations}
        assert promise in found, f"seed {seed}: {found}"


def test_the_histories_hold_something_of_everything() -> None:
    counts = judge_operations(Clients(Random(1)).run(6000)).counts
    for name in (
        "push 200", "push 409", "push unknown", "pull 200", "pull 304", "append 200", "append 401",
        "append unknown", "tail 200", "replay 401", "metered 200", "metered 429", "upload 200",
        "upload unknown", "download 200", "download 304", "changes 200", "changes unknown",
        "change on a page",
    ):  # fmt: skip
        assert counts[name] >= 10, counts
