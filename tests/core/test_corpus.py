"""Real documents come back as they were: a sample of the service descriptions that botocore ships."""

import gzip
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from support import reference
from support.clients import Start

from pysync._core import content_hash
from pysync.auth import issuing
from pysync.auth.identity_keys import IdentityKeys
from pysync.client import Client
from pysync.errors import Conflict

EVERY = 150
SERVICE = {
    "version": 1,
    "collections": [
        {
            "name": "corpus",
            "storagePath": "corpus/{identity}/{id}",
            "readRoles": ["self"],
            "writeRoles": ["self"],
            "maxBodyBytes": 8_000_000,
        }
    ],
}


def documents() -> Iterator[tuple[str, bytes]]:
    """The name and the JSON text of each description of the sample, in order of path."""
    package = importlib.util.find_spec("botocore")
    assert package is not None
    assert package.origin is not None
    root = Path(package.origin).parent / "data"
    paths = sorted(path for path in root.rglob("*") if path.name.endswith((".json", ".json.gz")))
    for path in paths[::EVERY]:
        content = path.read_bytes()
        name = path.relative_to(root).as_posix().replace("/", ":")
        yield name, gzip.decompress(content) if path.suffix == ".gz" else content


async def test_a_sample_of_real_documents_comes_back_as_it_was(start: Start) -> None:
    keys = IdentityKeys.generate()
    certificate = issuing.issue_device_certificate(
        keys, keys.ed_pub, keys.kem_pub, now_s=int(time.time()), nonce=bytes(16)
    )
    sample = list(documents())
    assert len(sample) > 10
    assert sum(len(text) for _, text in sample) > 100_000
    async with Client(await start(SERVICE), keys=keys, certificate=certificate) as client:
        for name, text in sample:
            key, data, expected = (
                f"corpus/{keys.user_id}/{name}",
                orjson.loads(text),
                reference.content_hash(text),
            )
            created = await client.push(key, data)
            assert created.hash == expected, key
            pulled = await client.pull(key)
            assert (pulled.hash, pulled.data) == (expected, data), key
            # Equal values are not yet the same to JSON (true == 1 in Python); with equal hashes they are.
            assert content_hash(orjson.dumps(pulled.data)) == expected, key
            changed = {**data, "changed": {"by": "corpus"}}
            updated = await client.push(key, changed, created.hash)
            assert updated.hash == reference.content_hash(orjson.dumps(changed)), key
            with pytest.raises(Conflict) as stale:
                await client.push(key, data, created.hash)
            assert stale.value.current_hash == updated.hash, key
