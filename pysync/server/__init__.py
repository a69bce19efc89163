"""The HTTP service: start reading at `app.py`."""

from pysync.server.deferred_import import defer_aiohttp

defer_aiohttp()
