"""Real documents come back as they were: a sample of `benches/corpus.py`, and that it would notice."""

import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.clients import Start

from benches import corpus, servers

EVERY = 150


async def test_a_sample_of_real_documents_comes_back_as_it_was(start: Start) -> None:
    url = await start(json.loads(servers.SERVICE.read_text()))
    sample = list(corpus.documents(step=EVERY))
    counts = await corpus.run(url, sample)
    assert counts.documents == len(sample) > 10
    assert counts.text_bytes == sum(len(document.text) for document in sample) > 100_000


async def answer(request: web.Request) -> web.Response:
    """A server that answers everything alike: with the hash and data of the empty document."""
    hash_of_empty = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    await request.read()
    return web.json_response({"data": {}, "hash": hash_of_empty, "timestamp": 1})


@pytest.mark.parametrize(
    ("text", "noticed"),
    [(b'{"a":1}', "the hash of the push is 4413"), (b"{}", "the hash of the update is 4413")],
)
async def test_a_server_that_loses_data_is_noticed(text: bytes, noticed: str) -> None:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        with pytest.raises(corpus.Mismatch, match=noticed):
            await corpus.run(str(server.make_url("")), [corpus.Document("a", text)])
