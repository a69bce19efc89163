"""When those who follow look again: when they are told, never too seldom, and not for what they have."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.fake_server import Waits, client
from support.fake_sse_server import HEAD, End, event, rejected, streamed, streaming

from pysync.client import ChangeEvent, Client
from pysync.client.polling import RESUBSCRIBE_S, ChangeNotifier, WatchTarget, follow
from pysync.errors import BadRequest

OPENING = ": hello\n\nid: 0\n\n"
A = WatchTarget("notes/a")


async def for_ever(seconds: float) -> None:
    await asyncio.Event().wait()


def is_new(change: ChangeEvent) -> bool:
    return change.hash == "new"


class Teller:
    """Streams that say what they are told to, the newest alone. `say` returns when its client has read it."""

    def __init__(self) -> None:
        self._says: asyncio.Queue[str] = asyncio.Queue(1)
        self._read: asyncio.Queue[str] = asyncio.Queue(1)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + OPENING.encode())
        while text := await self._says.get():
            writer.write(text.encode())
        writer.close()

    async def say(self, text: str) -> None:
        await self._says.put(text + event("read", collection="read", params={"id": "read"}))
        await self._read.get()

    async def end(self) -> None:
        """End the stream. The next begins when the client connects again."""
        await self._says.put("")

    def target(self, key: str) -> WatchTarget:
        """A place whose `might_match` lets `say` return."""
        read = self._read

        class Noticed(WatchTarget):
            def might_match(self, change: ChangeEvent) -> bool:
                if change.collection == "read":
                    read.put_nowait(change.id)
                return super().might_match(change)

        return Noticed(key)


@asynccontextmanager
async def sight(key: str = "notes/a") -> AsyncIterator[tuple[Teller, ChangeNotifier]]:
    """A stream and who listens to it, to whom everything of `key` with the hash `new` is news."""
    teller = Teller()
    async with await asyncio.start_server(teller.serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with client(f"http://127.0.0.1:{port}") as anyone:
            async with ChangeNotifier(anyone, teller.target(key), is_new, for_ever) as opened:
                yield teller, opened
            await teller.end()


async def test_live_stream_and_its_news_trigger_a_poll() -> None:
    async with sight() as (teller, notifier):
        await notifier.wait(1)
        waiting = asyncio.ensure_future(notifier.wait(1))
        await asyncio.sleep(0)
        for text in (": beat\n\n", event("1", "old"), event("2", "new", params={"id": "b"})):
            await teller.say(text)
            assert not waiting.done()
        await teller.say(event("3", "new"))
        await waiting


async def test_event_during_a_poll_is_news_whatever_it_is() -> None:
    async with sight() as (teller, notifier):
        await notifier.wait(1)
        await teller.say(event("1", "old"))  # now somebody looks, and may find what was there before
        await notifier.wait(1)
        waiting = asyncio.ensure_future(notifier.wait(1))
        await asyncio.sleep(0)
        await teller.say(event("2", "old"))
        assert not waiting.done()
        waiting.cancel()


async def test_lost_history_and_a_reconnected_stream_trigger_a_poll() -> None:
    async with sight() as (teller, notifier):
        await notifier.wait(1)
        waiting = asyncio.ensure_future(notifier.wait(1))
        await asyncio.sleep(0)
        await teller.say("event: reset\ndata: {}\n\n")
        await waiting
        waiting = asyncio.ensure_future(notifier.wait(1))
        await asyncio.sleep(0)
        await teller.end()
        await waiting


@pytest.mark.parametrize(
    ("key", "params", "may_be"),
    [
        ("log/a", {"id": "a"}, True),
        ("/pull/log/a", {"id": "a"}, True),
        ("spaces/s1/notes/n1", {"noteId": "n1", "spaceId": "s1"}, True),
        ("all", {}, True),
        ("log/ab", {"id": "a"}, False),
        ("spaces/s1/notes/n1", {"noteId": "n1", "spaceId": "s2"}, False),
    ],
)
def test_a_change_may_be_of_a_document_that_has_its_parameters(
    key: str, params: dict[str, str], may_be: bool
) -> None:
    assert WatchTarget(key).might_match(ChangeEvent("any", params, "h", 1, None, "1")) is may_be


async def test_lost_stream_falls_back_to_the_interval() -> None:
    waits = Waits()
    scripts = [streamed(OPENING, End.ABORT), *[rejected(503, "unavailable")] * 3, streamed(OPENING, End.HOLD)]
    time_passes, reconnecting = asyncio.Event(), asyncio.Event()

    async def sleep(seconds: float) -> None:
        await time_passes.wait()
        await waits(seconds)

    async def reconnect(seconds: float) -> None:
        await reconnecting.wait()

    async with (
        streaming(*scripts) as server,
        client(server.url, sleep=reconnect) as anyone,
        ChangeNotifier(anyone, A, is_new, sleep) as notifier,
    ):
        await notifier.wait(0)  # until it is live
        time_passes.set()
        scripts[0].go.set()
        for n in range(1, 4):
            await notifier.wait(n)
        assert waits.seconds == [1, 2, 3]
        time_passes.clear()
        reconnecting.set()
        await notifier.wait(4)  # until it is live again
        assert waits.seconds == [1, 2, 3]


async def test_rejected_stream_is_not_retried_and_a_busy_one_is() -> None:
    waited: list[float] = []
    later = asyncio.Event()

    async def wait(seconds: float) -> None:
        waited.append(seconds)
        if seconds == RESUBSCRIBE_S:
            await later.wait()

    scripts = [*[rejected(503, "unavailable")] * 4, rejected(404, "not_found")]
    async with (
        streaming(*scripts) as server,
        client(server.url) as anyone,
        ChangeNotifier(anyone, A, is_new, wait) as notifier,
    ):
        while RESUBSCRIBE_S not in waited:
            await notifier.wait(1)
        later.set()
        await scripts[-1].closed.wait()
        for _ in range(3):
            await notifier.wait(1)
        assert len(server.heads) == len(scripts)


@pytest.mark.parametrize(
    "target", [WatchTarget("notes/a", "none"), WatchTarget("notes/a", "notes", {"x": "a"}), A]
)
async def test_invalid_stream_parameters_are_raised_by_the_next_wait(target: WatchTarget) -> None:
    script = rejected(400, "bad_request")
    async with (
        streaming(script) as server,
        client(server.url) as anyone,
        ChangeNotifier(anyone, target, is_new, Waits() if target is A else for_ever) as notifier,
    ):
        if target is A:
            await script.closed.wait()
            await notifier.wait(1)
        else:
            with pytest.raises(BadRequest):
                await notifier.wait(1)


async def test_a_client_that_is_closed_is_not_followed_in_silence() -> None:
    async with (
        streaming(streamed(OPENING, End.HOLD)) as server,
        client(server.url) as anyone,
        ChangeNotifier(anyone, A, is_new, for_ever) as notifier,
    ):
        await notifier.wait(1)
        await anyone.close()
        with pytest.raises(RuntimeError, match="not open"):
            await notifier.wait(1)


async def test_a_follower_lets_go_of_its_stream_with_its_iterator() -> None:
    found = iter([None, 1])

    async def poll() -> tuple[int | None, bool]:
        return next(found), False

    def following(anyone: Client) -> AsyncGenerator[int]:
        return follow(
            anyone,
            A,
            poll,
            is_new,
            has_started=False,
            initial_s=1,
            max_s=1,
            on_disconnect=lambda _: None,
            sleep=for_ever,
        )

    script = streamed(OPENING, End.HOLD)
    async with streaming(script) as server, client(server.url) as anyone:
        async for _ in following(anyone):
            break
        await script.closed.wait()
