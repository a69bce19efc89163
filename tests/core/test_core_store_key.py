"""Keys are split and rejected as the twin does it."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import reference
from support.depth import depth

from pysync import _core


@settings(max_examples=depth(300, 5000), deadline=None)
@given(st.text(st.sampled_from("ab/.é\0\ud800\n"), max_size=10))
def test_a_key_is_split_or_rejected_as_by_the_twin(key: str) -> None:
    def outcome(split: Callable[[str], tuple[str, str]]) -> tuple[str, str] | None:
        try:
            return split(key)
        except ValueError:
            return None

    assert outcome(_core.split_key) == outcome(reference.split_key)


def test_the_error_quotes_the_key() -> None:
    with pytest.raises(ValueError, match=r"^not a key: 'a//b\\x00'$"):
        _core.split_key("a//b\0")
