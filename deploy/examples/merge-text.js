// Merging of texts that several people write in: by lines, and where both changed the same lines, by words.

const SPLITS = [(text) => text.split(/(?<=\n)/), (text) => text.split(/(?<=\s)|(?=\s)/)];
const MAX_COMPARED_PAIRS = 4_000_000;    // of parts; beyond that the middle of a text counts as changed altogether

// The text with what I and they have changed since `base`. If both wrote at the same place, both stays, theirs first;
// and if one deleted what the other changed, the change stays. Nothing that somebody wrote is lost.
export function mergeText(base, mine, theirs, level = 0) {
  if (mine === theirs || theirs === base) return mine;
  if (mine === base) return theirs;
  if (level === SPLITS.length) return both(base, mine, theirs);
  let merged = "";
  for (const { texts, common } of cut(SPLITS[level], base, mine, theirs)) {
    merged += mergeText(...texts, level + 1) + common;
  }
  return merged;
}

// The replacements that make `after` of `before`: `text` for what is in [start, end), once those before it are made.
export function* replacements(before, after) {
  let start = 0;
  for (const { texts: [old, text], common } of cut(SPLITS[0], before, after)) {
    const most = Math.min(old.length, text.length);
    let head = 0, tail = 0;    // within lines that differ, the letters that do not
    while (head < most && old[head] === text[head]) head++;
    while (tail < most - head && old.at(-1 - tail) === text.at(-1 - tail)) tail++;
    if (old !== text) {
      yield { start: start + head, end: start + old.length - tail, text: text.slice(head, text.length - tail) };
    }
    start += text.length + common.length;
  }
}

// One word that both have changed.
function both(base, mine, theirs) {
  if (mine.startsWith(theirs)) return mine;    // one change, further on
  if (theirs.startsWith(mine)) return theirs;
  if (theirs.endsWith(base)) return theirs.slice(0, theirs.length - base.length) + mine;
  if (mine.startsWith(base)) return theirs + mine.slice(base.length);
  return theirs + mine;
}

// Cut the texts at the parts that all have in common: yields the texts before each such part, and the part; "" at the
// end.
function* cut(split, ...texts) {
  const [parts, ...others] = texts.map(split), found = others.map((other) => pairs(parts, other));
  let done = texts.map(() => 0);
  for (let index = 0; index <= parts.length; index++) {
    const ends = [index, ...others.map((other, side) => (index < parts.length ? found[side][index] : other.length))];
    if (ends.includes(-1)) continue;
    const before = [parts, ...others].map((each, side) => each.slice(done[side], ends[side]).join(""));
    yield { texts: before, common: parts[index] ?? "" };
    done = ends.map((end) => end + 1);
  }
}

// For each of the parts `a`: which of the parts `b` it is, in a longest common subsequence, or -1.
function pairs(a, b) {
  const found = Array.from({ length: a.length }, () => -1);
  let start = 0, endA = a.length, endB = b.length;
  while (start < endA && start < endB && a[start] === b[start]) found[start] = start++;
  while (endA > start && endB > start && a[endA - 1] === b[endB - 1]) found[--endA] = --endB;
  const rows = endA - start, columns = endB - start;
  if (rows * columns === 0 || rows * columns > MAX_COMPARED_PAIRS) return found;
  const width = columns + 1, longest = new Uint16Array((rows + 1) * width);
  for (let i = rows - 1; i >= 0; i--) {
    for (let j = columns - 1; j >= 0; j--) {
      longest[i * width + j] = a[start + i] === b[start + j]
        ? longest[(i + 1) * width + j + 1] + 1
        : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
    }
  }
  for (let i = 0, j = 0; i < rows && j < columns;) {
    if (a[start + i] === b[start + j]) found[start + i++] = start + j++;
    else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) i++;
    else j++;
  }
  return found;
}
