"""Real servers that tests and benches run against.

Each is a context manager that starts one on free ports of 127.0.0.1, its files in a given folder, and ends
it:

    with radosgw(folder) as server:
        ... ask server.endpoint ...

Raises `Missing` where it is not installed (`tests/components/install` does that), RuntimeError with what it
said where it does not start.
"""

from components.caddy import Caddy, caddy
from components.ceph import radosgw
from components.chromium import chromium
from components.moto import moto
from components.nginx import Nginx, nginx
from components.processes import Missing, free_port, in_target, program
from components.redis import RedisServer, redis_server
from components.s3 import S3Server

__all__ = [
    "Caddy",
    "Missing",
    "Nginx",
    "RedisServer",
    "S3Server",
    "caddy",
    "chromium",
    "free_port",
    "in_target",
    "moto",
    "nginx",
    "program",
    "radosgw",
    "redis_server",
]
