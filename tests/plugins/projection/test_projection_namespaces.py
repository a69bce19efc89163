"""Projections whose sources name their namespace: `acme/notes`, `/notes`, or `notes` in any."""

from typing import Any

import pytest
from support.configurations import faults
from support.projection_site import LISTS, NOTES, TITLES, Site, entry, members

from pysync.plugins.projection import Projection
from pysync.plugins.projection.rebuild import rebuild

TENANTS = {
    name: {"collections": [{**NOTES, "storagePath": name + "/{space}/{id}"}]} for name in ("acme", "beta")
}


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("notes", {"", "acme", "beta"}),
        ("acme/notes", {"acme"}),
        ("/notes", {""}),
        (["acme/notes", "/notes"], {"", "acme"}),
    ],
)
async def test_a_source_may_name_its_namespace(source: Any, read: set[str]) -> None:
    site = Site(members({**TITLES, "source": source}, namespaces=TENANTS))
    for namespace in ("", "acme", "beta"):
        await site.push("notes", {"space": "s", "id": namespace or "root"}, {"title": "t"}, namespace or None)
    await site.fold()
    expected = [
        entry(namespace or "root", title="t") for namespace in ("", "acme", "beta") if namespace in read
    ]
    assert await site.items("lists/s") == expected
    await rebuild(site.lists, site.projections, site.log)
    assert await site.items("lists/s") == expected


def test_a_source_that_names_a_namespace_without_it_is_rejected() -> None:
    found = faults(
        members({**TITLES, "source": ["beta/notes", "acme/other"]}, namespaces={"acme": TENANTS["acme"]})
    )
    assert found == [
        ("projections[0].source", "there is no collection 'beta/notes'"),
        ("projections[0].source", "there is no collection 'acme/other'"),
    ]


def test_a_list_may_belong_to_the_namesake_of_a_source_in_another_namespace() -> None:
    lists = {**LISTS, "name": "notes"}
    site = Site(
        {"store": "memory:", "collections": [lists], "namespaces": TENANTS,
         "projections": [{**TITLES, "source": "acme/notes"}]}
    )  # fmt: skip
    (projection,) = site.projections
    assert site.lists.keys.why_not_allowed(projection, "lists/s") is None
    assert site.lists.keys.why_not_allowed(projection, "acme/s/i") == "belongs to notes, one of its sources"


def test_a_circle_over_namespaces_is_rejected() -> None:
    back = {"source": "/lists", "target": "acme/{space}/x", "id": "{space}", "value": {}}
    found = faults(members({**TITLES, "source": "acme/notes"}, back, namespaces={"acme": TENANTS["acme"]}))
    assert ("projections[1].target", "leads back to lists, one of its sources, by other projections") in found
    there = {**back, "source": "beta/notes", "target": "lists/{space}", "name": "there"}
    Site(members({**TITLES, "source": "acme/notes"}, there, namespaces=TENANTS))


def test_a_plugin_reads_what_it_names() -> None:
    one = Projection(["acme/notes", "journal"], "lists/{space}", lambda event: None)
    assert one.reads("acme", "notes")
    assert one.reads("beta", "journal")
    assert one.reads(None, "journal")
    assert not one.reads(None, "notes")
