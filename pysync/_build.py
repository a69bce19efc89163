"""Refuses a native extension that was built from other sources than the checkout holds."""

import hashlib
from pathlib import Path


def check(stamped_digest: str) -> None:
    """Raise ImportError when this is a checkout and `rust/` is not what the extension was built from."""
    folder = Path(__file__).resolve().parent.parent / "rust"
    if not (folder.parent / "Cargo.toml").exists():
        return
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.rs")):
        digest.update(path.read_bytes())
    if digest.hexdigest() != stamped_digest:
        raise ImportError("pysync._core is older than rust/: run `make build`")
