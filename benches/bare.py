"""The application that pysync is measured against: aiohttp with next to nothing on top.

python -m benches.bare PORT
"""

import sys

import uvloop
from aiohttp import web

KILOBYTE = b"x" * 1_024
MEBIBYTE = b"x" * 1_048_576


async def get(request: web.Request) -> web.Response:
    return web.Response(body=KILOBYTE, content_type="application/json")


async def get_mebibyte(request: web.Request) -> web.Response:
    return web.Response(body=MEBIBYTE, content_type="application/octet-stream")


async def post(request: web.Request) -> web.Response:
    await request.read()
    return web.Response(body=b'{"ok":true}', content_type="application/json")


def application() -> web.Application:
    app = web.Application()
    app.router.add_get("/", get)
    app.router.add_get("/mebibyte", get_mebibyte)
    app.router.add_post("/", post)
    return app


if __name__ == "__main__":
    web.run_app(
        application(),
        host="127.0.0.1",
        port=int(sys.argv[1]),
        access_log=None,
        print=None,
        loop=uvloop.new_event_loop(),
    )
