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

from pysync.testing.change_logs import RETENTION, ChangeLogContract, change
from pysync.testing.coordinators import BoundedNoncesContract, CoordinatorContract, LeaseContract
from pysync.testing.faults import Advance, FakeClock, FaultyStore
from pysync.testing.files import chunks_of, read_file
from pysync.testing.stores import StoreContract, TransactionalStoreContract

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
