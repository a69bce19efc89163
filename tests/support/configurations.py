"""Small configurations, and the problems that are reported for faulty ones."""

from pathlib import Path
from typing import Any

import pytest

from pysync.config import ConfigError, parse

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "deploy/example.json"
WINDOW = {"windowMs": 1000, "maxRequests": 5}


def collection(**members: Any) -> dict[str, Any]:
    return {"name": "notes", "storagePath": "notes/{id}", **members}


def config(*collections: dict[str, Any], **members: Any) -> dict[str, Any]:
    return {"collections": list(collections), **members}


def faults(value: object, environ: dict[str, str] | None = None) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as rejected:
        parse(value, environ or {})
    return [(problem.path, problem.message) for problem in rejected.value.problems]


def only(value: object) -> tuple[str, str]:
    (fault,) = faults(value)
    return fault


def patient(members: dict[str, Any]) -> dict[str, Any]:
    """The same configuration, of a service that is not overloaded on a busy machine."""
    return {**members, "server": {"maxQueueMs": 3_600_000, **members.get("server", {})}}
