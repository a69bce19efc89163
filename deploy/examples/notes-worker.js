// The service worker of notes.html: it keeps the page and its module, so that they open without a network. The notes
// themselves are in the replica, and other requests pass by.
const KEPT = ["notes.html", "merge-text.js", "../client/pysync.js"].map((path) => new URL(path, location.href).href);
const WAIT_MS = 4000;    // for a network that does not answer

addEventListener("install", (event) => {
  self.skipWaiting();
  event.waitUntil(caches.open("notes").then((cache) => cache.addAll(KEPT)));
});

addEventListener("fetch", (event) => {
  const address = event.request.url.split(/[?#]/)[0];
  if (event.request.method === "GET" && KEPT.includes(address)) event.respondWith(load(address));
});

// From the server while it answers, so that a new version is there after a reload, and page and module fit together.
async function load(address) {
  const cache = await caches.open("notes");
  try {
    const answer = await fetch(address, { cache: "no-cache", signal: AbortSignal.timeout(WAIT_MS) });
    if (!answer.ok) throw new Error(`${address}: ${answer.status}`);
    await cache.put(address, answer.clone());
    return answer;
  } catch {
    return await cache.match(address) ?? Response.error();
  }
}
