"""Optional dependencies, and the command that installs them."""

import sys
from importlib.util import find_spec
from typing import Final

EXTRA_OF: Final = {
    "aiobotocore": "s3",
    "botocore": "s3",
    "duckdb": "parquet",
    "hiredis": "redis",
    "jsonschema_rs": "schema",
    "pyarrow": "parquet",
    "redis": "redis",
}
"""Module -> the extra of `pyproject.toml` that installs it."""


class MissingExtra(ValueError):
    """A feature needs an extra that is not installed. The message names the command that installs it."""


def missing(*modules: str) -> str | None:
    """Return why these modules cannot be imported, with the command that installs their extra; None if they
    can. None of them is imported."""
    for module in modules:
        if find_spec(module) is None:
            extra = EXTRA_OF[module]
            if getattr(sys, "frozen", False):  # a Python of its own, into which nothing can be installed
                return f"needs the extra {extra!r}, which this archive lacks. Install pysync from its wheel"
            command = f"{sys.executable} -m pip install 'pysync[{extra}]'"
            return f"needs the extra {extra!r}. Install it with: {command}"
    return None


def require(feature: str, *modules: str) -> None:
    """Raise MissingExtra if one of the modules that `feature` imports is not installed."""
    if message := missing(*modules):
        raise MissingExtra(f"{feature} {message}")
