"""What tests are made of, ours and those of plugin authors: the contracts, and a store that fails on demand.

A contract is a class of pytest tests. Inherit it, and give the fixture it asks for:

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
from pysync.testing.stores import StoreContract, chunks_of, read_file

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
    "change",
    "chunks_of",
    "read_file",
]
