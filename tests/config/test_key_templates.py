"""The keys that are made of a template and the values of its parameters."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pysync._core import split_key
from pysync.config.key_templates import resolve_document_key

TEMPLATE = "events/{app}/{batchId}"


def test_each_parameter_is_replaced_by_its_value() -> None:
    assert resolve_document_key(TEMPLATE, {"app": "a@b", "batchId": "1-2"}) == "events/a@b/1-2"
    assert resolve_document_key("settings", {}) == "settings"


@pytest.mark.parametrize(
    ("template", "values", "message"),
    [
        (TEMPLATE, {"app": "a"}, "the parameter {batchId} has no value"),
        (TEMPLATE, {"app": "a", "batchId": "1", "id": "2"}, "'id' is no parameter of the template"),
        (TEMPLATE, {"app": "..", "batchId": "1"}, "{app} must be 1 to 255 of"),
        (TEMPLATE, {"app": "a..b", "batchId": "1"}, "{app} must be 1 to 255 of"),
        (TEMPLATE, {"app": "a/b", "batchId": "1"}, "{app} must be 1 to 255 of"),
        (TEMPLATE, {"app": "", "batchId": "1"}, "{app} must be 1 to 255 of"),
        (TEMPLATE, {"app": "a\n", "batchId": "1"}, "{app} must be 1 to 255 of"),
        (TEMPLATE, {"app": "a" * 256, "batchId": "1"}, "{app} must be 1 to 255 of"),
        (TEMPLATE, {"app": 1, "batchId": "1"}, "{app} must be 1 to 255 of"),
        ("/a/{id}", {"id": "1"}, "the template must not start or end with a slash"),
        ("{a}/x", {"a": "_pysync"}, "the key starts with _pysync"),
        ("/".join(f"{{p{at}}}" for at in range(5)), {f"p{at}": "v" * 250 for at in range(5)}, "1254 bytes"),
    ],
)
def test_value_that_makes_no_key_is_rejected_and_reported(
    template: str, values: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve_document_key(template, values)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ValueError, match=r"\{app\} has no value; 'ap' is no parameter .*; \{batchId\} must"):
        resolve_document_key(TEMPLATE, {"ap": "a", "batchId": "x y"})


@given(st.text(max_size=300), st.text(max_size=4))
def test_a_key_is_one_that_every_store_takes(app: str, batch_id: str) -> None:
    try:
        key = resolve_document_key(TEMPLATE, {"app": app, "batchId": batch_id})
    except ValueError:
        return
    split_key(key)
    assert key.count("/") == 2
