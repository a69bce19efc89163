"""What the log of a service tells its operator: which request, and why it failed."""

import json
import logging
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from support.clients import Browser, Start
from support.collections import NOTES

from pysync.errors import StoreUnavailable
from pysync.server import logs
from pysync.store.memory import MemoryStore


class Unplugged(MemoryStore):
    """A store whose disk has gone."""

    async def get(self, *arguments: Any, **options: Any) -> Any:
        raise StoreUnavailable from OSError("disk gone")


async def logged(start: Start, session: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]) -> str:
    """What a pull with the request id `find-me` from an unplugged store writes to the log."""
    browser = Browser(await start({"collections": [NOTES]}, store=Unplugged()), session)
    capsys.readouterr()
    answer = await browser.pull("notes/a", {"X-Request-Id": "find-me"})
    assert answer.error == (503, "store_unavailable")
    assert b"disk gone" not in answer.body
    return capsys.readouterr().err


@pytest.mark.usefixtures("own_logging")
async def test_a_json_log_line_names_the_request_and_the_cause(
    start: Start, session: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure(human=False)
    (line,) = (await logged(start, session, capsys)).splitlines()
    entry = json.loads(line)
    assert entry["requestId"] == "find-me"
    assert (entry["level"], entry["logger"]) == ("warning", "pysync.server")
    assert entry["message"] == "503 store_unavailable: pull notes 'notes/a': disk gone"
    assert "error" not in entry, "the message has the cause, and no line of a traceback says more"


@pytest.mark.usefixtures("own_logging")
async def test_the_log_on_a_terminal_names_the_request_and_the_cause(
    start: Start, session: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure(human=True)
    written = await logged(start, session, capsys)
    (line,) = written.splitlines()
    assert "503 store_unavailable: pull notes 'notes/a': disk gone" in line
    assert "find-me" in line


@pytest.mark.usefixtures("own_logging")
async def test_failures_that_repeat_are_logged_once_and_then_counted(
    start: Start, session: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure(human=False)
    browser = Browser(await start({"collections": [NOTES]}, store=Unplugged()), session)
    capsys.readouterr()
    for number in range(logs.MAX_REPEATED_IDS + 50):
        await browser.pull(f"notes/{number}", {"X-Request-Id": f"id-{number}"})
    logs.flush()
    first, *summaries = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["requestId"] == "id-0"
    assert first["message"] == "503 store_unavailable: pull notes 'notes/0': disk gone"
    assert sum(entry["repeated"] for entry in summaries) == logs.MAX_REPEATED_IDS + 49
    assert not any("error" in entry or "requestId" in entry for entry in summaries)
    assert summaries[0]["requestIds"][0] == "id-1"
    assert len(summaries[-1]["requestIds"]) <= logs.MAX_REPEATED_IDS


class Lines(logging.Handler):
    """Keeps the records that are written, by message and number."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, int]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.getMessage(), getattr(record, "fields", {}).get("repeated", 1)))


class Hanging(MemoryStore):
    """A store that answers nothing, and says so of each key in other words."""

    async def get(self, *arguments: Any, **options: Any) -> Any:
        raise StoreUnavailable from TimeoutError(f"no answer for {arguments[0]}")


@pytest.mark.usefixtures("own_logging")
async def test_a_store_that_does_not_answer_is_one_warning_without_a_traceback(
    start: Start, session: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure(human=False)
    browser = Browser(await start({"collections": [NOTES]}, store=Hanging()), session)
    capsys.readouterr()
    for number in range(20):
        assert (await browser.pull(f"notes/{number}")).status == 503
    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert (entry["level"], "error" in entry) == ("warning", False)
    assert entry["message"] == "503 store_unavailable: pull notes 'notes/0': no answer for notes/0"


def test_repeated_records_are_counted_each_minute_until_a_minute_passes_without_any() -> None:
    written, minutes = Lines(), list[Callable[[], None]]()

    def start(seconds: float, work: Callable[[], None]) -> None:
        assert seconds == 60
        minutes.append(work)

    written.addFilter(logs.RepeatFilter(written, start))

    def fail(why: str, times: int = 1) -> None:
        for _ in range(times):
            fields = {"name": "pysync.server", "msg": "failed: %s", "args": (why,), "repeats": why}
            written.handle(logging.makeLogRecord(fields))

    def end_minute() -> list[tuple[str, int]]:
        minutes.pop()()
        lines, written.lines = written.lines, []
        return lines

    fail("disk", times=500)
    fail("network")
    assert end_minute() == [("failed: disk", 1), ("failed: network", 1), ("failed: disk", 499)]
    fail("disk", times=3)
    fail("network")
    assert end_minute() == [("failed: network", 1), ("failed: disk", 3)]
    assert end_minute() == []
    assert not minutes
    fail("disk")
    assert end_minute() == [("failed: disk", 1)]
    assert not minutes


def test_repeated_records_are_all_logged_while_no_timer_can_be_started() -> None:
    written, minutes = Lines(), list[Callable[[], None]]()
    can_start = True

    def start(_: float, work: Callable[[], None]) -> None:
        if not can_start:
            raise RuntimeError("can't start new thread")
        minutes.append(work)

    written.addFilter(logs.RepeatFilter(written, start))

    def fail() -> None:
        written.handle(logging.makeLogRecord({"msg": "failed", "repeats": "disk"}))

    fail()
    fail()
    can_start = False
    minutes.pop()()
    fail()
    fail()
    can_start = True
    fail()
    fail()
    minutes.pop()()
    assert written.lines == [("failed", 1)] * 6


def test_repeated_records_are_counted_on_after_a_count_could_not_be_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written, minutes = Lines(), list[Callable[[], None]]()
    written.addFilter(logs.RepeatFilter(written, lambda _, work: minutes.append(work)))

    def exhausted(record: logging.LogRecord) -> bool:
        raise MemoryError

    def fail() -> None:
        written.handle(logging.makeLogRecord({"msg": "failed", "repeats": "disk"}))

    fail()
    fail()
    with monkeypatch.context() as patched:
        patched.setattr(written, "emit", exhausted)
        with pytest.raises(MemoryError):
            minutes.pop()()
    fail()
    fail()
    minutes.pop()()
    assert written.lines == [("failed", 1), ("failed", 2)]


def test_records_that_say_different_things_are_all_logged_and_not_all_remembered() -> None:
    written = Lines()
    written.addFilter(logs.RepeatFilter(written, lambda _, work: None))
    count = logs.MAX_REPEATING + 10
    for number in range(count):
        record = logging.makeLogRecord({"msg": "failed: %s", "args": (number,), "repeats": number})
        written.handle(record)
        written.handle(logging.makeLogRecord({"msg": "all is well"}))
    assert len(written.lines) == 2 * count


@pytest.mark.parametrize("human", [True, False])
@pytest.mark.usefixtures("own_logging")
def test_a_line_that_belongs_to_no_request_is_written_too(
    capsys: pytest.CaptureFixture[str], human: bool
) -> None:
    logs.configure(human=human)
    logging.getLogger("pysync.server").info("serving")
    (line,) = capsys.readouterr().err.splitlines()
    assert "serving" in line
    assert "requestId" not in line


@pytest.mark.usefixtures("own_logging")
def test_location_of_found_credentials_is_not_logged(capsys: pytest.CaptureFixture[str]) -> None:
    """A library's news at each start; its warnings are."""
    logs.configure(human=False)
    log = logging.getLogger("aiobotocore.credentials")
    log.info("Found credentials in environment variables.")
    log.warning("Refreshing failed.")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "Refreshing failed."


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize("human", [False, True])
def test_each_line_of_a_worker_says_which(human: bool, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(human=human, worker=2)
    logging.getLogger("pysync.server").info("serving")
    told = capsys.readouterr().err
    assert "worker 2: serving\n" in told if human else json.loads(told)["worker"] == 2
