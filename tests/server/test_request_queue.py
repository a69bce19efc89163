"""The order in which connections with requests that wait have their turn."""

import asyncio
from math import inf

from pysync.server.request_queue import OTHERS_EVERY, OTHERS_WAITING, REQUESTS_PER_TICK, RequestQueue

MAX_WAIT_S = 0.25


class Client:
    """A connection whose request begins when its turn comes."""

    def __init__(self, queue: RequestQueue, name: int, events: list[tuple[str, int]]) -> None:
        self.name = name
        self._queue = queue
        self._events = events

    def go_on(self) -> None:
        self._queue.will_start(self)
        self._events.append(("begin", self.name))

    def give_up(self) -> None:
        self._events.append(("give up", self.name))


class Queue:
    """A queue with a clock that stands still, and what happened to its connections."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.queue = RequestQueue(MAX_WAIT_S, lambda: self.now)
        self.events: list[tuple[str, int]] = []

    def add(self, *names: int, is_preferred: bool = True, waited_s: float = 0.0) -> list[Client]:
        clients = [Client(self.queue, name, self.events) for name in names]
        for client in clients:
            self.queue.add(client, self.now - waited_s, is_preferred=is_preferred)
        return clients

    async def tick(self) -> list[int]:
        """Let a tick pass, and return which requests it begins."""
        self.events.clear()
        await asyncio.sleep(0)
        self.queue._starting.clear()
        return [name for event, name in self.events if event == "begin"]


async def test_requests_begin_in_the_order_in_which_they_came_those_preferred_first() -> None:
    queue = Queue()
    queue.add(1, is_preferred=False)
    queue.add(2, 3)
    queue.add(4, is_preferred=False)
    assert await queue.tick() == [2, 3, 1, 4]


def test_the_oldest_of_all_that_wait_is_known() -> None:
    queue = Queue()
    assert queue.queue.oldest() == inf
    for name, (since, is_preferred) in enumerate([(3.0, True), (1.0, False), (2.0, True)]):
        client = Client(queue.queue, name, queue.events)
        waiting = queue.queue._preferred if is_preferred else queue.queue._others
        waiting[client] = (since, client)
    assert queue.queue.oldest() == 1.0


async def test_a_tick_begins_only_so_many_requests() -> None:
    queue = Queue()
    queue.add(*range(2 * REQUESTS_PER_TICK))
    assert queue.queue.is_full
    assert await queue.tick() == list(range(REQUESTS_PER_TICK))
    assert await queue.tick() == list(range(REQUESTS_PER_TICK, 2 * REQUESTS_PER_TICK))
    assert not queue.queue.is_full


async def test_during_an_overload_the_last_that_are_preferred_come_first() -> None:
    queue = Queue()
    queue.queue.is_newest_first = True
    queue.add(1, 2, is_preferred=False)
    queue.add(3, 4)
    assert await queue.tick() == [4, 3, 2, 1]


async def test_others_have_their_part_during_an_overload() -> None:
    queue = Queue()
    queue.queue.is_newest_first = True
    queue.add(*range(REQUESTS_PER_TICK))
    queue.add(-1, -2, is_preferred=False)
    begun = await queue.tick()
    assert sum(name < 0 for name in begun) == min(2, REQUESTS_PER_TICK // OTHERS_EVERY)


async def test_request_that_waited_too_long_is_given_up_during_an_overload() -> None:
    queue = Queue()
    queue.add(1, waited_s=2 * MAX_WAIT_S)
    assert await queue.tick() == [1]
    queue.queue.is_newest_first = True
    queue.add(1, waited_s=2 * MAX_WAIT_S)
    queue.add(2, waited_s=MAX_WAIT_S / 2)
    assert await queue.tick() == [2]
    assert ("give up", 1) in queue.events


async def test_few_others_wait_during_an_overload() -> None:
    queue = Queue()
    queue.add(*range(OTHERS_WAITING), is_preferred=False)
    assert queue.queue.has_room_for_others
    await queue.tick()
    queue.queue.is_newest_first = True
    queue.add(*range(OTHERS_WAITING), is_preferred=False)
    assert not queue.queue.has_room_for_others


async def test_a_connection_that_is_closed_does_not_begin() -> None:
    queue = Queue()
    first, second = queue.add(1, 2)
    queue.queue.remove(first)
    assert await queue.tick() == [2]
    assert queue.queue.is_empty
    queue.queue.will_start(second)
    assert queue.queue.has_unstarted()
    queue.queue.remove(second)
    assert not queue.queue.has_unstarted()


async def test_others_begin_after_one_that_fails() -> None:
    queue = Queue()
    errors = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    failing, _ = queue.add(1, 2)

    def fail() -> None:
        raise MemoryError

    failing.go_on = fail  # type: ignore[method-assign]
    assert await queue.tick() == []
    assert await queue.tick() == [2]
    assert [type(error) for error in errors] == [MemoryError]
