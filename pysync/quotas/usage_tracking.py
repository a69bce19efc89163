"""Switches the counters of usage on or off, as the configuration says."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pysync.config import Collection, Config
from pysync.coordinator import Coordinator
from pysync.plugins.hooks import Hooks
from pysync.quotas.accounts import Accounts
from pysync.quotas.bucket import BucketLedger, CountedStore
from pysync.quotas.recount import Recount
from pysync.quotas.usage_count import UsageCount
from pysync.store import Store


class Tracked(NamedTuple):
    """The store to use, and without quotas nothing else: the accounts, and the count that runs now and
    then."""

    store: Store
    accounts: Accounts | None = None
    counter: UsageCount | Recount | None = None


async def track_usage(
    config: Config,
    store: Store,
    coordinator: Coordinator,
    plugins: Sequence[object],
    now_ms: Callable[[], int],
) -> Tracked:
    """Switch the counters of a folder on if the configuration has quotas, else off. Other stores are counted
    in this process. Raises StoreUnavailable."""
    transactional = store.transactional
    if config.quotas is None:
        if transactional is not None:
            await transactional.stop_tracking_usage()
        return Tracked(store)
    stored = Hooks(plugins).stored_files
    files = {name: (each.template, each.suffix) for name, each in stored.items()}
    accounts = Accounts(config, files, by_key=transactional is None)
    limits = config.quotas.limits()
    if transactional is not None:
        await transactional.track_usage(limits, accounts.charge_of)
        ledger = transactional.ledger
        assert ledger is not None
        return Tracked(store, accounts, UsageCount(store, ledger, accounts))

    def stores_files(collection: Collection) -> bool | None:
        if collection.name in stored:
            return True
        return (None if collection.accepts_json else True) if collection.file_types else False

    bucket_ledger = BucketLedger(store, limits)
    await bucket_ledger.read()
    counter = Recount(store, bucket_ledger, coordinator, accounts, now_ms, stores_files)
    return Tracked(CountedStore(store, bucket_ledger, accounts, now_ms), accounts, counter)
