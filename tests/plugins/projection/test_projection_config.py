"""Projections as the configuration declares them: what they do, and what is refused.

See docs/reference/protocol.md#projected-lists.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.cli_runner import Shell
from support.collections import PUBLIC
from support.configurations import config, faults
from support.projection_site import JOURNAL, LISTS, NOTES, TITLES, Site, entry, members

from pysync.config import ConfigError, parse
from pysync.config.check import lint
from pysync.plugins.projection import projections_of

DATA: dict[str, Any] = {
    "title": "T",
    "a/b": 1,
    "m~n": 2,
    "~1": 3,
    "": {"": 4},
    "tags": ["x", {"y": 5}],
    "none": None,
    "deep": {"er": {"est": 6}},
}


@pytest.mark.parametrize(
    ("pointer", "value"),
    [
        ("/title", "T"),
        ("/a~1b", 1),
        ("/m~0n", 2),
        ("/~01", 3),
        ("//", 4),
        ("/tags/0", "x"),
        ("/tags/1/y", 5),
        ("/none", None),
        ("/deep/er/est", 6),
        ("/deep", {"er": {"est": 6}}),
        ("/", DATA),
    ],
)
async def test_pointer_selects_the_value(pointer: str, value: Any) -> None:
    site = Site(members(TITLES | {"value": {"found": pointer}}))
    await site.note("a", **DATA)
    await site.fold()
    assert await site.items() == [entry("a", found=value)]


@pytest.mark.parametrize(
    "pointer",
    ["/nothing", "/title/x", "/tags/2", "/tags/-", "/tags/01", "/tags/x", "/deep/er/est/x", "/A~1b"],
)
async def test_member_with_a_dangling_pointer_is_left_out(pointer: str) -> None:
    site = Site(members(TITLES | {"value": {"found": pointer, "title": "/title"}}))
    await site.note("a", **DATA)
    await site.fold()
    assert await site.items() == [entry("a", title="T")]


async def test_without_value_an_entry_is_its_id() -> None:
    site = Site(members(TITLES | {"value": {}}))
    await site.note("a", title="A")
    await site.fold()
    assert await site.items() == [entry("a")]


@pytest.mark.parametrize(
    ("when", "removed"),
    [
        ({"/deleted": True}, True),
        ({"/deleted": 1}, False),
        ({"/n": 1}, True),
        ({"/n": 1.0}, True),
        ({"/n": True}, False),
        ({"/none": None}, True),
        ({"/missing": None}, False),
        ({"/deleted": True, "/state/at": "end"}, True),
        ({"/deleted": True, "/state/at": "start"}, False),
        ({"/state": {"at": "end"}}, True),
        ({}, False),
    ],
)
async def test_an_entry_is_removed_when_every_pointers_value_is_the_given_one(
    when: dict[str, Any], removed: bool
) -> None:
    site = Site(members(TITLES | {"removeWhen": when}))
    await site.note("a", title="A")
    await site.note("b", title="B", deleted=True, n=1, none=None, state={"at": "end"})
    await site.fold()
    assert [item["id"] for item in await site.items()] == (["a"] if removed else ["a", "b"])


async def test_parameters_of_the_write_stand_in_target_and_id() -> None:
    site = Site(members(TITLES | {"id": "{space}-{id}!", "target": "lists/{id}"}))
    await site.note("a", title="A")
    await site.fold()
    assert await site.items("lists/a") == [entry("s-a!", title="A")]


async def test_a_projection_may_have_several_sources() -> None:
    tasks = {"name": "tasks", "storagePath": "tasks/{space}/{id}", **PUBLIC}
    site = Site(members(TITLES | {"source": ["notes", "tasks"]}, collections=[NOTES, tasks, LISTS]))
    await site.note("a", title="A")
    await site.push("tasks", {"space": "s", "id": "b"}, {"title": "B"})
    await site.fold()
    assert await site.items() == [entry("a", title="A"), entry("b", title="B")]


async def test_elements_of_a_log_are_pointed_into(tmp_path: Path) -> None:
    site = Site(members(TITLES | {"source": "journal", "target": "lists/{space}", "id": "last {space}"}))
    await site.push("journal", {"space": "s"}, {"title": "one"})
    await site.push("journal", {"space": "s"}, {"title": "two"})
    await site.fold()
    assert await site.items() == [entry("last s", title="two")]


CODE = """
def shouted(event):
    return {"id": event.params["id"], "value": {"title": event.body["title"].upper()}}

def by_first(event):
    return "lists/" + event.body["title"][0]

number = 7
"""


@pytest.fixture
def code_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with functions of somebody's, which can be imported."""
    name = f"code_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    return name


async def test_functions_replace_a_mapping(code_module: str) -> None:
    code = {"source": "notes", "target": f"{code_module}:by_first", "project": f"{code_module}:shouted"}
    site = Site(members(code))
    await site.note("a", title="anna")
    await site.note("b", title="bob")
    await site.fold()
    assert await site.items("lists/a") == [entry("a", title="ANNA")]
    assert await site.items("lists/b") == [entry("b", title="BOB")]


def test_missing_code_is_reported_with_its_location(code_module: str) -> None:
    value = members(
        TITLES,
        {"source": "notes", "target": "lists/{space}", "name": "x", "project": f"{code_module}:shouts"},
        {"source": "notes", "target": "nowhere:f", "id": "{id}"},
        {"source": "notes", "target": "lists/{space}", "name": "y", "project": f"{code_module}:number"},
    )
    with pytest.raises(ConfigError) as rejected:
        projections_of(parse({"version": 1, **value}))
    (one, other, third) = [(problem.path, problem.message) for problem in rejected.value.problems]
    assert one[0] == "projections[1]"
    assert f"{code_module} has no shouts; did you mean shouted?" in one[1]
    assert other == ("projections[2]", "there is no module nowhere")
    assert third == ("projections[3]", f"{code_module}:number is no function")


def test_check_reads_the_code_next_to_the_file(shell: Shell, tmp_path: Path) -> None:
    said = members({"source": "notes", "target": "lists/{space}", "project": "code_beside:shouted"})
    (tmp_path / "pysync.json").write_text(json.dumps({"version": 1, **said}))
    status, output, _ = shell.run("check", "pysync.json")
    assert (status, "there is no module code_beside" in output) == (1, True)
    (tmp_path / "code_beside.py").write_text(CODE)
    assert shell.run("check", "pysync.json")[0] == 0


FILES = {"name": "files", "storagePath": "files/{space}", "allowedMimeTypes": ["image/png"]}
NOTIFIED = {"name": "told", "storagePath": "told/{space}", "appendOnly": {"persist": False}}
BATCHES = {"name": "batches", "storagePath": "batches/{space}/{batchId}"}
INDEX = {"name": "index", "storagePath": "notes/{space}/index"}


@pytest.mark.parametrize(
    ("changed", "path", "message"),
    [
        ({"target": "notes/{space}/all"}, "target", "belongs to notes, one of its sources"),
        ({"target": "notes/{space}/{id}"}, "target", "belongs to notes, one of its sources"),
        ({"target": "journals/{space}"}, "target", "belongs to journal, which is append-only"),
        (
            {"target": "files/{space}"},
            "target",
            "belongs to files, whose allowedMimeTypes lack application/json",
        ),
        ({"target": "_pysync/lists"}, "target", "must not start with _pysync, the server's own keys"),
        ({"value": {"t": "/a~2"}}, "value", "/a~2 is no JSON pointer: write ~0 for ~ and ~1 for /"),
        ({"removeWhen": {"/~": 1}}, "removeWhen", "/~ is no JSON pointer: write ~0 for ~ and ~1 for /"),
        ({"maxRetries": -1}, "maxRetries", "must be at least 0"),
    ],
)
def test_impossible_projection_is_rejected(changed: Any, path: str, message: str) -> None:
    collections = (NOTES, JOURNAL, LISTS, FILES, NOTIFIED, BATCHES)
    events = [{"collection": "batches", "storagePath": "batches/{space}/{batchId}"}]
    value = config(*collections, projections=[TITLES | changed], events=events)
    assert (f"projections[0].{path}", message) in faults(value)


def test_a_list_may_lie_at_a_key_that_another_collection_spells_out() -> None:
    value = config(NOTES, INDEX, projections=[TITLES | {"target": "notes/{space}/index"}])
    parse(value)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({}, "is required: 'lists/{space}' is also another projection's"),
        ({"name": "lists/{space}"}, "'lists/{space}' is also another projection's"),
    ],
)
def test_two_projections_have_two_names(second: dict[str, str], message: str) -> None:
    value = config(NOTES, LISTS, projections=[TITLES, TITLES | second])
    assert faults(value) == [("projections[1].name", message)]
    parse(config(NOTES, LISTS, projections=[TITLES, TITLES | {"name": "other"}]))


def test_projections_do_not_go_in_a_circle() -> None:
    index = {"name": "index", "storagePath": "index/{space}"}
    onward = {"source": "lists", "target": "index/{space}", "id": "x", "name": "onward"}
    back = {"source": "index", "target": "lists/{space}", "id": "y", "name": "back"}
    parse(config(NOTES, LISTS, index, projections=[TITLES, onward]))
    message = "leads back to {}, one of its sources, by other projections"
    assert faults(config(NOTES, LISTS, index, projections=[TITLES, onward, back])) == [
        ("projections[1].target", message.format("lists")),
        ("projections[2].target", message.format("index")),
    ]


def test_a_list_of_no_collection_is_warned_of() -> None:
    said = [TITLES, TITLES | {"target": "elsewhere/{space}"}, TITLES | {"target": "m:f"}]
    warnings = [problem for problem in lint(parse(members(*said))) if problem.path.startswith("projections")]
    assert [(problem.path, problem.message) for problem in warnings] == [
        (
            "projections[1].target",
            "belongs to no collection: no client can pull the list or subscribe to its changes",
        )
    ]
