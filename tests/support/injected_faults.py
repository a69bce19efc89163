"""The faults that a `FaultProxy` injects into a request."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from support.http_relay import RequestHead

When = Callable[[RequestHead], bool]


def s3_error(code: str, message: str = "Injected by a test.") -> bytes:
    """The body of an error answer of S3."""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{message}</Message><RequestId>0</RequestId></Error>"
    ).encode()


class Abort:
    name = "abort"


class LoseReply:
    name = "lose_reply"


@dataclass(slots=True)
class Delay:
    until: asyncio.Event | float
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    name = "delay"

    async def wait(self) -> None:
        self.arrived.set()
        if isinstance(self.until, asyncio.Event):
            await self.until.wait()
        else:
            await asyncio.sleep(self.until)


@dataclass(slots=True)
class CannedResponse:
    status: int
    body: bytes
    headers: Mapping[str, str]
    forwarded: bool = False
    instead_of: int | None = None
    name: str = "answer"


@dataclass(slots=True)
class Truncate:
    to_bytes: int
    name = "truncate"


Fault = Abort | LoseReply | Delay | CannedResponse | Truncate


@dataclass(slots=True)
class ScheduledFault:
    """A fault and the requests that it is for."""

    fault: Fault
    kinds: tuple[str, ...] = ()
    when: When | None = None
    times: int | None = 1
    after: int = 0

    def is_for(self, sent: RequestHead) -> bool:
        return (not self.kinds or sent.kind in self.kinds) and (self.when is None or self.when(sent))

    @property
    def waits_for_response(self) -> bool:
        """Whether upstream's answer decides who meets it."""
        return isinstance(self.fault, CannedResponse) and self.fault.instead_of is not None

    def waits_for(self, status: int) -> bool:
        """Whether it is met by a request that upstream answered so."""
        return isinstance(self.fault, CannedResponse) and self.fault.instead_of == status


@dataclass(slots=True)
class Chaos:
    random: Random
    shares: tuple[float, float, float, float]
    delay_s: float

    def draw(self) -> Fault | None:
        abort, lose_reply, throttle, delay = self.shares
        drawn = self.random.random()
        for share, make in (
            (abort, Abort),
            (lose_reply, LoseReply),
            (throttle, slow_down),
            (delay, lambda: Delay(self.random.uniform(0, self.delay_s))),
        ):
            if drawn < share:
                return make()
            drawn -= share
        return None


def slow_down() -> CannedResponse:
    return CannedResponse(503, s3_error("SlowDown"), {"Content-Type": "application/xml"}, name="throttle")
