"""The usage totals of many nodes, in Redis.

pysync:u:<since>        the totals, a hash: the amount of each kind (0 to 3) of each subject, and `counted`
pysync:u:<since>:next   those of a count that is under way, and `at`: its token, and the key that it passed

`<since>` is the time since which Redis remembers everything, so after a loss of memory there are no totals.
Totals that no count has replaced for a week are forgotten.
"""

from collections.abc import Collection, Mapping
from typing import Final

from pysync.coordinator.redis.connection import Command
from pysync.coordinator.redis.epoch import EpochGuard
from pysync.coordinator.usage import Added
from pysync.model import USAGE_NAMES, Usage

PREFIX: Final = "pysync:u:"
TTL_MS: Final = 7 * 86_400_000

# Keys are compared as hex digits: the order of other texts depends on the locale of Redis.
_ADD_AMOUNTS: Final = """
local function add(to, at)
    local total = redis.call('HINCRBY', to, ARGV[at], ARGV[at + 1])
    if total == 0 then redis.call('HDEL', to, ARGV[at]) end
    return total
end"""
_ADD: Final = f"""{_ADD_AMOUNTS}
local at, totals = redis.call('HGET', KEYS[2], 'at'), {{}}
local counts = at and ARGV[1] ~= '' and ARGV[1] <= string.match(at, ' (.*)')
totals[1] = counts and 1 or 0
for i = 2, #ARGV, 2 do
    totals[#totals + 1] = add(KEYS[1], i)
    if counts then add(KEYS[2], i) end
end
redis.call('PEXPIRE', KEYS[1], {TTL_MS}, 'NX')
return totals"""
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

    async def add(self, key: str, more: Mapping[str, Usage]) -> Added:
        """See `UsageTotals.add`."""
        script = ("EVAL", _ADD, 2, self._key, self._next, key.encode().hex(), *_fields(more))
        ((in_count, *amounts),) = await self._epoch.execute_checked(script)
        each = iter(amounts)
        return Added({name: Usage(*(next(each) for _ in USAGE_NAMES)) for name in more}, bool(in_count))

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


def _fields(more: Mapping[str, Usage]) -> list[str | int]:
    """Return the fields of all amounts, each followed by the amount."""
    return [
        value
        for name, amounts in more.items()
        for kind, amount in enumerate(amounts)
        for value in (f"{kind}{name}", amount)
    ]
