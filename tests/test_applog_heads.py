"""What a node knows of logs without asking the store, and how much of it."""

import pytest
from log_nodes import Node, numbered

from pysync.applog import heads


async def gets(node: Node, key: str) -> int:
    """How often an append to this log reads."""
    before = node.calls["get"]
    await node.append({}, key=key)
    return node.calls["get"] - before


async def test_the_heads_of_the_logs_met_last_are_known_and_no_more(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "HELD_BYTES", 20_000)
    keys = [f"logs/{n}" for n in range(40)]
    for key in keys:
        await node.append(*numbered(5), key=key)
    assert [await gets(node, key) for key in keys[-5:]] == [0] * 5
    assert [await gets(node, key) for key in keys[:5]] == [1] * 5
    for _ in range(100):
        await gets(node, keys[-1])
    assert [await gets(node, key) for key in (*keys[:5], keys[-1])] == [0] * 6, "each counts once"
