"""Ceph's S3 gateway over a cluster of one monitor and one store in memory."""

import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from components.processes import START_LIMIT_S, accepts, free_port, program, running, serves_http
from components.s3 import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server

PROGRAMS: Final = ("radosgw", "ceph-mon", "ceph-osd", "monmaptool", "osdmaptool", "radosgw-admin")
MEMORY_BYTES: Final = 2 * 1024**3

# Nobody is authenticated within the cluster and one copy of everything is enough. By default the monitor
# waits a second for more to decide on, a dozen times until the gateway has its pools, and the gateway looks
# every five seconds whether it has missed a decision.
_CONFIGURATION = """
[global]
fsid = {cluster}
mon_initial_members = a
mon_host = {monitor}
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
ms_mon_client_mode = crc
run_dir = {folder}
log_file = {folder}/$name.log
admin_socket =
debug_rgw = 0
debug_osd = 0
debug_mon = 0
debug_rocksdb = 0
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
mon_data_avail_crit = 1
paxos_propose_interval = 0.02
paxos_min_wait = 0.01
mon_tick_interval = 0.5
objecter_tick_interval = 0.2
[mon.a]
mon_data = {folder}/mon.a
[osd.0]
osd_data = {folder}/osd.0
osd_objectstore = memstore
memstore_device_bytes = {memory}
[client.rgw.r]
rgw_data = {folder}/rgw.r
rgw_frontends = beast endpoint=127.0.0.1:{port}
rgw_thread_pool_size = 64
rgw_dns_name = 127.0.0.1
"""


@contextmanager
def radosgw(folder: Path) -> Iterator[S3Server]:
    """Ceph's gateway: signatures are checked, conditional puts atomic. It starts within about a second."""
    programs = {name: program(name, "radosgw") for name in PROGRAMS}
    for name in ("mon.a", "osd.0", "rgw.r"):
        (folder / name).mkdir(parents=True)
    port, v2, v1 = free_port(), free_port(), free_port()
    monitor = f"[v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]"
    cluster, disk = str(uuid.uuid4()), str(uuid.uuid4())
    configuration = folder / "ceph.conf"
    configuration.write_text(
        _CONFIGURATION.format(cluster=cluster, monitor=monitor, folder=folder, memory=MEMORY_BYTES, port=port)
    )

    def command(name: str, *arguments: str) -> list[str]:
        return [programs[name], "-c", str(configuration), *arguments]

    def once(name: str, *arguments: str) -> None:
        _once(command(name, *arguments), folder)

    gateway = ("-n", "client.rgw.r", "--ms_mon_client_mode=crc")
    once("monmaptool", "--create", "--fsid", cluster, "--addv", "a", monitor, "monmap")
    once("osdmaptool", "--createsimple", "1", "osdmap")
    once("ceph-mon", "--mkfs", "-i", "a", "--monmap", "monmap", "--osdmap", "osdmap")
    once("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", disk, "--no-mon-config")
    with ExitStack() as stack:
        for name, arguments, ready in (
            ("ceph-mon", ("-i", "a"), lambda: accepts(v2)),
            ("ceph-osd", ("-i", "0"), lambda: True),
            ("radosgw", gateway, lambda: serves_http(port)),
        ):
            process = running(command(name, *arguments, "-f"), folder / f"{name}.out", folder)
            stack.enter_context(process).wait_until(ready)
        keys = (f"--access-key={ACCESS_KEY_ID}", f"--secret-key={SECRET_ACCESS_KEY}")
        once("radosgw-admin", *gateway, "user", "create", "--uid=t", "--display-name=t", *keys)
        server = S3Server("radosgw", f"http://127.0.0.1:{port}")
        server.make_bucket(server.bucket)
        yield server


def _once(command: Sequence[str], folder: Path) -> None:
    """Run to the end. Raises RuntimeError with its output where it fails."""
    ended = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=START_LIMIT_S, check=False
    )
    if ended.returncode:
        raise RuntimeError(f"{command!r} fails: {ended.stderr[-2000:]}")
