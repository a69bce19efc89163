"""Switches the counters of usage on or off, as the configuration says."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pysync.config import Collection, Config
from pysync.coordinator import Coordinator
from pysync.engine.accounts import Accounts
from pysync.engine.counted_store import CountedStore
from pysync.engine.recount import Recount
from pysync.engine.usage_count import UsageCount
from pysync.plugins.hooks import Hooks
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
    """Switch the counters on if the configuration has quotas, else off. A folder has its own, and for other
    stores they are in the coordinator. Raises Unavailable."""
    transactional = store.transactional
    if config.quotas is None:
        if transactional is not None:
            await transactional.stop_tracking_usage()
        else:
            await coordinator.usage.clear()
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

    counter = Recount(store, coordinator, accounts, now_ms, stores_files)
    return Tracked(CountedStore(store, coordinator.usage, limits, accounts, now_ms), accounts, counter)
