"""The replay window remembers every nonce, in little memory."""

import hashlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pysync._core as core


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=60))
def test_a_replay_window_is_a_set(steps: list[tuple[bool, int]]) -> None:
    window, seen = core.ReplayWindow(), set[bytes]()
    for single, number in steps:
        digest = core.ReplayWindow.digest("key", str(number))
        if single:
            assert window.add(digest) == (digest not in seen)
        else:
            window.extend(digest * 2 + b"rest")
        seen.add(digest)
        assert digest in window
    assert len(window) == len(seen)
    assert core.ReplayWindow.digest("key", "another") not in window


def test_a_digest_depends_on_where_the_presenter_ends() -> None:
    digest = core.ReplayWindow.digest("ab", "c")
    assert digest == hashlib.sha256(b"ab\0c").digest()[:16]
    assert digest != core.ReplayWindow.digest("a", "bc")


@pytest.mark.parametrize("digest", [b"", b"x" * 15, b"x" * 17])
def test_a_digest_of_another_length_is_rejected(digest: bytes) -> None:
    window = core.ReplayWindow()
    with pytest.raises(ValueError, match="16 bytes"):
        window.add(digest)
    with pytest.raises(ValueError, match="16 bytes"):
        digest in window  # noqa: B015


REPLAY_MEMORY = """
import os, psutil, pysync._core as core
resident = lambda: psutil.Process().memory_info().rss
window, before = core.ReplayWindow(), resident()
for _ in range(1000):
    chunk = os.urandom(16 * 1000)
    for at in range(0, len(chunk), 16):
        window.add(chunk[at : at + 16])
print(len(window), resident() - before)
"""


@pytest.mark.process
def test_a_million_nonces_take_at_most_sixty_four_bytes_each() -> None:
    done = subprocess.run([sys.executable, "-c", REPLAY_MEMORY], capture_output=True, text=True, check=True)
    count, grown = map(int, done.stdout.split())
    assert count == 1_000_000
    assert 16 <= grown / count <= 64
