"""Test support for pysync and its plugins: contract tests, a store that fails on demand, and a clock that
tests move.

A contract is a class of pytest tests. Inherit from it, and provide the fixture that it names:

    class TestMyStore(StoreContract):
        @pytest.fixture
        async def store(self):
            store = await MyStore.at(...)
            yield store
            await store.close()
"""

from pysync.testing.coordinators import (
    RETENTION,
    BoundedNoncesContract,
    ChangeLogContract,
    CoordinatorContract,
    LeaseContract,
    change,
)
from pysync.testing.faults import Advance, FakeClock, FaultyStore
from pysync.testing.stores import StoreContract, TransactionalStoreContract, chunks_of, read_file

__all__ = [
    "RETENTION",
    "Advance",
    "BoundedNoncesContract",
    "ChangeLogContract",
    "CoordinatorContract",
    "FakeClock",
    "FaultyStore",
    "LeaseContract",
    "StoreContract",
    "TransactionalStoreContract",
    "change",
    "chunks_of",
    "read_file",
]
