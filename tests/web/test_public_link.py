"""A public link opens one document in a browser that has nothing but the link."""

from support.browser import Chromium
from support.clients import Start
from support.collections import collection
from support.web_pages import blank_page
from support.web_replicas import Tab, WebSite

SHARED = ["self", "delegated:{identity}:notebooks"]
NOTEBOOKS = collection("notebooks", "notebooks/{identity}/{id}", readRoles=SHARED, writeRoles=SHARED)


async def test_public_link_opens_one_note_in_another_browser(
    start: Start, screen: Chromium, other_screen: Chromium
) -> None:
    async with WebSite.open(start, NOTEBOOKS) as site:
        one, other = [Tab(await blank_page(each, site.proxy.url)) for each in (screen, other_screen)]
        link = await one.window.run(
            """async (base) => {
              window.keys = await pysync.IdentityKeys.open()
              window.owner = keys.userId
              window.replica = await pysync.Replica.open("mine", new pysync.Client(base, {keys}), {
                notebooks: {identity: owner},
              })
              await replica.put(`notebooks/${owner}/n`, {text: "shared"})
              await replica.put(`notebooks/${owner}/private`, {text: "private"})
              await replica.synced()
              const grant = {ops: ["read", "write"], paths: [`notebooks/${owner}/n`]}
              const certificate = await pysync.issueAudienceCertificate(keys, "notebooks", {grant})
              return [owner, pysync.publicLink(certificate)]
            }""",
            site.proxy.url,
        )
        owner, fragment = link
        note = f"notebooks/{owner}/n"
        await other.window.run(
            """async (base, owner, fragment) => {
              const keys = await pysync.IdentityKeys.open()
              const certificate = await pysync.parsePublicLink(fragment)
              window.client = new pysync.Client(base, {keys, certificate})
              const collections = {notebooks: {identity: owner, id: "n"}}
              window.replica = await pysync.Replica.open("link", client, collections)
              await replica.synced()
            }""",
            site.proxy.url, owner, fragment,
        )  # fmt: skip
        assert await other.get(note) == {"text": "shared"}
        assert await other.window.run("replica.keys()") == [note]
        private = f"notebooks/{owner}/private"
        assert await other.error_of(f"client.pull('{private}')") == ["Forbidden", "forbidden"]
        await other.put({"text": "shared, and edited"}, note)
        await one.shows({"text": "shared, and edited"}, note)
        await one.put({"text": "edited by both"}, note)
        await other.shows({"text": "edited by both"}, note)
