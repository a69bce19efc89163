"""The browser client merges as the Python client does."""

import json

from support.browser import Chromium
from support.clients import Start
from support.collections import NOTES
from support.configurations import ROOT
from support.web_pages import blank_page, web_service

MERGED = """
(text) => {
  const { MISSING, ThreeWayMerge, canonicalJson, localWins, mergeRemoteWins } = pysync
  const rules = {
    local: localWins, remote: ({ remote }) => remote, base: ({ base }) => base, remove: () => MISSING,
    list: ({ base, local, remote }) => [base, local, remote].filter((value) => value !== MISSING),
  }
  const sorted = (values) => canonicalJson(values.map(canonicalJson).sort())
  const marked = ({ value, ...drop }) => ({ ...drop, ...(value === MISSING ? { removed: true } : { value }) })
  const differs = ({ rule = "local", idMember, base, local, remote, ...wanted }) => {
    const met = []
    const note = (conflict) => {
      met.push(conflict.path)
      return rules[rule](conflict)
    }
    const merge = new ThreeWayMerge(rule === "local" && !wanted.conflicts.length ? undefined : note, idMember)
    const before = canonicalJson([base, local, remote])
    const merged = merge.merge(base, local, remote)
    const dropped = merge.dropped(base, local, remote, merged).map(marked)
    return canonicalJson(merged) !== canonicalJson(wanted.merged) || sorted(met) !== sorted(wanted.conflicts)
      || sorted(dropped) !== sorted(wanted.dropped) || canonicalJson([base, local, remote]) !== before
  }
  const { threeWay, remoteWins } = JSON.parse(text)
  const wrong = remoteWins.filter(({ local, remote, merged }) => (
    canonicalJson(mergeRemoteWins(local, remote)) !== canonicalJson(merged)))
  return [...threeWay.filter(differs).map(({ id }) => id), ...wrong.map(canonicalJson)]
}
"""


async def test_merges_are_those_of_the_vectors(start: Start, screen: Chromium) -> None:
    text = (ROOT / "tests/vectors/merge.json").read_text()
    assert len(json.loads(text)["threeWay"]) > 200
    window = await blank_page(screen, await web_service(start, NOTES))
    assert await window.run(MERGED, text) == []
