"""Replaces what is damaged in a store by the same version from a backup."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pysync.backup.format import BackupEntry
from pysync.backup.pack import PackReader
from pysync.backup.restore import find_versions, parts_of_log
from pysync.backup.snapshot import BackupDamaged, Repository
from pysync.engine.append_log import log_prefix
from pysync.errors import DocumentCorrupt
from pysync.migrate import Damage
from pysync.migrate.reading import as_object
from pysync.migrate.verify import VerificationError, check_stored, expand_node
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
        """Replace each damaged object by the version that the backup has under the same etag; of a part of a
        log, which never changes, by one that its head accepts. A write that comes first wins. Raises
        StoreUnavailable, and ValueError if the key of the backup does not open it."""
        self._repository.check_readable()
        found = {damage.key: damage for damage in sorted(damages, key=lambda one: one.head_key)}
        versions = await find_versions(self._repository, found.keys()) if found else {}
        for key, damage in found.items():
            try:
                await self._repair(damage, [one.entry for one in versions.get(key, ())])
            except NotRepaired as error:
                self.report.not_repaired += 1
                self._on_outcome(key, str(error))
            else:
                self.report.repaired += 1
                self._on_outcome(key, None)

    async def _repair(self, damage: Damage, versions: Sequence[BackupEntry]) -> None:
        """Put the first version that is sound. Raises NotRepaired."""
        key, is_file = damage.key, damage.kind == "file"
        if not versions:
            raise NotRepaired("the backup does not have it")
        expect: Precondition = ABSENT
        if is_file:
            etag = await self._damaged_etag(key)
            versions = [entry for entry in versions if entry.etag == etag and entry.is_file]
        else:
            stored = as_object(await self._store.get(key))
            if stored is not None:
                expect = Etag(stored.etag)
            if not key.startswith(log_prefix("")):
                versions = [entry for entry in versions if stored is not None and entry.etag == stored.etag]
        if not versions:
            raise NotRepaired("the backup has other versions of it, but not this one")
        why = ""
        for entry in versions:
            try:
                await (self._put_file(entry) if is_file else self._put(damage, entry, expect))
                return
            except EtagMismatch:
                raise NotRepaired("it was written meanwhile") from None
            except (BackupDamaged, VerificationError) as error:
                why = str(error)
        raise NotRepaired(f"that in the backup is damaged, too: {why}")

    async def _put(self, damage: Damage, entry: BackupEntry, expect: Precondition) -> None:
        """Put an object if it is sound, and look whether it is sound then."""
        body = await self._packs.body(entry)
        await self._check(damage, body)
        await self._store.put(entry.key, body, entry.content_type, expect)
        stored = as_object(await self._store.get(entry.key))
        if stored is None:
            raise EtagMismatch
        await self._check(damage, stored.body)

    async def _check(self, damage: Damage, body: bytes) -> None:
        """Raise VerificationError unless this is a sound object, and what the head of its log names."""
        await check_stored(damage.key, body)
        if not damage.head_key:
            return
        try:
            async for at, head, node in parts_of_log(self._store, damage.head_key):
                if at == damage.key:
                    expand_node(head, node, body)
                    return
        except DocumentCorrupt:
            raise VerificationError("the head of its log, or the index, is damaged") from None
        raise VerificationError("the head of its log does not name it any more")

    async def _put_file(self, entry: BackupEntry) -> None:
        """Write a file, and look whether it is sound then."""

        async def check(sha256: str) -> None:
            if await self._damaged_etag(entry.key) != entry.etag:
                raise EtagMismatch

        await self._store.write(entry.key, self._packs.chunks(entry), entry.content_type, check)
        try:
            await self._store.verify(entry.key)
        except DamagedFile as error:
            raise VerificationError(error.detail) from None

    async def _damaged_etag(self, key: str) -> str:
        """Return the etag of a damaged file. Raises NotRepaired if there is a sound one, or none."""
        try:
            await self._store.verify(key)
        except DamagedFile as error:
            return error.etag
        raise NotRepaired("it was written meanwhile")
