// Edits a replica at random, and reports each edit when it begins and when the replica has accepted it: from then on
// it must not be lost. Each edit adds an entry that no other edit adds.
window.editor = async ({home, name, shared, life, seed, edits, online}) => {
  const random = () => { // mulberry32
    seed = (seed + 0x6d2b79f5) | 0
    let mixed = Math.imul(seed ^ (seed >>> 15), 1 | seed)
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32
  }
  const entriesOf = ({items = [], ...members}) => [...Object.keys(members), ...items.map((item) => item.id)]
  const sharedKey = () => `${home}/docs/shared-${shared}-${Math.floor(random() * 2)}`
  let count = 0
  const newEntry = () => `${name}-${String(life).padStart(4, "0")}-${String(++count).padStart(2, "0")}`
  const reported = async (kind, members, edit) => {
    report({begun: kind, ...members})
    await edit()
    report({done: kind, ...members})
  }
  const add = async () => {
    const [key, entry, isMember] = [sharedKey(), newEntry(), random() < 0.5]
    await reported("add", {key, entry}, () => replica.update(key, (data) => {
      if (isMember) return {...data, [entry]: true}
      return {...data, items: [...(data?.items ?? []), {id: entry}]}
    }))
  }
  const append = async () => {
    const key = `${home}/logs/log-${Math.floor(random() * 2)}`
    const entry = newEntry()
    await reported("append", {key, entry}, () => replica.append(key, {id: entry}))
  }
  const own = async () => {
    const key = `${home}/docs/own-${name}`
    const entry = random() < 0.4 && (await replica.get(key)) ? null : newEntry()
    const edit = entry ? () => replica.put(key, {id: entry}) : () => replica.delete(key)
    await reported("own", {key, entry}, edit)
  }
  const drop = async () => {
    const key = sharedKey()
    if (random() < 0.7) return
    await replica.update(key, (data) => {
      report({begun: "drop", key, seen: entriesOf(data ?? {})})
      return null
    })
  }
  for (let made = 0; made < edits; made++) {
    await [add, add, append, append, own, drop][Math.floor(random() * 6)]()
    if (online && random() < 0.3) await syncedAtLast()
    else for (let turns = random() * 20; turns > 0; turns--) await new Promise((resolve) => setTimeout(resolve))
  }
  if (online) await syncedAtLast()
  report({idle: true})
}

// Syncs with a server that sometimes fails.
window.syncedAtLast = async () => {
  for (;;) {
    try {
      return await replica.synced()
    } catch (error) {
      if (!["Unreachable", "Unavailable"].includes(error.name)) throw error
    }
  }
}
