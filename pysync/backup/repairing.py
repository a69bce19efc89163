"""Replaces what is damaged in a store by the same version from a backup."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pysync.backup.encoding import BackupEntry
from pysync.backup.repository import BackupDamaged, Repository
from pysync.backup.restoring import PackReader
from pysync.engine.append_log import log_prefix
from pysync.migrate import Damage
from pysync.migrate.reading import as_object
from pysync.migrate.verify import VerificationError, check_stored
from pysync.store import ABSENT, DamagedFile, Etag, EtagMismatch, Precondition, Store


@dataclass(slots=True)
class RepairReport:
    """The number of objects that were repaired, and of those that were not."""

    repaired: int = 0
    not_repaired: int = 0


class NotRepaired(Exception):
    """An object is left as it is; the text has the reason."""


class Repairer:
    """Repairs the objects of `store`, which servers may use meanwhile, from a backup of it. `on_outcome` is
    called with each key, and the reason why it was not repaired, or None."""

    def __init__(
        self,
        repository: Repository,
        store: Store,
        on_outcome: Callable[[str, str | None], None],
        report: RepairReport | None = None,
    ) -> None:
        self.report = report or RepairReport()
        self._repository = repository
        self._packs = PackReader(repository)
        self._store = store
        self._on_outcome = on_outcome

    async def repair(self, damages: Iterable[Damage]) -> None:
        """Replace each damaged object by the version that the backup has under the same etag. An object of a
        log, which never changes, needs only the same key. A write that comes first wins. Raises
        StoreUnavailable, and ValueError if the key of the backup does not open it."""
        self._repository.check_readable()
        found = {damage.key: damage for damage in damages}
        entries = await self._find({*found})
        for key, damage in found.items():
            try:
                await self._repair(damage, entries[key])
            except NotRepaired as error:
                self.report.not_repaired += 1
                self._on_outcome(key, str(error))
            else:
                self.report.repaired += 1
                self._on_outcome(key, None)

    async def _find(self, keys: set[str]) -> dict[str, list[BackupEntry]]:
        """Return the versions of these keys that all snapshots have, as far as they can be read."""
        found: dict[str, list[BackupEntry]] = defaultdict(list)
        pages: dict[str, None] = {}
        for name in reversed(await self._repository.snapshot_names()) if keys else ():
            try:
                snapshot = await self._repository.read_snapshot(name)
            except BackupDamaged:
                continue
            pages |= {page: None for run in snapshot.runs for page in run.pages}
        for page in pages:
            try:
                entries = await self._repository.read_page(page)
            except BackupDamaged:
                continue
            for entry in entries:
                if entry.key in keys and entry.etag:
                    found[entry.key].append(entry)
        return found

    async def _repair(self, damage: Damage, versions: list[BackupEntry]) -> None:
        key = damage.key
        if not versions:
            raise NotRepaired("the backup does not have it")
        if damage.kind == "file":
            await self._repair_file(key, versions)
            return
        stored = as_object(await self._store.get(key))
        same = [entry for entry in versions if stored is not None and entry.etag == stored.etag]
        if key.startswith(log_prefix("")):
            same = versions
        if not same:
            raise NotRepaired("the backup has other versions of it, but not this one")
        expect: Precondition = ABSENT if stored is None else Etag(stored.etag)
        try:
            body = await self._packs.body(same[0])
            if not key.startswith(log_prefix("")):
                await check_stored(key, body)
            await self._store.put(key, body, same[0].content_type, expect)
        except EtagMismatch:
            raise NotRepaired("it was written meanwhile") from None
        except (BackupDamaged, VerificationError) as error:
            raise NotRepaired(f"that in the backup is damaged, too: {error}") from None

    async def _repair_file(self, key: str, versions: list[BackupEntry]) -> None:
        etag = await self._damaged_etag(key)
        same = [entry for entry in versions if entry.etag == etag and entry.is_file]
        if not same:
            raise NotRepaired("the backup has other versions of it, but not this one")

        async def check(sha256: str) -> None:
            if await self._damaged_etag(key) != etag:
                raise EtagMismatch

        try:
            await self._store.write(key, self._packs.chunks(same[0]), same[0].content_type, check)
        except EtagMismatch:
            raise NotRepaired("it was written meanwhile") from None
        except BackupDamaged as error:
            raise NotRepaired(f"that in the backup is damaged, too: {error}") from None

    async def _damaged_etag(self, key: str) -> str:
        """Return the etag of a damaged file. Raises NotRepaired if there is a sound one, or none."""
        try:
            await self._store.verify(key)
        except DamagedFile as error:
            return error.etag
        raise NotRepaired("it was written meanwhile")
