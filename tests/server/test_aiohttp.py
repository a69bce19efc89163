"""What connections and responses rely on in aiohttp beyond its documented interface.

mypy finds private names that a new version lacks. This finds methods that do something else.
"""

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

RELIED_ON = {
    web.RequestHandler.start: "2e565fd40c8e04fb",
    web.RequestHandler._handle_request: "a88a34ee65a2714c",
    web.RequestHandler.data_received: "1ee57ebe052e6c80",
    web.RequestHandler.resume_reading: "21dee847a31af724",
    web.RequestHandler.connection_lost: "df2fe6e95fd04c7c",
    web.StreamResponse.__init__: "4526b12af19f1293",
}
"""Methods that are replaced, extended, left out, or called where aiohttp would not -> the digest of their
source."""


@pytest.mark.parametrize("method", RELIED_ON, ids=lambda method: method.__qualname__)
def test_methods_of_aiohttp_are_as_they_were_when_ours_were_written(method: Callable[..., Any]) -> None:
    digest = hashlib.sha256(inspect.getsource(method).encode()).hexdigest()[:16]
    assert digest == RELIED_ON[method], (
        f"aiohttp has changed {method.__qualname__}: compare it with pysync/server/connection.py and "
        f"responses.py, run tests/server, then set the digest here and the versions in pyproject.toml"
    )
