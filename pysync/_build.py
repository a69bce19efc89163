"""Checks that the native extension was built from the sources of this checkout."""

import hashlib
from pathlib import Path


def check(stamped_digest: str) -> None:
    """Raise ImportError if this is a checkout and `stamped_digest` is not the SHA-256 of its `rust/*.rs`, in
    which case the extension is out of date."""
    folder = Path(__file__).resolve().parent.parent / "rust"
    if not (folder.parent / "Cargo.toml").exists():
        return
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.rs")):
        digest.update(path.read_bytes())
    if digest.hexdigest() != stamped_digest:
        raise ImportError("pysync._core is older than rust/: run `make build`")
