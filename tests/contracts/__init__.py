"""The promises of each interface as tests, which every implementation of it inherits.

A contract is a class of pytest tests. Inherit from it, and provide the fixture that it names:

    class TestMyStore(StoreContract):
        @pytest.fixture
        async def store(self):
            store = await MyStore.at(...)
            yield store
            await store.close()
"""
