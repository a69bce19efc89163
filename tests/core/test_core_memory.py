"""The core without memory: a MemoryError, and no end of the process."""

import sys

import pytest
from support.python_process import run_python

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="needs the size of a process in /proc"),
]

LIMITED = """
import ctypes, resource, sys
from pathlib import Path
from pysync import _core as core

ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: glibc keeps no memory for later
MB = 1 << 20
LONG = b'{"text":"' + b"x" * (16 * MB) + b'"}'
BODY = b'{"data":' + LONG + b'}'
NUMBERS = b'{"data":{"list":[' + b"1e20," * (MB // 2) + b'1]}}'
MEMBERS = b'{"data":{' + b'"":0,' * (MB - 1) + b'"":0' + b'}}'
EVENTS = b'{"events":[{"event":' + LONG + b'}]}'
push, append, log = core.decode_push(BODY), core.decode_append(BODY), core.LogHead("a")
full, _ = log.append([(append, "")], 0, None)
stored, head = push.stored(0), full.stored()
document = core.read_document(stored)

def limit(megabytes):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + megabytes * MB
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

limit(int(sys.argv[2]))
try:
    eval(sys.argv[1])
except MemoryError:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    eval(sys.argv[1])
    print("MemoryError")
"""


@pytest.mark.parametrize(
    ("call", "megabytes"),
    [
        ("core.decode_push(BODY)", 8),
        ("core.decode_push(NUMBERS)", 12),
        ("core.decode_push(MEMBERS)", 40),
        ("core.decode_append(BODY)", 8),
        ("core.canonicalize(LONG)", 8),
        ("core.content_hash(LONG)", 8),
        ("push.data", 8),
        ("push.stored(0)", 8),
        ("document.data", 8),
        ("document.answer(0)", 8),
        ("core.verify_author('t', 'k', LONG, 'ab' * 32, 'cd' * 64)", 8),
        ("log.append([(append, '')], 0, None)", 8),
        ("full.seal(1)", 8),
        ("full.stored()", 8),
        ("core.LogHead.read(head, 'elements')", 8),
        ("core.encode_events(EVENTS, '')", 8),
    ],
)
def test_a_call_without_memory_is_a_memory_error(call: str, megabytes: int) -> None:
    output, _ = run_python(LIMITED, call, str(megabytes)).communicate()
    assert output == "MemoryError\n"
