"""What the tests of plugins share: a service with a collection of each kind, and plugins that write down what
they are asked."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import aiohttp

from pysync.model import WriteEvent
from pysync.plugins import PluginPush, PluginRequest, PullResponse, PushResponse
from support.clients import ISSUER, STRANGER, Browser, Signed, root_device
from support.collections import LOG, OWN, collection

NOTES = collection("notes", listable=True)
RINGS = collection("rings", "notes/{id}/_keyring")
CARDS = collection("cards", "boards/{id}", bundle="board")
TITLE = {**CARDS, "name": "title"}
MINE = collection("mine", "u/{identity}", **OWN)
EVERYTHING = [NOTES, RINGS, LOG, CARDS, TITLE, MINE]


def people(base: str, session: aiohttp.ClientSession) -> tuple[Signed, Signed, Browser]:
    """Two people with keys, and somebody without."""
    one, other = (Signed(base, session, keys, root_device(keys)) for keys in (ISSUER, STRANGER))
    return one, other, Browser(base, session)


async def batch(browser: Browser, **params: list[dict[str, str]]) -> Any:
    """The entries of a batch pull; of a log, its newest element."""
    bounds = {"log": [{"last": 1}] * len(params["log"])} if "log" in params else {}
    query = f"collections={','.join(params)}&params={json.dumps(params)}&appendParams={json.dumps(bounds)}"
    for sign, escaped in ((" ", ""), ('"', "%22"), ("{", "%7B"), ("}", "%7D")):
        query = query.replace(sign, escaped)
    answer = await browser.request("GET", f"/batch/pull?{query}")
    assert answer.status == 200, answer.body
    return answer.json["collections"]


class NotifiedPlugin:
    """Is told of writes."""

    def __init__(self, name: str = "told") -> None:
        self.name = name
        self.events: list[WriteEvent] = []

    async def after_write(self, event: WriteEvent) -> None:
        self.events.append(event)


class Reading:
    """Has a say in pulls: what it `answers` by document key, or raises."""

    name = "reading"

    def __init__(self, **answers: PullResponse | Exception) -> None:
        self.answers = answers
        self.before: list[PluginRequest] = []
        self.queries: list[PluginRequest] = []

    async def before_pull(self, request: PluginRequest) -> None:
        self.before.append(request)
        answer = self.answers.get(request.key.replace("/", "_"))
        if isinstance(answer, Exception):
            raise answer

    async def intercept_pull(self, request: PluginRequest) -> PullResponse | None:
        self.queries.append(request)
        answer = self.answers.get(request.key.replace("/", "_"))
        assert not isinstance(answer, Exception)
        return answer


class Taking:
    """Takes the pushes of one collection, with `answer`."""

    name = "taking"

    def __init__(self, collection: str, answer: PushResponse | Exception | Any) -> None:
        self.collection = collection
        self.answer = answer
        self.taken: list[PluginPush] = []

    async def intercept_push(self, push: PluginPush) -> PushResponse | None:
        if push.request.collection != self.collection:
            return None
        self.taken.append(push)
        if isinstance(self.answer, Exception):
            raise self.answer
        taken: PushResponse | None = self.answer
        return taken


class Roles:
    """Gives the roles that are `held`, by identity, and writes down what it is asked."""

    name = "roles"

    def __init__(self, granted: Mapping[str, Iterable[str]]) -> None:
        self.granted = granted
        self.queries: list[PluginRequest] = []

    async def authorize(self, request: PluginRequest) -> Iterable[str]:
        self.queries.append(request)
        return self.granted.get(request.caller.identity, ())
