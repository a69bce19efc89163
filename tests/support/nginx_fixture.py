"""A real nginx with the files of deploy/nginx before servers of a test."""

import asyncio
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from components import free_port
from components.fixtures import StartNginx
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from yarl import URL

DEPLOYED = Path(__file__).parents[2] / "deploy" / "nginx"


def front(start_nginx: StartNginx, *bases: str) -> str:
    """The base URL of an nginx with cluster.conf before the nodes at `bases`."""
    port = free_port()
    return start_nginx(site("cluster.conf", port, *bases), port).url


def site(name: str, port: int, *bases: str, folder: Path = DEPLOYED) -> str:
    """The site `name` of deploy/nginx on `port`, with nodes at `bases` in place of those that it names. The
    files are in `folder`."""
    text = (folder / name).read_text()
    servers = re.findall(r"^ +server \S+:\d+(.*);\n", text, re.M)
    nodes = "".join(f"    server {base.removeprefix('http://')}{servers[0]};\n" for base in bases)
    text = re.sub(r"(^ +server \S+:\d+.*;\n)+", nodes, text, count=1, flags=re.M)
    text = re.sub(r"listen \d+", f"listen 127.0.0.1:{port}", text)
    return text.replace("include pysync.conf", f"include {folder}/pysync.conf")


def certify(folder: Path) -> None:
    """Make a key and a certificate of localhost, under the names that Let's Encrypt gives them."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "fullchain.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "privkey.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


async def open_request(
    base: str, method: str, target: str, headers: dict[str, str]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which the head of a request has been sent."""
    url = URL(base)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    writer.write(f"{method} {target} HTTP/1.1\r\nHost: {url.authority}\r\n{lines}\r\n".encode())
    return reader, writer
