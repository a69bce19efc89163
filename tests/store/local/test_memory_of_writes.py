"""What a local store keeps in memory of large documents after it has written them."""

import asyncio
import os
import sys
from pathlib import Path

import pytest
from support.python_process import run_python

from pysync.store.local.store import LocalStore

WRITE = """
import asyncio, ctypes, resource, sys
from pathlib import Path
from pysync.store.types import ABSENT, ANY, Etag
from pysync.store.local.store import LocalStore

ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: glibc keeps no memory for later
BODY = bytes(32 << 20)

def used():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

async def main():
    store = await LocalStore.open_folder(sys.argv[1])
    await store.put("small", b"{}")
    before = used()
    etag = await store.put("a", BODY, expect=ABSENT)
    await store.put("a", BODY, expect=Etag(etag))
    await store.put("a", BODY, expect=ANY)
    await store.put("small", b"{}")
    found = await store.get("a")
    assert found.body == BODY
    del found
    print((used() - before) >> 20)
    await store.close()

asyncio.run(main())
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="needs the size of a process in /proc")
def test_no_statement_keeps_a_large_document(tmp_path: Path) -> None:
    output, _ = run_python(WRITE, str(tmp_path / "data")).communicate()
    assert int(output) < 32


async def test_the_writer_keeps_no_document_while_it_waits_for_the_next(tmp_path: Path) -> None:
    store = await LocalStore.open_folder(tmp_path / "data")
    body = os.urandom(1024)
    before = sys.getrefcount(body)
    await store.put("a", body)
    while sys.getrefcount(body) > before:
        await asyncio.sleep(0)
    await store.close()
