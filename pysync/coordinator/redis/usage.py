"""The usage totals of many nodes, in Redis.

pysync:u:<since>        the totals, a hash: the amount of each kind (0 to 3) of each subject, and `counted`
pysync:u:<since>:next   those of a count that is under way, and `at`: its token, and the key that it passed

`<since>` is the time since which Redis remembers everything, so after a loss of memory there are no totals.
Totals that no count has replaced for a week are forgotten.
"""

from collections.abc import Collection, Iterable, Mapping
from math import inf
from typing import Any, Final

from pysync.coordinator.redis.connection import Command
from pysync.coordinator.redis.epoch import EpochGuard
from pysync.errors import QuotaExceeded
from pysync.model import USAGE_NAMES, Addition, Usage

PREFIX: Final = "pysync:u:"
TTL_MS: Final = 7 * 86_400_000

# Keys are compared as hex digits: the order of other texts depends on the locale of Redis.
_ADD_AMOUNTS: Final = """
local function add(to, at)
    local total = redis.call('HINCRBY', to, ARGV[at], ARGV[at + 1])
    if total == 0 then redis.call('HDEL', to, ARGV[at]) end
end"""
_FIRST: Final = 4
"""Number of the first field with a limit among the arguments; it precedes the most that the field may contain
before the addition. Before these are the key, the number of the first field with its amount, and the number
of the first argument behind the amounts."""
_ADD: Final = f"""{_ADD_AMOUNTS}
for i = {_FIRST}, ARGV[2] - 1, 2 do
    local used = tonumber(redis.call('HGET', KEYS[1], ARGV[i]) or 0)
    if used > tonumber(ARGV[i + 1]) then return {{-1, i, used}} end
end
local at = redis.call('HGET', KEYS[2], 'at')
local counts = at and ARGV[1] ~= '' and ARGV[1] <= string.match(at, ' (.*)')
for i = ARGV[2] + 0, ARGV[3] - 1, 2 do
    add(KEYS[1], i)
    if counts then add(KEYS[2], i) end
end
redis.call('PEXPIRE', KEYS[1], {TTL_MS}, 'NX')
local in_count = counts and 1 or 0
"""
_ONLY_ADD: Final = f"{_ADD} return {{in_count}}"
_PREPARE: Final = f"{_ADD} return {{in_count, redis.call('XADD', KEYS[3], '*', unpack(ARGV, ARGV[3] + 0))}}"
# XDEL comes last: in a Redis without memory left it succeeds, and the additions fail.
_ABORT: Final = f"""
local name = ARGV[ARGV[3] + 0]
if #redis.call('XRANGE', KEYS[3], name, name) == 0 then return {{0}} end
{_ADD} redis.call('XDEL', KEYS[3], name)
return {{in_count}}"""
_COUNT: Final = f"""{_ADD_AMOUNTS}
local at = redis.call('HGET', KEYS[1], 'at')
if not at or string.match(at, '[^ ]*') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'at', ARGV[1] .. ' ' .. ARGV[2])
for i = 3, #ARGV, 2 do add(KEYS[1], i) end
return 1"""
_END: Final = f"""
local at = redis.call('HGET', KEYS[2], 'at')
if not at or string.match(at, '[^ ]*') ~= ARGV[1] then return 0 end
redis.call('HDEL', KEYS[2], 'at')
redis.call('HSET', KEYS[2], 'counted', ARGV[2])
redis.call('RENAME', KEYS[2], KEYS[1])
redis.call('PEXPIRE', KEYS[1], {TTL_MS})
return 1"""


class RedisUsage:
    """The `UsageTotals` of a coordinator in Redis."""

    def __init__(self, epoch: EpochGuard) -> None:
        self._epoch = epoch

    async def add(self, addition: Addition) -> bool:
        """See `UsageTotals.add`."""
        in_count, *_ = await self._add(_ONLY_ADD, addition)
        return bool(in_count)

    async def prepare(
        self, stream: str, fields: Iterable[str | bytes | int], addition: Addition
    ) -> tuple[str, bool]:
        """Add an entry to a stream and `addition` to the totals: both or neither. Return the id of the entry,
        and whether a count contains the addition. Raises QuotaExceeded."""
        in_count, entry_id = await self._add(_PREPARE, addition, stream, *fields)
        return str(entry_id.decode()), bool(in_count)

    async def abort(self, stream: str, entry_id: str, addition: Addition) -> None:
        """Delete an entry of a stream and add to the totals. Does nothing if there is no such entry."""
        await self._add(_ABORT, addition, stream, entry_id)

    async def _add(
        self, script: str, addition: Addition, stream: str = "", *rest: str | bytes | int
    ) -> list[Any]:
        """Run a script and return its reply. Raises QuotaExceeded."""
        room, amounts = _arguments(addition)
        first = _FIRST + len(room)
        places = (addition.key.encode().hex(), first, first + len(amounts))
        keys = (self._key, self._next, stream) if stream else (self._key, self._next)
        command = ("EVAL", script, len(keys), *keys, *places, *room, *amounts, *rest)
        ((in_count, *reply),) = await self._epoch.execute_checked(command)
        if in_count < 0:
            raise _quota_error(addition, str(room[reply[0] - _FIRST]), reply[1])
        return [in_count, *reply]

    async def read(self, names: Collection[str] | None = None) -> dict[str, Usage]:
        """See `UsageTotals.read`."""
        found: dict[str, list[int]] = {}
        if names is None:
            (flat,) = await self._epoch.execute_checked(("HGETALL", self._key))
            pairs = zip(flat[::2], flat[1::2], strict=True)
        elif names:
            asked = [f"{kind}{name}".encode() for name in names for kind in range(len(USAGE_NAMES))]
            (values,) = await self._epoch.execute_checked(("HMGET", self._key, *asked))
            pairs = zip(asked, values, strict=True)
        else:
            return {}
        for field, amount in pairs:
            if amount is not None and field != b"counted":
                name = field[1:].decode()
                found.setdefault(name, [0] * len(USAGE_NAMES))[int(field[:1])] = int(amount)
        return {name: Usage(*amounts) for name, amounts in found.items()}

    async def counted_ms(self) -> int | None:
        """See `UsageTotals.counted_ms`."""
        (counted_ms,) = await self._epoch.execute_checked(("HGET", self._key, "counted"))
        return None if counted_ms is None else int(counted_ms)

    async def begin_count(self, token: str) -> None:
        """See `UsageTotals.begin_count`."""
        begin: list[Command] = [("DEL", self._next), ("HSET", self._next, "at", f"{token} ")]
        await self._epoch.transact(*begin, ("PEXPIRE", self._next, TTL_MS))

    async def count(self, token: str, passed: str, more: Mapping[str, Usage]) -> bool:
        """See `UsageTotals.count`."""
        script = ("EVAL", _COUNT, 1, self._next, token, passed.encode().hex(), *_fields(more))
        (is_counted,) = await self._epoch.execute_checked(script)
        return bool(is_counted)

    async def end_count(self, token: str, now_ms: int) -> bool:
        """See `UsageTotals.end_count`."""
        (is_ended,) = await self._epoch.execute_checked(
            ("EVAL", _END, 2, self._key, self._next, token, now_ms)
        )
        return bool(is_ended)

    async def forget(self, names: Collection[str]) -> None:
        """See `UsageTotals.forget`. Totals from before Redis lost its memory, which nobody reads, go too."""
        old, cursor = set[bytes](), b"0"
        while True:
            page = ("SCAN", cursor, "MATCH", f"{PREFIX}*", "COUNT", 1000)
            ((cursor, keys),) = await self._epoch.execute(page)
            old.update(keys)
            if cursor == b"0":
                break
        old.discard(self._key.encode())
        fields = [f"{kind}{name}" for name in names for kind in range(len(USAGE_NAMES))]
        await self._epoch.transact(("HDEL", self._key, "counted", *fields), ("DEL", self._next, *old))

    async def clear(self) -> None:
        """See `UsageTotals.clear`."""
        await self._epoch.execute_checked(self.clear_command)

    @property
    def clear_command(self) -> Command:
        """The command that forgets all totals of this epoch, and the count."""
        return ("DEL", self._key, self._next)

    @property
    def _key(self) -> str:
        return f"{PREFIX}{self._epoch.since_ms}"

    @property
    def _next(self) -> str:
        return f"{self._key}:next"


def _arguments(addition: Addition) -> tuple[list[str | int], list[str | int]]:
    """Return the fields with a limit, each followed by the most that it may contain before the addition, and
    the fields of all amounts, each followed by the amount."""
    room: list[str | int] = []
    amounts: list[str | int] = []
    added = [(amount, more) for amount, more in enumerate(addition.more) if more]
    for kind, name in addition.subjects.items():
        limit = addition.limits.get(kind)
        for amount, more in added:
            field = f"{amount}{name}"
            amounts += (field, more)
            if limit is not None and more > 0 and limit[amount] != inf:
                room += (field, int(limit[amount]) - more)
    return room, amounts


def _quota_error(addition: Addition, field: str, used: int) -> QuotaExceeded:
    """Return the error of an addition for which this field has no room."""
    amount = int(field[0])
    kind = next(kind for kind, name in addition.subjects.items() if name == field[1:])
    return QuotaExceeded(kind, USAGE_NAMES[amount], used, int(addition.limits[kind][amount]))


def _fields(more: Mapping[str, Usage]) -> list[str | int]:
    """Return the fields of all amounts that are not 0, each followed by the amount."""
    return [
        value
        for name, amounts in more.items()
        for kind, amount in enumerate(amounts)
        if amount
        for value in (f"{kind}{name}", amount)
    ]
