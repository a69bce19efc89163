"""A feed of changes as a service on a bucket answers it."""

import itertools
import json

from support.http_relay import RequestHead
from support.s3_fault_proxy import FaultProxy

JSON = {"Content-Type": "application/json"}
_CURSORS = itertools.count(1)


def be_bucket(network: FaultProxy, **members: int) -> None:
    """Answer as over a bucket that no longer knows what changed: with a reset, which has these members, to
    all who do not have its cursor, else with no change; and without hashes in lists."""
    page = {"cursor": f"{next(_CURSORS):017}-00000000"}

    def is_page(sent: RequestHead) -> bool:
        return sent.path == "changes" and sent.query.get("since") != "now"

    def is_reset(sent: RequestHead) -> bool:
        return is_page(sent) and sent.query.get("since") != page["cursor"]

    network.reset()
    for when, body in (is_reset, {"reset": True, **page, **members}), (is_page, {"changes": [], **page}):
        network.respond(status=200, headers=JSON, body=json.dumps(body).encode(), when=when, times=None)
    refusal = b'{"error":"hashes_not_available","code":"hashes_not_available"}'
    network.respond(
        status=400, headers=JSON, body=refusal, when=lambda sent: "hashes" in sent.query, times=None
    )
