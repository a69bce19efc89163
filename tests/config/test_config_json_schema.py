"""The JSON Schema of the configuration file accepts what the loader accepts, and is in the package."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from pysync.cli.main import main
from pysync.config import Config, parse
from pysync.config.convert import Converter

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted({*ROOT.glob("deploy/*.json")} - {ROOT / "deploy/grafana.json"})
TEMPLATES = sorted(ROOT.glob("pysync/config/templates/*.yaml"))
VALUES: tuple[Any, ...] = (None, 0, "", "none", True, [], {"x": 1})
SCHEMA = ROOT / "pysync/config/pysync.schema.json"


def test_the_schema_accepts_every_example_configuration() -> None:
    validator = jsonschema_rs.validator_for(json.loads(SCHEMA.read_text()))
    assert EXAMPLES
    assert TEMPLATES
    for example in (*EXAMPLES, *TEMPLATES):
        found: Any = yaml.safe_load(example.read_text())
        assert list(validator.iter_errors(found)) == [], example


def test_check_prints_the_schema_without_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", "--json-schema"])
    assert (ended.value.code, capsys.readouterr().out) == (0, SCHEMA.read_text())


def test_a_file_may_name_its_schema() -> None:
    assert parse({"$schema": "./pysync.schema.json", "server": {"port": 1}}).server.port == 1


@pytest.mark.slow
def test_the_schema_rejects_what_the_loader_rejects_by_its_type_and_nothing_else() -> None:
    validator = jsonschema_rs.validator_for(json.loads(SCHEMA.read_text()))
    example = json.loads((ROOT / "deploy/example.json").read_text())
    del example["$schema"]
    for path in paths(example):
        for value in VALUES:
            changed = with_value(example, path, value)
            assert validator.is_valid(changed) == has_right_types(changed), (path, value)


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all members and elements."""
    members: Any = ()
    if isinstance(value, dict):
        members = value.items()
    elif isinstance(value, list):
        members = enumerate(value)
    for name, inner in members:
        yield (*at, name)
        yield from paths(inner, (*at, name))


def with_value(example: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = target = copy.deepcopy(example)
    for name in path[:-1]:
        target = target[name]
    target[path[-1]] = value
    return changed


def has_right_types(value: Any) -> bool:
    converter = Converter({}, str(ROOT / "deploy"))
    converter.object(value, Config, "")
    return not converter.problems
