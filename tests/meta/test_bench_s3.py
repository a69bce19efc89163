"""The benches of the S3 store: what they count is what there is, and what it may cost at most holds."""

import asyncio
from collections.abc import Iterator

import pytest
from components import S3Server

from benches import s3, s3_cost, servers
from benches.s3_stub import GIVEN
from benches.workloads import DOCUMENT_BYTES
from pysync.config import StoreConfig
from pysync.store import ABSENT, Etag, EtagMismatch, NotModified, StoredObject, open_store


@pytest.fixture(scope="module")
def stub() -> Iterator[servers.Running]:
    with servers.s3_stub() as running:
        yield running


@pytest.mark.slow
async def test_nothing_costs_more_requests_to_s3_than_its_goal(moto: S3Server) -> None:
    rows = {row.asked: row for row in await s3.trips(moto)}
    for row in rows.values():
        assert row.goal is None or 0 < row.calls.total() <= row.goal, s3.table([row])
    assert rows["pull of it again"].statuses == {304: 1}
    assert rows["batch of 100, the first"].at_once == 100
    assert rows["list, a page of 100"].calls == {"LIST": 1}


@pytest.mark.process
async def test_the_stub_keeps_conditions(stub: servers.Running) -> None:
    config = StoreConfig(
        url="s3://bench", endpoint=stub.url, force_path_style=True, access_key_id="a", secret_access_key="b"
    )
    store = await open_store(config, shared=True)
    try:
        etag = await store.put("a", b"one", expect=ABSENT)
        for wrong in (ABSENT, Etag("0" * 32)):
            with pytest.raises(EtagMismatch):
                await store.put("a", b"two", expect=wrong)
        await store.put("a", b"two", expect=Etag(etag))
        found, given = await store.get("a"), await store.get(f"{GIVEN}x")
        assert isinstance(found, StoredObject)
        assert found.body == b"two"
        assert isinstance(given, StoredObject)
        assert len(given.body) == DOCUMENT_BYTES
        assert isinstance(await store.get("a", found.etag), NotModified)
    finally:
        await store.close()


@pytest.mark.slow
def test_both_clients_are_measured_in_turn(stub: servers.Running) -> None:
    found = asyncio.run(s3_cost.measure(stub.url, rounds=2, count=s3_cost.AT_ONCE))
    assert list(found) == ["get", "put"]
    for turns in found.values():
        assert len(turns) == 2
        assert all(turn.ours_us > 0 and turn.plain_us > 0 for turn in turns)
    assert "| get |" in s3_cost.table(found)
