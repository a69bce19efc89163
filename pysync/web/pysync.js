// The browser client of pysync: keys, signed requests, live documents, sealed data, and a replica that works offline
// and in several tabs. One ES module without dependencies; docs/reference/browser-client.md describes it, and
// pysync.d.ts beside this file has its types.

// --- Errors ----------------------------------------------------------------------------------------------------------


// --- Values ----------------------------------------------------------------------------------------------------------


// --- Keys ------------------------------------------------------------------------------------------------------------


// --- Certificates ----------------------------------------------------------------------------------------------------


// --- Client ----------------------------------------------------------------------------------------------------------


// --- Change stream ---------------------------------------------------------------------------------------------------


// --- Merge -----------------------------------------------------------------------------------------------------------

/** Stands for a member or entry that does not exist. */
export const MISSING = Symbol("MISSING");

const UNSAFE_KEYS = new Set(["__proto__", "constructor", "prototype", "__class__", "__dict__"]);
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const membersOf = (value) => new Map(isObject(value) ? Object.entries(value) : []);
const valueAt = (members, name) => (members.has(name) ? members.get(name) : MISSING);

/** Whether two values are the same JSON, in whatever order their members are. */
function same(one, other) {
  if (Array.isArray(one) && Array.isArray(other)) {
    return one.length === other.length && one.every((value, at) => same(value, other[at]));
  }
  if (!isObject(one) || !isObject(other)) return one === other;
  const names = Object.keys(one);
  return names.length === Object.keys(other).length
    && names.every((name) => Object.hasOwn(other, name) && same(one[name], other[name]));
}

/** The default rule for conflicts: an edit wins over a removal, else the local side wins. */
export function localWins({ local, remote }) {
  return local === MISSING ? remote : local;
}

/** The members of both, objects member by member, everything else as `remote` has it. It needs no base. */
export function mergeRemoteWins(local, remote) {
  const names = Object.entries({ ...local, ...remote }).filter(([name]) => !UNSAFE_KEYS.has(name));
  return Object.fromEntries(names.map(([name, value]) => [name, !isObject(value) ? value
    : mergeRemoteWins(isObject(local[name]) ? local[name] : {}, value)]));
}

/** Merges the changes of two sides to a common base: objects by their members, lists of objects with ids by these. */
export class ThreeWayMerge {
  #onConflict;
  #idMember;

  constructor(onConflict = localWins, idMember = "id") {
    this.#onConflict = onConflict;
    this.#idMember = idMember;
  }

  merge(base, local, remote) {
    const merged = this.#value([], base, local, remote);
    return isObject(merged) ? merged : {};
  }

  /** The edits that left no trace in `merged`, however that was made. */
  dropped(base, local, remote, merged) {
    return [...this.#dropped([], base, local, remote, merged, true),
      ...this.#dropped([], base, remote, local, merged, false)];
  }

  #value(path, base, local, remote) {
    if (same(local, remote) || same(remote, base)) return local;
    if (same(local, base)) return remote;
    if (isObject(local) && isObject(remote)) {
      const sides = [base, local, remote].map(membersOf);
      return Object.fromEntries(this.#members(path, ...sides, [...sides[2].keys(), ...sides[1].keys()]));
    }
    const [before, mine, theirs] = [base, local, remote].map((side) => this.#entries(side));
    if (!mine || !theirs) return this.#onConflict({ path, base, local, remote });
    const sides = [before ?? new Map(), mine, theirs];
    return [...this.#members(path, ...sides, mergedOrder(...sides.map((side) => [...side.keys()]))).values()];
  }

  #members(path, base, local, remote, names) {
    const merged = new Map();
    for (const name of new Set(names)) {
      const value = this.#value([...path, name], ...[base, local, remote].map((side) => valueAt(side, name)));
      if (value !== MISSING) merged.set(name, value);
    }
    return merged;
  }

  /** The entries of a list by their ids; null for anything else. */
  #entries(list) {
    if (!Array.isArray(list)) return null;
    const entries = new Map();
    for (const entry of list) {
      const id = isObject(entry) ? entry[this.#idMember] : null;
      if ((typeof id !== "string" && !Number.isInteger(id)) || entries.has(id)) return null;
      entries.set(id, entry);
    }
    return entries;
  }

  *#dropped(path, base, edited, other, merged, local) {
    if (same(edited, base) || same(edited, merged)) return;
    const sides = [base, edited, other, merged];
    let inner = sides.map(membersOf);
    if (!isObject(edited) || !isObject(merged)) {
      inner = sides.map((side) => this.#entries(side));
      if (!inner[1] || !inner[3]) {
        if (same(merged, other) || same(merged, base)) yield { path, value: edited, local };
        return;
      }
      inner = inner.map((side) => side ?? new Map());
      if (isReorderingDropped(...[inner[0], inner[1], inner[3]].map((side) => [...side.keys()]))) {
        yield { path, value: edited, local };
      }
    }
    for (const name of new Set([...inner[0].keys(), ...inner[1].keys()])) {
      yield* this.#dropped([...path, name], ...inner.map((side) => valueAt(side, name)), local);
    }
  }
}

/** Those of `ids` that are in `kept`. */
function only(kept, ids) {
  const wanted = new Set(kept);
  return ids.filter((id) => wanted.has(id));
}

/** The ids of both sides in the order of the merged list. */
function mergedOrder(base, local, remote) {
  const [first, second] = same(only(local, base), only(base, local)) ? [remote, local] : [local, remote];
  const [inFirst, inSecond] = [new Set(first), new Set(second)];
  const following = new Map([[MISSING, []]]);
  let anchor = MISSING;
  for (const id of second) {
    if (inFirst.has(id)) following.set((anchor = id), []);
    else following.get(anchor).push(id);
  }
  const order = [];
  let waiting = following.get(MISSING);
  for (const id of first) {
    if (inSecond.has(id)) {
      order.push(...waiting);
      waiting = following.get(id);
    }
    order.push(id);
  }
  return [...order, ...waiting];
}

/** Whether `edited` reorders entries of the base, and `merged` does not follow that order. */
function isReorderingDropped(...lists) {
  const kept = lists.reduce(only);
  const [base, edited, merged] = lists.map((ids) => only(kept, ids));
  return !same(base, edited) && !same(edited, merged);
}


// --- SyncDocument ----------------------------------------------------------------------------------------------------


// --- Sealed data -----------------------------------------------------------------------------------------------------


// --- Replica: storage ------------------------------------------------------------------------------------------------


// --- Replica: local copy and outbox ----------------------------------------------------------------------------------


// --- Replica: inbox --------------------------------------------------------------------------------------------------


// --- Replica: synchronisation, tabs ----------------------------------------------------------------------------------

