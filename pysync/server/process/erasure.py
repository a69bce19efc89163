"""`POST /admin/erase` of the operators' listener. See docs/reference/protocol.md#erase."""

from collections.abc import Callable, Coroutine
from typing import Any, Final

import orjson

from pysync.erase import EraseReport, EraseRequest
from pysync.errors import BadRequest, BodyNotObject, ForeignOrigin, InvalidJson, UnsupportedMediaType
from pysync.protocol import JSON_TYPE
from pysync.server.process.operator_action import AdminRequest, OperatorAction

ERASE_PATH: Final = "/admin/erase"

Erase = Callable[[EraseRequest, bool], Coroutine[Any, Any, EraseReport]]
"""Erases what belongs to the request, or with True only reports what would go."""


def erase_action(erase: Erase) -> OperatorAction:
    """Return what responds to requests to erase. The next start of a service finishes an erasure that was
    cancelled."""

    async def act(request: AdminRequest) -> dict[str, Any]:
        if "origin" in request.headers:  # browsers send it with each POST, also of their own origin
            raise ForeignOrigin("Pages of browsers may not erase")
        what, is_dry_run = _parse(request)
        report = await erase(what, is_dry_run)
        return report.describe(what, is_dry_run=is_dry_run)

    return OperatorAction(
        act,
        busy="An erasure is under way: try again when it has finished",
        stopped="the server stops; it finishes the erasure when it starts again",
    )


def _parse(request: AdminRequest) -> tuple[EraseRequest, bool]:
    """Return what is to be erased, and True for a dry run. Raises BadRequest and UnsupportedMediaType."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != JSON_TYPE:
        raise UnsupportedMediaType(f"Content-Type must be {JSON_TYPE}")
    try:
        members = orjson.loads(request.body)
    except ValueError:
        raise InvalidJson from None
    if not isinstance(members, dict):
        raise BodyNotObject
    is_dry_run = members.pop("dryRun", False)
    if not isinstance(is_dry_run, bool):
        raise BadRequest("dryRun must be true or false")
    try:
        return EraseRequest.parse(members), is_dry_run
    except ValueError as error:
        raise BadRequest(str(error)) from None
