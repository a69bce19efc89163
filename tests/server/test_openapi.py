"""`GET /openapi.json` describes what is served, and nothing else."""

import hashlib
import json
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import aiohttp
from jsonschema_rs import validator_for
from support.clients import Browser, Start
from support.collections import MINE, NOTES

from pysync import __version__
from pysync.errors import errors_by_code

LOG = {"requireAuthorSignature": False, "maxItems": 2}
OPERATORS = {"/", "/health", "/health/ready", "/metrics", "/version", "/openapi.json"}
CLIENT = {"/client/pysync.js", f"/client/{__version__}/pysync.js", "/client/pysync.d.ts"}


def assert_valid(document: Any) -> None:
    from openapi_spec_validator import OpenAPIV31SpecValidator  # slow to import

    OpenAPIV31SpecValidator(document).validate()


async def described(
    start: Start, session: aiohttp.ClientSession, *collections: dict[str, Any], **members: Any
) -> Any:
    """The document of a service with these collections, found valid."""
    browser = Browser(await start({"collections": list(collections), **members}), session)
    reply = await browser.request("GET", "/openapi.json")
    assert (reply.status, reply.headers["Content-Type"]) == (200, "application/json")
    assert_valid(reply.json)
    document = json.loads(start.apps[-1].current.openapi.complete())  # type: ignore[attr-defined]
    assert_valid(document)
    return document


def rejected(operation: Any) -> set[str]:
    return {status for status in operation["responses"] if status >= "400"}


async def test_every_route_is_described_and_nothing_else(
    start: Start, session: aiohttp.ClientSession
) -> None:
    read, written = {**NOTES, "pullOnly": True}, {**MINE, "pushOnly": True}
    document = await described(start, session, read, written, namespaces={"acme": {"collections": [NOTES]}})
    found = {(path, method) for path, item in document["paths"].items() for method in item}
    assert found == {(path, "get") for path in OPERATORS | CLIENT} | {
        ("/revocations", "post"),
        ("/revocations/{issuer}", "get"),
        ("/batch/pull", "get"),
        ("/acme/batch/pull", "get"),
        ("/events", "get"),
        ("/acme/events", "get"),
        ("/changes", "get"),
        ("/acme/changes", "get"),
        ("/pull/notes/{id}", "get"),
        ("/push/u/{identity}/{id}", "post"),
        ("/acme/pull/notes/{id}", "get"),
        ("/acme/push/notes/{id}", "post"),
    }  # fmt: skip
    names = [operation["operationId"] for item in document["paths"].values() for operation in item.values()]
    assert len(names) == len(set(names))


async def test_a_list_is_described_at_its_prefix(start: Start, session: aiohttp.ClientSession) -> None:
    paths = (await described(start, session, {**MINE, "listable": True}, {**NOTES, "listable": True}))[
        "paths"
    ]
    assert [each["name"] for each in paths["/list/u/{identity}"]["get"]["parameters"] if "in" in each] == [
        "identity"
    ]
    assert {"$ref": "#/components/parameters/limit"} in paths["/list/notes"]["get"]["parameters"]
    assert "401" not in rejected(paths["/list/notes"]["get"])


async def test_a_bundle_is_described_with_its_members(start: Start, session: aiohttp.ClientSession) -> None:
    title = {**NOTES, "name": "title", "bundle": "page"}
    body = {**NOTES, "name": "body", "bundle": "page", "readRoles": ["cap:read:body"]}
    paths = (await described(start, session, title, body))["paths"]
    assert set(paths["/push/notes/{id}/body"]) == {"post"}
    bundle = paths["/pull/notes/{id}"]["get"]
    answer = bundle["responses"]["200"]["content"]["application/json"]["schema"]
    assert answer["properties"]["collections"]["propertyNames"]["enum"] == ["title", "body"]
    assert {} in bundle["security"]
    assert "401" in rejected(bundle)


async def test_a_batch_is_described_with_the_collections_of_its_namespace(
    start: Start, session: aiohttp.ClientSession
) -> None:
    sealed = {**NOTES, "name": "sealed", "storagePath": "s/{id}", "pushOnly": True}
    spaces = {"acme": {"collections": [{**NOTES, "name": "inner"}]}}
    document = await described(
        start, session, NOTES, MINE, sealed, namespaces=spaces, maxCollectionsPerBatch=7
    )
    batch = document["paths"]["/batch/pull"]["get"]
    parameters = {each["name"]: each for each in batch["parameters"] if "name" in each}
    assert parameters["collections"]["schema"]["items"]["enum"] == ["notes", "mine"]
    assert parameters["collections"]["schema"]["maxItems"] == 7
    sets = parameters["params"]["content"]["application/json"]["schema"]["properties"]
    assert set(sets["mine"]["items"]["properties"]) == {"identity", "id"}
    assert sets["mine"]["items"]["required"] == ["id"]
    assert rejected(batch) == {"400", "408", "414", "500", "503"}
    inner = document["paths"]["/acme/batch/pull"]["get"]
    assert inner["parameters"][0]["schema"]["items"]["enum"] == ["inner"]
    assert inner["security"] == [{}]


async def test_the_manifest_is_described_where_it_is_served(
    start: Start, session: aiohttp.ClientSession
) -> None:
    assert "/config" not in (await described(start, session, NOTES))["paths"]
    spaces = {"acme": {"collections": [NOTES]}}
    public = await described(start, session, NOTES, namespaces=spaces, configEndpoint={"auth": "public"})
    root, inner = (public["paths"][path]["get"] for path in ("/config", "/acme/config"))
    manifest = root["responses"]["200"]["content"]["application/json"]["schema"]
    assert manifest["properties"]["namespaces"]["propertyNames"]["enum"] == ["acme"]
    assert (
        "namespaces" not in inner["responses"]["200"]["content"]["application/json"]["schema"]["properties"]
    )
    assert root["security"] == [{}]
    filtered = await described(start, session, NOTES, configEndpoint={"auth": "role-filtered"})
    assert {"capability": []} in filtered["paths"]["/config"]["get"]["security"]


async def test_every_stored_kind_is_answered_as_described(
    start: Start, session: aiohttp.ClientSession
) -> None:
    """With documents, which requests made from the description seldom meet."""
    page = {**NOTES, "storagePath": "pages/{page}", "bundle": "page"}
    base = await start(
        {
            "collections": [
                {**NOTES, "listable": True},
                {**NOTES, "name": "keys", "storagePath": "notes/{id}/_keyring"},
                {**page, "name": "title"},
                {**page, "name": "body"},
                {**NOTES, "name": "log", "storagePath": "log/{id}", "appendOnly": LOG},
            ],
            "namespaces": {"acme": {"collections": [NOTES]}},
            "configEndpoint": {"auth": "public"},
        }
    )
    browser = Browser(base, session)
    document = (await browser.request("GET", "/openapi.json")).json

    async def checked(template: str, target: str, status: int = 200, body: object = None) -> Any:
        method = "get" if body is None else "post"
        reply = await browser.request(method.upper(), target, body)
        assert reply.status == status
        answer = document["paths"][template][method]["responses"][str(status)]
        if "$ref" in answer:
            answer = document["components"]["responses"][answer["$ref"].rpartition("/")[2]]
        schema = answer["content"]["application/json"]["schema"]
        validator_for({**schema, "components": document["components"]}).validate(reply.json)
        return reply.json

    first = {"data": {"n": 1}}
    await checked("/push/notes/{id}", "/push/notes/a", body=first)
    await checked("/push/notes/{id}", "/push/notes/a", 409, first)
    await checked("/push/notes/{id}/_keyring", "/push/notes/a/_keyring", body=first)
    await checked("/push/pages/{page}/title", "/push/pages/p/title", body=first)
    assert (await checked("/pull/notes/{id}", "/pull/notes/a?withKeyring=1"))["keyring"]["data"] == {"n": 1}
    assert (await checked("/pull/notes/{id}", "/pull/notes/b?withKeyring=1"))["keyring"] is None
    assert set((await checked("/pull/pages/{page}", "/pull/pages/p"))["collections"]) == {"title", "body"}
    assert (await checked("/list/notes", "/list/notes"))["items"] == ["a"]
    sets = quote('{"notes":[{"id":"a"},{"id":"b"},{}]}')
    entries = await checked("/batch/pull", f"/batch/pull?collections=notes&params={sets}")
    assert len(entries["collections"]["notes"]) == 3
    await checked("/push/log/{id}", "/push/log/a", body=first)
    await checked(
        "/push/log/{id}", "/push/log/a", body={**first, "authorPubkey": "p", "authorSignature": "s"}
    )
    await checked("/push/log/{id}", "/push/log/a", 409, first)
    assert len((await checked("/pull/log/{id}", "/pull/log/a?last=5"))["data"]["items"]) == 2
    assert (await checked("/pull/log/{id}", "/pull/log/b?full=true"))["hash"] == ""
    await checked("/pull/log/{id}", "/pull/log/a", 400)
    assert set((await checked("/config", "/config"))["namespaces"]) == {"acme"}
    await checked("/acme/config", "/acme/config")


async def test_a_mounted_service_describes_its_paths_below_the_mount(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(await start({"collections": [NOTES], "server": {"mountPath": "/v1"}}), session)
    at_root = await browser.request("GET", "/openapi.json")
    mounted = await browser.request("GET", "/v1/openapi.json")
    assert at_root.body == mounted.body
    assert_valid(at_root.json)
    assert {"/v1/pull/notes/{id}", "/v1/revocations", "/v1/health", "/health"} <= at_root.json["paths"].keys()
    assert "/pull/notes/{id}" not in at_root.json["paths"]


async def test_a_parameter_is_described_with_its_form(start: Start, session: aiohttp.ClientSession) -> None:
    document = await described(start, session, MINE)
    parameters = document["paths"]["/pull/u/{identity}/{id}"]["get"]["parameters"]
    assert [each["name"] for each in parameters if each.get("in") == "path"] == ["identity", "id"]
    form = document["components"]["schemas"]["PathParameter"]
    assert (form["minLength"], form["maxLength"]) == (1, 255)


async def test_every_rejection_is_described_with_its_status_and_code(
    start: Start, session: aiohttp.ClientSession
) -> None:
    components = (await described(start, session, NOTES))["components"]
    codes = {
        (name, code)
        for name, answer in components["responses"].items()
        for code in answer["content"]["application/json"]["schema"]["allOf"][1]["properties"]["code"]["enum"]
    }
    assert codes == {(f"Refused{kind.status}", code) for code, kind in errors_by_code().items()}
    assert components["schemas"]["Error"]["properties"]["code"]["enum"] == list(errors_by_code())


async def test_a_route_names_the_rejections_that_its_rule_can_lead_to(
    start: Start, session: aiohttp.ClientSession
) -> None:
    limit = {"windowMs": 1000, "maxRequests": 5}
    metered = {**MINE, "name": "metered", "storagePath": "m/{identity}", "rateLimit": {"pull": limit}}
    paths = (await described(start, session, NOTES, MINE, metered))["paths"]
    assert rejected(paths["/pull/notes/{id}"]["get"]) == {"400", "408", "414", "500", "503"}
    signed = rejected(paths["/pull/u/{identity}/{id}"]["get"])
    assert signed == {"400", "401", "403", "408", "414", "500", "503"}
    assert "429" in rejected(paths["/pull/m/{identity}"]["get"])
    assert "429" not in rejected(paths["/push/m/{identity}"]["post"])
    assert {"409", "413", "415"} <= rejected(paths["/push/notes/{id}"]["post"])
    assert rejected(paths["/health"]["get"]) == {"400", "408", "414", "500"}


async def test_a_service_with_public_hosts_may_reject_another(
    start: Start, session: aiohttp.ClientSession
) -> None:
    browser = Browser(
        await start({"collections": [NOTES], "server": {"publicHosts": ["a.example"]}}), session
    )
    reply = await browser.request("GET", "/openapi.json", headers={"Host": "a.example"})
    assert "421" in rejected(reply.json["paths"]["/health"]["get"])


async def test_a_route_names_the_credentials_that_it_needs(
    start: Start, session: aiohttp.ClientSession
) -> None:
    loose = {**NOTES, "name": "loose", "storagePath": "l/{id}", "requireAuth": False, "readRoles": ["admin"]}
    document = await described(start, session, NOTES, MINE, loose, auth={"adminToken": "t" * 32})
    signed: dict[str, list[str]] = {"capability": [], "signature": [], "timestamp": [], "nonce": []}
    ways = [signed, {**signed, "presenter": []}, {"admin": []}]
    paths = document["paths"]
    assert paths["/pull/notes/{id}"]["get"]["security"] == [{}]
    assert paths["/pull/u/{identity}/{id}"]["get"]["security"] == ways
    assert paths["/pull/l/{id}"]["get"]["security"] == [{}, *ways]
    schemes = document["components"]["securitySchemes"]
    assert schemes["signature"]["name"] == "X-Starfish-Sig"
    assert schemes["admin"] == {"type": "http", "scheme": "bearer"}


async def test_a_service_without_an_admin_token_takes_none(
    start: Start, session: aiohttp.ClientSession
) -> None:
    document = await described(start, session, MINE)
    assert "admin" not in document["components"]["securitySchemes"]


async def test_a_push_is_described_with_the_schema_of_its_collection(
    start: Start, session: aiohttp.ClientSession
) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"$ref": "#/$defs/name"}, "parts": {"type": "array", "items": {"$ref": "#"}}},
        "$defs": {"name": {"type": "string"}},
    }
    typed = {**NOTES, "name": "two words", "objectSchema": schema}
    document = await described(start, session, typed)
    operation = document["paths"]["/push/notes/{id}"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    own = "#/components/schemas/Data.two_20_words"
    assert body["properties"]["data"]["allOf"] == [{"type": "object"}, {"$ref": own}]
    found = document["components"]["schemas"]["Data.two_20_words"]["properties"]
    assert found["name"]["$ref"] == f"{own}/$defs/name"
    assert found["parts"]["items"]["$ref"] == own
    assert body["required"] == ["data"]


async def test_a_log_is_described_with_its_bounds_and_elements(
    start: Start, session: aiohttp.ClientSession
) -> None:
    log = {**NOTES, "appendOnly": {"field": "entries"}, "objectSchema": {"minProperties": 1}}
    plain = {
        **NOTES,
        "name": "plain",
        "storagePath": "p/{id}",
        "appendOnly": {"requireAuthorSignature": False},
    }
    document = await described(start, session, log, plain)
    paths, parameters = document["paths"], document["components"]["parameters"]
    pull = paths["/pull/notes/{id}"]["get"]
    declared = [parameters[each["$ref"].rpartition("/")[2]] for each in pull["parameters"] if "$ref" in each]
    assert [each["name"] for each in declared] == [
        "checkpoint", "since", "limit", "last", "full", "If-None-Match"
    ]  # fmt: skip
    found = pull["responses"]["200"]["content"]["application/json"]["schema"]["properties"]["data"]
    assert found["properties"]["entries"]["items"] == {"$ref": "#/components/schemas/Element"}
    assert rejected(pull) == {"400", "408", "414", "500", "503"}

    append = paths["/push/notes/{id}"]["post"]
    body = append["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["data", "authorPubkey", "authorSignature"]
    assert body["properties"]["data"]["allOf"][1] == {"$ref": "#/components/schemas/Data.notes"}
    assert "baseHash" not in body["properties"]
    assert {"403", "409", "413", "415", "503"} <= rejected(append)
    assert {"$ref": "#/components/parameters/idempotencyKey"} in append["parameters"]
    unsigned = paths["/push/p/{id}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert unsigned["required"] == ["data"]


async def test_a_schema_with_an_id_keeps_its_references(start: Start, session: aiohttp.ClientSession) -> None:
    schema = {"$id": "urn:example:note", "properties": {"to": {"$ref": "#"}}}
    document = await described(start, session, {**NOTES, "objectSchema": schema})
    assert document["components"]["schemas"]["Data.notes"] == schema


async def test_a_schema_of_true_is_a_schema(start: Start, session: aiohttp.ClientSession) -> None:
    document = await described(start, session, {**NOTES, "objectSchema": True})
    assert document["components"]["schemas"]["Data.notes"] is True


FILES = {**NOTES, "allowedMimeTypes": ["image/png", "text/*"]}


async def test_files_are_described_with_their_media_types(
    start: Start, session: aiohttp.ClientSession
) -> None:
    paths = (await described(start, session, FILES))["paths"]
    pull, push = paths["/pull/notes/{id}"]["get"], paths["/push/notes/{id}"]["post"]
    assert set(push["requestBody"]["content"]) == {"image/png", "text/*"}
    assert set(pull["responses"]["200"]["content"]) == {"image/png", "text/*", "application/json"}
    assert set(pull["responses"]["206"]["content"]) == {"image/png", "text/*"}
    assert "416" in rejected(pull)
    names = [each["$ref"].rpartition("/")[2] for each in pull["parameters"] if "$ref" in each]
    assert names == ["ifNoneMatch", "range", "ifRange"]


async def test_documents_and_files_of_one_collection_are_described_together(
    start: Start, session: aiohttp.ClientSession
) -> None:
    mixed = {**FILES, "allowedMimeTypes": ["application/json", "image/png"]}
    paths = (await described(start, session, mixed))["paths"]
    content = paths["/push/notes/{id}"]["post"]["requestBody"]["content"]
    assert set(content) == {"image/png", "application/json"}
    assert content["application/json"]["schema"]["required"] == ["data"]


async def test_parquet_is_described_as_it_is_answered(start: Start, session: aiohttp.ClientSession) -> None:
    tables = {**NOTES, "allowedMimeTypes": ["application/vnd.apache.parquet", "application/octet-stream"]}
    paths = (await described(start, session, tables))["paths"]
    content = paths["/pull/notes/{id}"]["get"]["responses"]["200"]["content"]
    assert set(content) == {"application/vnd.apache.parquet", "application/json"}
    assert set(paths["/push/notes/{id}"]["post"]["requestBody"]["content"]) == set(tables["allowedMimeTypes"])


EVERY_KIND: dict[str, Any] = {
    "auth": {"adminToken": "a-token-for-these-tests", "trustedIssuers": ["0" * 64]},
    "configEndpoint": {"auth": "role-filtered"},
    "maxCollectionsPerBatch": 7,
    "collections": [
        {**NOTES, "listable": True, "cacheDurationMs": 1000},
        {**MINE, "rateLimit": {"pull": {"windowMs": 1000, "maxRequests": 5}}},
        {**NOTES, "name": "log", "storagePath": "log/{id}", "appendOnly": LOG},
        {**NOTES, "name": "chat", "storagePath": "chat/{id}", "appendOnly": {"field": "said"}},
        {**NOTES, "name": "typed", "storagePath": "t/{x}/{y}", "objectSchema": {"minProperties": 1}},
        {**NOTES, "name": "title", "storagePath": "pages/{page}", "bundle": "page"},
        {**MINE, "name": "draft", "storagePath": "pages/{page}", "bundle": "page"},
        {**NOTES, "name": "gone", "storagePath": "gone/{id}", "deletable": True, "history": {}},
        {**NOTES, "name": "files", "storagePath": "files/{id}", "allowedMimeTypes": ["text/*"]},
        {**MINE, "name": "mixed", "storagePath": "m/{id}", "allowedMimeTypes": ["*/*", "application/json"]},
        {**NOTES, "name": "taps", "storagePath": "taps/{app}/{batchId}", "listable": True},
        {**NOTES, "name": "two words", "storagePath": "w", "pushOnly": True},
    ],
    "events": [{"collection": "taps", "storagePath": "lake/{app}/{batchId}"}],
    "namespaces": {"acme": {"collections": [MINE]}},
    "server": {"mountPath": "/v1"},
}
DIGEST = "9b8e0efef2222d42e5775cbebf5a00a34cfe87a1530677ceb7f98b2c23e54a1d"
"""Of the description of `EVERY_KIND`: it changes where a client may see a change."""


async def test_the_description_of_every_kind_of_route_stays_as_it_is(start: Start) -> None:
    await start(EVERY_KIND)
    document = json.loads(start.apps[-1].current.openapi.complete())  # type: ignore[attr-defined]
    assert_valid(document)
    del document["info"]["version"]
    text = json.dumps(document, sort_keys=True).replace(__version__, "version")
    assert '"<' not in text, "a name in openapi.json has no value"
    for status in HTTPStatus:  # which Python 3.13 names otherwise
        text = text.replace(f'"{status.phrase}"', f'"{status.value}"')
    assert hashlib.sha256(text.encode()).hexdigest() == DIGEST
