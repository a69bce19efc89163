"""What tests are made of, ours and those of plugin authors: the contracts, a store and a proxy
that fail on demand.

A contract is a class of pytest tests. Inherit it, and give the fixture it asks for:

    class TestMyStore(StoreContract):
        @pytest.fixture
        async def store(self):
            store = await MyStore.at(...)
            yield store
            await store.close()
"""

from pysync.testing.change_logs import RETENTION, ChangeLogContract, change
from pysync.testing.coordinators import BoundedNoncesContract, CoordinatorContract, LeadersContract
from pysync.testing.faults import FaultyStore
from pysync.testing.injected import s3_error
from pysync.testing.proxy import FaultProxy
from pysync.testing.relay import Sent
from pysync.testing.stores import StoreContract, chunks_of, read_file
from pysync.testing.times import Advance, MovedClock

__all__ = [
    "RETENTION",
    "Advance",
    "BoundedNoncesContract",
    "ChangeLogContract",
    "CoordinatorContract",
    "FaultProxy",
    "FaultyStore",
    "LeadersContract",
    "MovedClock",
    "Sent",
    "StoreContract",
    "change",
    "chunks_of",
    "read_file",
    "s3_error",
]
