"""The classes of `aiohttp.web` that the server builds on. Its applications and WebSockets are not loaded."""

from aiohttp.helpers import RequestKey
from aiohttp.web_protocol import RequestHandler, RequestPayloadError
from aiohttp.web_request import BaseRequest
from aiohttp.web_response import StreamResponse
from aiohttp.web_server import Server

__all__ = ["BaseRequest", "RequestHandler", "RequestKey", "RequestPayloadError", "Server", "StreamResponse"]
