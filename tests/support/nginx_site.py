"""A service behind nginx."""

from typing import Any

import aiohttp

from support.clients import SUBJECT, Signed, root_device
from support.collections import OWN, UNSIGNED, collection, limit_of

ME = SUBJECT.user_id
SERVICE: dict[str, Any] = {
    "server": {"trustedProxyHops": 1},
    "collections": [
        collection("notes", maxBodyBytes=4096),
        collection("mine", "u/{identity}/{id}", listable=True, **OWN),
        collection("log", "log/{identity}/{id}", appendOnly=UNSIGNED, **OWN),
        collection("counted", rateLimit={"pull": limit_of(3, bucket="ip")}),
    ],
}


def signer(base: str, session: aiohttp.ClientSession) -> Signed:
    return Signed(base, session, SUBJECT, root_device(SUBJECT))
