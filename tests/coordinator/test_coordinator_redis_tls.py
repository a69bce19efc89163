"""A Redis behind TLS: its certificate is held against the system's authorities, or the one that is named."""

import datetime
from pathlib import Path

import pytest
from components import free_port
from components.fixtures import StartRedis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pysync.clock import wall_clock_ms
from pysync.coordinator import open_coordinator
from pysync.errors import CoordinatorUnavailable


def make_certificate(folder: Path, host: str) -> tuple[Path, Path]:
    """The files of a certificate for `host`, signed by itself, and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    crt, pem = folder / "redis.crt", folder / "redis.key"
    crt.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pem.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return crt, pem


@pytest.fixture
def tls_port(start_redis: StartRedis, tmp_path: Path) -> int:
    crt, key = make_certificate(tmp_path, "localhost")
    port = free_port()
    start_redis(
        *("--tls-port", f"{port}", "--tls-auth-clients", "no"),
        *("--tls-cert-file", f"{crt}", "--tls-key-file", f"{key}"),
    )
    return port


async def test_a_redis_is_reached_over_tls(tls_port: int, tmp_path: Path) -> None:
    coordinator = await open_coordinator(f"rediss://localhost:{tls_port}/0?ssl_ca_certs={tmp_path}/redis.crt")
    assert await coordinator.consume_nonce("aa", "n", wall_clock_ms())
    assert not await coordinator.consume_nonce("aa", "n", wall_clock_ms())
    await coordinator.close()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
async def test_a_certificate_that_nobody_vouches_for_is_rejected(
    tls_port: int, tmp_path: Path, host: str
) -> None:
    query = f"?ssl_ca_certs={tmp_path}/redis.crt" if host == "127.0.0.1" else ""
    with pytest.raises(CoordinatorUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        await open_coordinator(f"rediss://{host}:{tls_port}/0{query}")
