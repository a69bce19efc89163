"""What the log of a service tells its operator: which request, and why it failed."""

import json
import logging
from typing import Any

import aiohttp
import pytest
from support.clients import Browser, Start
from support.collections import NOTES

from pysync.errors import StoreUnavailable
from pysync.server.process import logs
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


class Hanging(MemoryStore):
    """A store that answers nothing, and says so of each key in other words."""

    async def get(self, *arguments: Any, **options: Any) -> Any:
        raise StoreUnavailable from TimeoutError(f"no answer for {arguments[0]}")


@pytest.mark.usefixtures("own_logging")
async def test_store_that_does_not_answer_is_a_warning_without_a_traceback(
    start: Start, session: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure(human=False)
    browser = Browser(await start({"collections": [NOTES]}, store=Hanging()), session)
    capsys.readouterr()
    assert (await browser.pull("notes/0")).status == 503
    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert (entry["level"], "error" in entry) == ("warning", False)
    assert entry["message"] == "503 store_unavailable: pull notes 'notes/0': no answer for notes/0"


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
    printed = capsys.readouterr().err
    assert "worker 2: serving\n" in printed if human else json.loads(printed)["worker"] == 2
