# mypy: ignore-errors
"""Makes the archives beside this file, with version 0.1.0. Run in a clone of it:

    git checkout 3ad6e946 && make build && .venv/bin/python …/tests/upgrade/data/make.py

For a folder, and for a bucket of moto, a server is filled over HTTP and killed, and then `pysync events
compact` is killed in the middle of a merge. `folder.tar.gz` is the folder as it is then, `bucket.tar.gz` has
the objects of the bucket. The JSON files have what the server said last, and when.
"""

import http.client
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, "tests")
import boto3
from components import free_port, moto
from pysync.keys import Keys

from pysync import minting, signing

HERE = Path(__file__).parent
CONFIG = HERE / "config.json"
ISSUER = Keys.from_private(b"\x11" * 32, b"\x31" * 32)
DEVICE = Keys.from_private(b"\x22" * 32, b"\x42" * 32)
NONCE = b"accepted by old "
TEXT = b"a file of version 0.1.0\n" * 4000

KILLED_MERGE = """
import os, signal, sys
from pysync.store import journaled, merges

def killed(*args):
    os.kill(os.getpid(), signal.SIGKILL)

exchange = merges.exchange
merges.exchange = lambda *folders: (exchange(*folders), killed())
each = journaled._each
journaled._each = lambda work, keys: killed() if "delete" in repr(work) else each(work, keys)
from pysync.cli import main
main(sys.argv[1:])
"""


class Server:
    def __init__(self, store, environment):
        self.port, self.store, self.environment = free_port(), store, environment
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pysync", "serve", "--config", CONFIG, "--store", store,
             "--port", str(self.port)],
            env=environment,
        )  # fmt: skip
        while True:
            try:
                if self.request("GET", "/health")[0] == 200:
                    break
            except OSError:
                time.sleep(0.05)

    def request(self, method, target, body=b"", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, target, body, {"Content-Type": "application/json"} | headers)
        response = connection.getresponse()
        return response.status, response.read()

    def push(self, key, data, base=None, **headers):
        body = json.dumps({"data": data, "baseHash": base}).encode()
        status, answer = self.request("POST", f"/push/{key}", body, **headers)
        assert status == 200, (status, answer)
        return json.loads(answer)

    def signed(self, keys, certificate, method, target, body=b"", nonce=None):
        host = f"127.0.0.1:{self.port}"
        now_ms = int(time.time() * 1000)
        signed = signing.sign_request(keys, method, target, body, host, now_ms, nonce or os.urandom(16))
        return self.request(method, target, body, Authorization=certificate.authorization, **signed)

    def place(self):
        """The id at which a stream of changes begins now."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("GET", "/events?collections=notes")
        response = connection.getresponse()
        while not (line := response.readline()).startswith(b"id: "):
            pass
        connection.close()
        return line[4:].strip().decode()

    def compact(self, program=("-m", "pysync")):
        command = [sys.executable, *program, "events", "compact", "--config", CONFIG, "--store", self.store]
        return subprocess.run(command, env=self.environment).returncode


def fill(server):
    """Write everything, and return what the tests compare."""
    first = server.push("notes/a", {"title": "first", "text": "größe", "n": 2**60, "f": 1e21})
    server.push("notes/b", {"title": "second"})
    server.push("notes/once", {"title": "once"}, Idempotency_Key="of-version-0.1.0")
    for number in range(300):
        server.push("logs/long", {"n": number, "text": "x" * 1000})
    server.push("logs/short", {"n": 0})
    status, _ = server.request("POST", "/push/files/text", TEXT, Content_Type="text/plain")
    assert status == 200
    for number in range(3):
        server.push("events/merged/new", {"events": [{"message_id": f"merged-{number}"}]})
    assert server.compact() == 0
    for number in range(3):
        server.push("events/killed/new", {"events": [{"message_id": f"killed-{number}"}]})
    server.push("events/one/new", {"events": [{"message_id": "one"}]})

    now_s = int(time.time())
    own = minting.device(ISSUER, ISSUER.ed_pub, ISSUER.kem_pub, now_s=now_s, nonce=b"1" * 16)
    lost = minting.device(ISSUER, DEVICE.ed_pub, DEVICE.kem_pub, now_s=now_s, nonce=b"2" * 16)
    private = f"users/{own.iss_user_id}/diary"
    body = json.dumps({"data": {"secret": 1}, "baseHash": None}).encode()
    status, answer = server.signed(ISSUER, own, "POST", f"/push/{private}", body)
    assert status == 200, answer
    status, _ = server.signed(ISSUER, own, "GET", f"/pull/{private}", nonce=NONCE)
    assert status == 200
    assert server.signed(DEVICE, lost, "GET", f"/pull/{private}")[0] == 200
    revoked = minting.revocation_list(ISSUER, 1, certificates=[lost])
    status, answer = server.request("POST", "/revocations", revoked.text)
    assert status == 200, answer
    assert server.signed(DEVICE, lost, "GET", f"/pull/{private}")[0] == 401

    place = server.place()
    last = server.push("notes/a", {"title": "last", "text": "größe", "n": 2**60, "f": 1e21}, first["hash"])
    paths = ["/pull/notes/a", "/pull/notes/b", "/pull/notes/once", "/pull/titles/notes", "/list/notes",
             "/pull/logs/long?last=2", "/pull/logs/short?last=2", "/list/events/merged",
             "/list/events/one"]  # fmt: skip
    deadline = time.time() + 5
    while b"last" not in server.request("GET", "/pull/titles/notes")[1]:
        assert time.time() < deadline
    answers = {path: server.request("GET", path) for path in paths}
    assert all(status == 200 for status, _ in answers.values()), answers
    parsed = {path: json.loads(body) for path, (_, body) in answers.items()}
    for answer in parsed.values():
        answer.pop("timestamp", None)  # of the answer
    return {
        "now_ms": int(time.time() * 1000),
        "answers": parsed,
        "private": private,
        "nonce": NONCE.decode(),
        "certificate": own.text.decode(),
        "lost_certificate": lost.text.decode(),
        "place": place,
        "last": last,
    }


def make(name, store, environment):
    server = Server(store, os.environ | environment)
    try:
        expected = fill(server)
    finally:
        server.process.kill()
        server.process.wait()
    assert server.compact(("-c", KILLED_MERGE)) == -signal.SIGKILL
    (HERE / f"{name}.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


with TemporaryDirectory() as place:
    folder = Path(place, "data")
    make("folder", f"file:{folder}", {})
    with tarfile.open(HERE / "folder.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as archive:
        archive.add(folder, "data")
    with moto(Path(place)) as s3:
        environment = {
            "PYSYNC_STORE_ENDPOINT": s3.endpoint, "PYSYNC_STORE_REGION": s3.region,
            "PYSYNC_STORE_ACCESS_KEY_ID": s3.access_key_id,
            "PYSYNC_STORE_SECRET_ACCESS_KEY": s3.secret_access_key,
        }  # fmt: skip
        make("bucket", f"s3://{s3.bucket}/old", environment)
        bucket = boto3.resource(
            "s3", endpoint_url=s3.endpoint, region_name=s3.region,
            aws_access_key_id=s3.access_key_id, aws_secret_access_key=s3.secret_access_key,
        ).Bucket(s3.bucket)  # fmt: skip
        with tarfile.open(HERE / "bucket.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as archive:
            for summary in bucket.objects.all():
                found = summary.Object().get()
                body = found["Body"].read()
                entry = tarfile.TarInfo(summary.key)
                entry.size = len(body)
                entry.pax_headers = {"type": found["ContentType"], "metadata": json.dumps(found["Metadata"])}
                archive.addfile(entry, io.BytesIO(body))
