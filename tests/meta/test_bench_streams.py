"""The bench of change streams: every write is heard by everybody, or there is no figure."""

import asyncio
from pathlib import Path

import pytest

from benches import servers, streams
from benches.streams import Deliveries, listen
from benches.workloads import Author

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SETTLE_S", 0.0)


def test_streams_and_writes_are_measured(tmp_path: Path) -> None:
    with servers.serving(tmp_path / "data") as server:
        for signed in (False, True):
            idle = asyncio.run(streams.idle(server, 5, 0.2, signed=signed))
            assert (idle.streams, idle.cpu > 0) == (5, True)
        heard = asyncio.run(streams.heard(server, 3, 0.5))
    assert heard.listeners == 3
    assert 0 < heard.p50_ms <= heard.p99_ms <= heard.most_ms


def test_what_is_refused_is_no_stream(tmp_path: Path) -> None:
    with servers.serving(tmp_path / "data") as server:
        refused = [Author(server.url).request("/events?collections=private")]
        with pytest.raises(RuntimeError, match=r"refused: .*401"):
            asyncio.run(listen(server.url, refused, Deliveries()))
