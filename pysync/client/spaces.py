"""Access to many spaces, told in one request (clients-and-crypto section 7.3)."""

from collections.abc import Sequence
from typing import Any

from pysync.client.client import Client
from pysync.errors import NotFound, PysyncError


class SpacesAccess(dict[str, dict[str, Any]]):
    """The data of access documents by the id of their space. A space that could not be read is not in it;
    `errors` says why: Forbidden for one that the caller is no member of, NotFound where none is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: dict[str, PysyncError] = {}


async def read_spaces_access(
    client: Client, space_ids: Sequence[str], *, collection: str = "spaceaccess", param: str = "spaceId"
) -> SpacesAccess:
    """The access documents of the spaces `space_ids`, as far as the caller of `client` may read them.

    Raises what `Client.batch_pull` does where the request as a whole fails.
    """
    access = SpacesAccess()
    entries = await client.batch_pull_many(collection, [{param: space_id} for space_id in space_ids])
    for space_id, entry in zip(space_ids, entries, strict=True):
        if isinstance(entry, PysyncError):
            access.errors[space_id] = entry
        elif not entry.hash:
            access.errors[space_id] = NotFound()
        else:
            access[space_id] = entry.data
    return access
