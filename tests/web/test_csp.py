"""The browser client works below a strict Content-Security-Policy. The pages of all these tests have it."""

from support.browser import Chromium
from support.replicas import DOC, LOG
from support.web_replicas import WebSite

COLLECT_REPORTS = """
window.reports = []
addEventListener("securitypolicyviolation", (event) => reports.push(event.effectiveDirective))
"""


async def test_replica_and_stream_work_below_a_strict_policy_without_a_report(
    site: WebSite, screen: Chromium
) -> None:
    tab = await site.tab(screen, before=COLLECT_REPORTS)
    await tab.put({"n": 1})
    await tab.append({"n": 1})
    await tab.synced()
    await tab.window.run(
        f"""(async () => {{
          window.note = new pysync.SyncDocument(client, "{DOC}")
          window.followed = note.follow({{collection: "docs"}})
          await followed.next()
          window.next = followed.next()
        }})()"""
    )
    await site.push({"n": 2})
    assert (await tab.window.run("next"))["value"] == {"n": 2}
    await tab.shows({"n": 2})
    await tab.window.run(f"replica.tail('{LOG}', 1)")
    assert await tab.window.run("reports") == []
    assert tab.window.complaints == []

    await tab.window.run(
        f"""(async () => {{
          await fetch("{site.base}/health").catch(() => null)
          try {{ document.body.innerHTML = "<b>" }} catch {{}}
          try {{ eval("1") }} catch {{}}
        }})()"""
    )
    await tab.window.until("reports.length > 1")
    assert {"connect-src", "require-trusted-types-for"} <= set(await tab.window.run("reports"))
    assert tab.window.complaints != []
    tab.window.complaints.clear()
