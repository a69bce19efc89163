"""What an `events` section may say."""

from typing import Any

import pytest
from support.configurations import collection, config, faults, only

from pysync.config import parse
from pysync.config.check import lint
from pysync.config.key_templates import KeyTemplate

EVENTS = {"collection": "events", "storagePath": "lake/{app}/{batchId}"}


def batches(**members: Any) -> dict[str, Any]:
    return collection(name="events", **{"storagePath": "events/{app}/{batchId}"} | members)


def test_the_collection_and_the_files_may_lie_apart_or_at_one_path() -> None:
    for path in ("lake/{app}/{batchId}", "events/{app}/{batchId}", "{app}/all/{batchId}"):
        (plugin,) = parse(config(batches(), events=[{**EVENTS, "storagePath": path}])).events
        assert (plugin.collection, plugin.storage_path) == ("events", path)


@pytest.mark.parametrize(
    ("changed", "path", "message"),
    [
        ({"collection": "none"}, "collection", "there is no collection 'none'"),
        ({"storagePath": "/{app}/{batchId}"}, "storagePath", "must not start or end with a slash"),
        ({"storagePath": "lake/{batchId}/x"}, "storagePath", "must end in a path parameter"),
        (
            {"storagePath": "lake/{app}/{id}"},
            "storagePath",
            "must end in {batchId}, as the collection's storagePath does",
        ),
        (
            {"storagePath": "lake/{app}/{day}/{batchId}"},
            "storagePath",
            "{day} is not a parameter of the collection's storagePath",
        ),
        (
            {"storagePath": "lake/{batchId}"},
            "storagePath",
            "must have the collection's parameters: without {app} batches are mixed",
        ),
    ],
)
def test_a_section_that_cannot_work_is_rejected(changed: Any, path: str, message: str) -> None:
    assert only(config(batches(), events=[EVENTS | changed])) == (f"events[0].{path}", message)


JSON_ONLY = "its allowedMimeTypes must be application/json, and nothing else: batches are JSON"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"allowedMimeTypes": ["application/vnd.apache.parquet"]}, JSON_ONLY),
        ({"allowedMimeTypes": ["*/*"]}, JSON_ONLY),
        ({"allowedMimeTypes": ["application/json", "image/png"]}, JSON_ONLY),
        ({"appendOnly": True}, "cannot have appendOnly"),
        ({"bundle": "all"}, "cannot have bundle"),
        ({"pullOnly": True}, "cannot have pullOnly"),
        ({"encryption": "delegated"}, "cannot have encryption"),
        (
            {"storagePath": "events/{app}/{id}/x"},
            "its storagePath must end in a path parameter, which the server chooses",
        ),
    ],
)
def test_a_collection_that_takes_no_batches_is_rejected(members: Any, message: str) -> None:
    assert ("events[0].collection", message) in faults(config(batches(**members), events=[EVENTS]))


def test_json_is_json_however_it_is_spelled_and_an_id_that_is_not_last_is_one_fault() -> None:
    assert parse(config(batches(allowedMimeTypes=["Application/JSON"]), events=[EVENTS])).events
    found = faults(config(batches(storagePath="events/{app}/x"), events=[EVENTS]))
    message = "its storagePath must end in a path parameter, which the server chooses"
    assert found == [("events[0].collection", message)]


def test_the_id_of_a_batch_may_have_any_name() -> None:
    named = batches(storagePath="events/{app}/{upload}")
    events = {**EVENTS, "storagePath": "lake/{app}/{upload}"}
    assert parse(config(named, events=[events])).events[0].storage_path == "lake/{app}/{upload}"


def test_a_collection_of_a_namespace_is_held_to_the_same() -> None:
    value = config(batches(), namespaces={"acme": {"collections": [batches(bundle="all")]}}, events=[EVENTS])
    assert only(value) == ("events[0].collection", "cannot have bundle")


def test_a_collection_has_one_section() -> None:
    twice = [EVENTS, {**EVENTS, "storagePath": "other/{app}/{batchId}"}]
    assert only(config(batches(), events=twice)) == (
        "events[1].collection",
        "'events' is also another one's",
    )


def test_files_at_the_keys_of_others_are_warned_of() -> None:
    more = collection(name="taps", storagePath="taps/{app}/{batchId}", readRoles=["public"])
    settings = parse(
        config(
            batches(readRoles=["public"]),
            more,
            collection(name="any", storagePath="{a}/{b}/{c}", readRoles=["public"], pullOnly=True),
            collection(name="deeper", storagePath="lake/{a}/{b}/{c}", readRoles=["public"], pullOnly=True),
            events=[EVENTS, {"collection": "taps", "storagePath": "lake/{app}/{batchId}"}],
        )
    )
    findings = [(found.path, found.message) for found in lint(settings) if found.path.startswith("events")]
    suffix = "where they could be read, and replaced"
    assert findings == [
        ("events[0].storagePath", f"its files have keys of any, {suffix}"),
        ("events[0].storagePath", f"its files have keys of the events of taps, {suffix}"),
        ("events[1].storagePath", f"its files have keys of any, {suffix}"),
        ("events[1].storagePath", f"its files have keys of the events of events, {suffix}"),
    ]


def test_members_of_bundles_are_others_and_the_collection_itself_is_not() -> None:
    members = [collection(name=name, storagePath="events/{x}", bundle="b") for name in ("cards", "title")]
    settings = parse(
        config(batches(), *members, events=[{**EVENTS, "storagePath": "events/{app}/{batchId}"}])
    )
    findings = [
        found.message.partition(",")[0] for found in lint(settings) if found.path.startswith("events")
    ]
    assert findings == ["its files have keys of cards", "its files have keys of title"]


@pytest.mark.parametrize(
    ("one", "other", "overlaps"),
    [
        ("a/{x}", "a/{y}", True),
        ("a/{x}", "{y}/b", True),
        ("a/{x}", "b/{x}", False),
        ("a/{x}", "a/{x}/{y}", False),
        ("a/b/{x}", "a/{y}/c", True),
    ],
)
def test_templates_meet_where_a_key_has_the_shape_of_both(one: str, other: str, overlaps: bool) -> None:
    first, second = KeyTemplate(one), KeyTemplate(other)
    assert first.overlaps(second) == second.overlaps(first) == overlaps
