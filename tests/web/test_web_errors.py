"""The errors of the browser client have the names, codes and classes of `pysync.errors`."""

from typing import Any

from support.browser import Chromium
from support.clients import Start
from support.web_pages import client_page, do, web_service

from pysync import errors

INHERITED = ["constructor", "__proto__", "toString"]
"""Names that every object has in JavaScript."""


async def test_every_error_has_the_name_code_status_and_base_class_of_python(
    start: Start, screen: Chromium
) -> None:
    window = await client_page(screen, await web_service(start))
    made = await do(
        window,
        """const base = (kind) => Object.getPrototypeOf(kind).name
        return Object.entries(errors).map(
          ([name, kind]) => [name, new kind().name, kind.code, kind.status, base(kind)])""",
    )
    assert sorted(made) == sorted(
        [kind.__name__, kind.__name__, code, kind.status, kind.__mro__[1].__name__]
        for code, kind in errors.errors_by_code().items()
    )


def answered() -> list[tuple[int, dict[str, Any]]]:
    """Answers with each code, in the texts of other servers, and without a code that is known."""
    known = [(kind.status, {"error": "why", "code": code}) for code, kind in errors.errors_by_code().items()]
    texts = [(409, {"error": "hash_mismatch", "currentHash": "h"}), (400, {"error": "pull_bound_required"})]
    unknown: list[tuple[int, dict[str, Any]]] = [
        (status, {"error": "new", "code": "of_a_later_version"}) for status in range(400, 520)
    ]
    inherited = [(400, {"error": "why", "code": code}) for code in INHERITED]
    return [*known, *texts, *unknown, *inherited, (502, {})]


async def test_answers_are_the_errors_that_python_raises(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    cases = answered()
    made = await do(
        window,
        """const found = []
        for (const [status, body] of $[0]) {
          const fetch = scripted(answer(status, body, {"Retry-After": "7"}))
          const client = new Client("http://h", {fetch, backoff: {attempts: 1}})
          const error = await client.pull("a").catch((error) => error)
          const {name, message, code, extras, retryAfterS} = error
          const kind = errors[name] ?? PysyncError
          found.push([name, message, error.status, code, extras, retryAfterS, error instanceof kind])
        }
        return found""",
        cases,
    )
    expected = []
    for status, body in cases:
        error = errors.from_response(status, body, {})
        extras = {name: value for name, value in body.items() if name == "currentHash"}
        expected.append(
            [type(error).__name__, body.get("error", f"HTTP {status}"), status, error.code, extras, 7, True]
        )
    assert made == expected


async def test_conflict_has_the_current_hash(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    body = {"error": "hash_mismatch", "code": "hash_mismatch", "currentHash": "h7"}
    made = await do(
        window,
        """const client = new Client("http://h", {fetch: scripted(answer(409, $[0]))})
        const error = await client.push("a", {}).catch((error) => error)
        return [error instanceof errors.Conflict, error instanceof PysyncError, error.currentHash]""",
        body,
    )
    assert made == [True, True, "h7"]


TEXTS = [
    "Invalid path parameter",
    "Forbidden",
    "Authorization error",
    "document_corrupt",
    "store_unavailable",
    "pull_bound_required",
    "checkpoint_too_old",
    "append_params_not_supported",
    "Collection not found",
    "Missing required path parameter",
    "something new",
    *INHERITED,
]


async def test_errors_of_a_batch_are_those_that_python_returns(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    made = await do(
        window,
        """const fetch = scripted(answer(200, {collections: {c: $[0].map((error) => ({error}))}}))
        const entries = await new Client("http://h", {fetch}).batchPull("c", $[0].map(() => ({})))
        return entries.map(({name, message}) => [name, message])""",
        TEXTS,
    )
    assert made == [[type(errors.from_batch_error(text)).__name__, text] for text in TEXTS]


async def test_answer_of_something_else_is_unreachable(start: Start, screen: Chromium) -> None:
    window = await client_page(screen, await web_service(start))
    made = await do(
        window,
        """const nonsense = ["<html>", "[]", '{"data": [], "hash": "h", "timestamp": 1}', '{"data": {}}']
        const found = []
        for (const body of nonsense) {
          const client = new Client("http://h", {fetch: scripted(answer(200, body)), backoff: {attempts: 1}})
          found.push(await client.pull("a").catch((error) => [error.name, error instanceof Unreachable]))
        }
        return found""",
    )
    assert made == [["Unreachable", True]] * 4
