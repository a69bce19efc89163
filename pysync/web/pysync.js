// The browser client of pysync: keys, signed requests, live documents, sealed data, and a replica that works offline
// and in several tabs. One ES module without dependencies; docs/reference/browser-client.md describes it, and
// pysync.d.ts beside this file has its types.

// --- Errors ----------------------------------------------------------------------------------------------------------

/** An error that the server answered with. */
export class PysyncError extends Error {
  static status = 500;
  static code = "internal_error";

  constructor(message, { status, code, extras = {}, retryAfterS = 0 } = {}) {
    super(message ?? new.target.code);
    Object.assign(this, { status: status ?? new.target.status, code: code ?? new.target.code, extras, retryAfterS });
  }
}

// For each status the class of answers without a known code (- for none), its subclasses after >, and others. The
// code is the name in lower case, unless it follows a colon.
const ERROR_TABLE = `
400 BadRequest > InvalidPathParameter InvalidJson BodyTooDeep BodyNotObject InvalidData InvalidBaseHash
 AuthorProofMissing SchemaViolation InvalidWritten InvalidLimit InvalidAfter InvalidSince HashesNotAvailable
 InvalidRevocation MissingCollections UnknownCollection InvalidParams InvalidAppendParams InvalidKnown
 TooManyCollections BatchAppendBudgetExceeded BatchTooLarge BatchKeyDenied DataNotSealed:not_sealed AppendProofMissing
 InvalidTs TsTooFarAhead InvalidCheckpoint InvalidLast CheckpointTooOld PullBoundRequired FullWithBounds FullNotAllowed
 InvalidEvents AppendParamsNotSupported
401 Unauthorized
403 Forbidden > ForeignOrigin BadSignature TooManyIssuers
404 NotFound VersionNotFound
405 MethodNotAllowed
408 RequestTimeout
409 - Conflict:hash_mismatch NonMonotonicTimestamp AppendLimitExceeded KeyConflict StaleGeneration ReloadRefused
 OutcomeUnknown
410 - Erased
413 PayloadTooLarge
414 UriTooLong
415 UnsupportedMediaType
416 RangeNotSatisfiable
421 MisdirectedRequest
422 - IdempotencyKeyReused
429 RateLimited
500 InternalError AuthorizationError DocumentCorrupt
503 Unavailable > Overloaded StoreUnavailable CoordinatorUnavailable RolesUnavailable
507 QuotaExceeded`;

/** The classes of `pysync.errors` by their names. */
export const errors = { PysyncError };
const errorsByCode = {}, errorsByStatus = {};
for (const row of ERROR_TABLE.slice(1).split(/\n(?! )/)) {
  const [status, first, ...rest] = row.split(/\s+/);
  const isBase = rest[0] === ">";
  for (const entry of [first, ...rest.slice(isBase ? 1 : 0)].filter((each) => each !== "-")) {
    const [name, code = name.replace(/(?!^)[A-Z]/g, "_$&").toLowerCase()] = entry.split(":");
    const parent = isBase && entry !== first ? errors[first] : PysyncError;
    const kind = { [name]: class extends parent {} }[name];
    errors[name] = errorsByCode[code] = Object.assign(kind, { status: Number(status), code });
  }
  errorsByStatus[status] = errors[first];
}
Object.defineProperty(errors.Conflict.prototype, "currentHash", {
  get() { return String(this.extras.currentHash ?? ""); },
});

/** There was no answer, or none of this protocol. A push that ends so may have been applied. */
export class Unreachable extends Error {}
/** This browser lacks something that the module needs. */
export class UnsupportedBrowser extends Error {}
/** The storage of this browser is full, or it has deleted what was stored. */
export class StorageError extends Error {
  constructor(message, code = "failed", options) {
    super(message, options);
    this.code = code;
  }
}
/** A replica that belongs to another caller or server, or has a format of another version. */
export class ReplicaError extends Error {}
/** The document changed on the server, and the version from which the local edit began is unknown. */
export class UnknownBase extends Error {
  constructor(currentHash) {
    super("the document has changed, and the version that was edited is unknown: pull first");
    this.currentHash = currentHash;
  }
}
/** Something sealed cannot be opened, or not be sealed; `name` says why. */
export class SealedError extends Error {
  constructor(name, message) {
    super(message);
    this.name = name;
  }
}
const ownErrors = [Unreachable, UnsupportedBrowser, StorageError, ReplicaError, UnknownBase];
for (const kind of [...ownErrors, ...Object.values(errors)]) kind.prototype.name = kind.name;

function responseError(status, body, retryAfter) {
  const { error, code, ...extras } = body;
  const kind = errorsByCode[code] ?? errorsByCode[error] ?? errorsByStatus[status] ?? PysyncError;
  const retryAfterS = /^\d+$/.test(retryAfter ?? "") ? Number(retryAfter) : 0;
  return new kind(error || `HTTP ${status}`, { status, extras, retryAfterS });
}

function batchError(text) {
  const others = { "Collection not found": errors.NotFound, "Missing required path parameter": errors.BadRequest };
  return new (others[text] ?? errorsByCode[text.toLowerCase().replaceAll(" ", "_")] ?? PysyncError)(text);
}

/** True if the request may succeed later: the server is unreachable, busy or unwell. */
function isRetryable(error) {
  return error instanceof Unreachable
    || (error instanceof PysyncError && (error.status >= 500 || [408, 429].includes(error.status)));
}

// --- Values ----------------------------------------------------------------------------------------------------------

/** The version of pysync that this module belongs to. */
export const VERSION = "0.3.0.dev0";

const encoder = new TextEncoder();
const hex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
function unhex(text) {
  if (!/^([0-9a-f]{2})*$/.test(text)) throw new TypeError("expected hex digits in lower case");
  return Uint8Array.from(text.match(/../g) ?? [], (pair) => parseInt(pair, 16));
}
function base64(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; at += 8192) text += String.fromCharCode(...bytes.subarray(at, at + 8192));
  return btoa(text);
}
const unbase64 = (text) => Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
const base64url = (bytes) => base64(bytes).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
const unbase64url = (text) => unbase64(text.replaceAll("-", "+").replaceAll("_", "/"));
function concat(...arrays) {
  const all = new Uint8Array(arrays.reduce((size, array) => size + array.length, 0));
  arrays.reduce((at, array) => (all.set(array, at), at + array.length), 0);
  return all;
}
const randomBytes = (size) => crypto.getRandomValues(new Uint8Array(size));

function subtle() {
  if (globalThis.crypto?.subtle) return crypto.subtle;
  throw new UnsupportedBrowser("pages have cryptography over https and on localhost only");
}
const sha256 = async (bytes) => new Uint8Array(await subtle().digest("SHA-256", bytes));

/** Resolves after `ms`; rejects at once when the signal is aborted. */
function sleep(ms, signal) {
  return new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    const abort = () => (clearTimeout(timer), reject(signal.reason));
    const timer = setTimeout(() => (signal?.removeEventListener("abort", abort), resolve()), ms);
    signal?.addEventListener("abort", abort, { once: true });
  });
}

// UTF-16 has the surrogates, which stand for the last code points, before the last units.
const rank = (unit) => (unit < 0xd800 ? unit : unit < 0xe000 ? unit + 0x2000 : unit - 0x800);
function byCodePoint(one, other) {
  let at = 0;
  while (at < one.length && one[at] === other[at]) at++;
  if (at === one.length || at === other.length) return one.length - other.length;
  return rank(one.charCodeAt(at)) - rank(other.charCodeAt(at));
}

/** JSON with sorted members and no white space, over which hashes and signatures are made. */
export function canonicalJson(value) {
  if (Array.isArray(value)) return `[${value.map((each) => canonicalJson(each ?? null)).join()}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  const names = Object.keys(value).filter((name) => value[name] !== undefined).sort(byCodePoint);
  return `{${names.map((name) => `${JSON.stringify(name)}:${canonicalJson(value[name])}`).join()}}`;
}
const canonicalBytes = (value, tag = "") => encoder.encode(tag + canonicalJson(value));

const DROPPED_NAMES = ["__proto__", "constructor", "prototype", "__class__", "__dict__"];
/** Returns the data as the server would return it. Throws TypeError for values that JSON cannot hold, and RangeError
 * for NaN and infinite numbers. */
function copy(value, isInArray = false) {
  if (value === null || typeof value === "boolean") return value;
  if (typeof value === "string" && value.isWellFormed()) return value;
  if (typeof value === "number") {
    if (!Number.isFinite(value)) throw new RangeError("JSON has no NaN and no infinite numbers");
    return value + 0;
  }
  if (Array.isArray(value)) return Array.from(value, (each) => copy(each, true));
  if (Object.prototype.toString.call(value) !== "[object Object]") {
    throw new TypeError(`JSON cannot hold ${typeof value === "string" ? "half a character" : String(value)}`);
  }
  const members = Object.entries(value).filter(
    ([name, member]) => member !== undefined && (isInArray || !DROPPED_NAMES.includes(name)));
  return Object.fromEntries(members.map(([name, member]) => [copy(name), copy(member, isInArray)]));
}

/** The hash that the server gives a document. */
export const documentHash = async (data) => hex(await sha256(canonicalBytes(copy(data))));

/** The key of a document, also from the paths that other clients of the protocol accept. */
const documentKey = (key) => key.replace(/^\/pull\//, "").replace(/^\/push\//, "");

/** A parsed key template such as `notes/{identity}/{id}`. */
class KeyTemplate {
  constructor(text) {
    this.text = text;
    this.segments = text.split("/");
    this.names = this.segments.map((segment) => segment.match(/^\{(\w+)\}$/)?.[1]);
    this.params = this.names.filter(Boolean);
    this.endsInParam = this.names.at(-1) !== undefined;
  }
  fill(values) {
    return this.segments.map((segment, at) => {
      const name = this.names[at];
      if (name && values[name] === undefined) throw new TypeError(`the parameter {${name}} has no value`);
      return name ? String(values[name]) : segment;
    }).join("/");
  }
  matches(key) {
    const parts = key.split("/");
    return parts.length === this.segments.length
      && parts.every((part, at) => this.names[at] || part === this.segments[at]);
  }
  paramsOf(key) {
    const parts = key.split("/");
    return Object.fromEntries(this.names.flatMap((name, at) => (name ? [[name, parts[at]]] : [])));
  }
}

// The answers of the server. A TypeError says that an answer is none of the protocol.
function typed(value, type) {
  if (typeof value === type && value !== null && !Array.isArray(value)) return value;
  throw new TypeError(`expected a value of type ${type}`);
}
const object = (value) => typed(value, "object");
const text = (value) => typed(value, "string");
const whole = (value) => typed(value, "number");

const pullResult = (body) => ({
  data: object(body.data), hash: text(body.hash), timestampMs: whole(body.timestamp),
  authorPubkey: body.authorPubkey, authorSignature: body.authorSignature,
  keyring: body.keyring ? pullResult(body.keyring) : undefined,
  hasMore: body.hasMore === true, unchanged: false,
});
const pushResult = (body) => ({ hash: text(body.hash), timestampMs: whole(body.timestamp ?? 0) });

function batchEntry(entry) {
  if (entry.unchanged !== true) return "error" in object(entry) ? batchError(text(entry.error)) : pullResult(entry);
  return { data: {}, hash: text(entry.hash), timestampMs: whole(entry.timestamp), hasMore: false, unchanged: true };
}

/** The elements of a pulled log. `field` is the name of the array that holds them; default: the only one. */
export function elements(pulled, field = Object.keys(pulled.data)[0] ?? "") {
  const found = pulled.data[field] ?? (pulled.hash ? undefined : []);
  if (!Array.isArray(found)) throw new TypeError(`what is stored is no log with its elements in "${field}"`);
  return found.map(({ ts, data, authorPubkey, authorSignature }) => (
    { tsMs: whole(ts), data: object(data), authorPubkey, authorSignature }));
}

const changeEvent = (change, id) => ({
  collection: text(change.collection), params: object(change.params ?? {}), hash: text(change.hash),
  timestampMs: whole(change.timestamp), namespace: change.namespace, removed: change.removed === true, id,
});
const changesPage = (body) => ({
  changes: Array.from(body.changes ?? [], (change) => changeEvent(change, "")), cursor: text(body.cursor),
  hasMore: body.hasMore === true, isReset: body.reset === true, restoredMs: body.restored,
});

// --- Keys ------------------------------------------------------------------------------------------------------------

/** Returns the result of a request to IndexedDB. */
function requested(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function storageError(error) {
  const isFull = error?.name === "QuotaExceededError";
  const message = `the storage of this browser ${isFull ? "is full" : `failed: ${error?.message}`}`;
  return new StorageError(message, isFull ? "full" : "failed", { cause: error });
}

/** Opens a database of IndexedDB. `upgrade` creates the stores of a new one. Throws StorageError. */
async function openDatabase(name, upgrade) {
  if (!globalThis.indexedDB) throw new UnsupportedBrowser("this browser has no IndexedDB");
  try {
    const opening = indexedDB.open(name, 1);
    opening.onupgradeneeded = () => upgrade(opening.result);
    return await requested(opening);
  } catch (error) {
    throw storageError(error);
  }
}

const PKCS8 = { Ed25519: "302e020100300506032b657004220420", X25519: "302e020100300506032b656e04220420" };

/** Calls WebCrypto. Throws UnsupportedBrowser if it has no Ed25519 or X25519. */
async function withCurves(call) {
  try {
    return await call(subtle());
  } catch (error) {
    if (!["NotSupportedError", "SyntaxError"].includes(error?.name)) throw error;
    throw new UnsupportedBrowser("this browser has no Ed25519 and X25519 in WebCrypto; "
      + "Chrome 137, Firefox 130, Safari 17.4 and newer have", { cause: error });
  }
}
const publicKey = (key) => subtle().importKey("raw", unhex(key), "Ed25519", true, ["verify"]);

/** An Ed25519 pair, which signs, and an X25519 pair, to which others seal. */
export class IdentityKeys {
  #edKey;
  #kemKey;

  /** @private Use `open`, `generate` or `fromPrivate`. */
  constructor({ edPub, kemPub, userId, edKey, kemKey }) {
    Object.assign(this, { edPub, kemPub, userId });
    [this.#edKey, this.#kemKey] = [edKey, kemKey];
  }

  /** The keys that this browser keeps under a name in IndexedDB; made when they are first asked for. */
  static async open(name = "default") {
    const database = await openDatabase("pysync-keys", (created) => created.createObjectStore("keys"));
    const store = (mode) => database.transaction("keys", mode).objectStore("keys");
    try {
      const known = await requested(store("readonly").get(name));
      if (known) return new IdentityKeys(known);
      const made = await IdentityKeys.generate();
      const kept = store("readwrite");
      const other = await requested(kept.get(name)); // of another tab
      if (other) return new IdentityKeys(other);
      const { edPub, kemPub, userId } = made;
      kept.put({ edPub, kemPub, userId, edKey: made.#edKey, kemKey: made.#kemKey }, name);
      await committed(kept.transaction);
      return made;
    } catch (error) {
      throw error instanceof UnsupportedBrowser ? error : storageError(error);
    } finally {
      database.close();
    }
  }

  /** New keys, which nobody keeps. */
  static async generate() {
    const made = async (name, usages) => {
      const pair = await withCurves((crypto) => crypto.generateKey(name, false, usages));
      return [pair.privateKey, hex(new Uint8Array(await subtle().exportKey("raw", pair.publicKey)))];
    };
    const [edKey, edPub] = await made("Ed25519", ["sign", "verify"]);
    const [kemKey, kemPub] = await made("X25519", ["deriveBits"]);
    return new IdentityKeys({ edPub, kemPub, userId: await userId(edPub), edKey, kemKey });
  }

  /** Keys from private halves, each 64 hex digits. */
  static async fromPrivate(edPriv, kemPriv) {
    const imported = async (name, secret, usages) => {
      const bytes = unhex(PKCS8[name] + secret);
      // WebCrypto shows the public half of a key that may be exported.
      const shown = await withCurves((crypto) => crypto.importKey("pkcs8", bytes, name, true, usages));
      const { x } = await subtle().exportKey("jwk", shown);
      return [await subtle().importKey("pkcs8", bytes, name, false, usages), hex(unbase64url(x))];
    };
    const [edKey, edPub] = await imported("Ed25519", edPriv, ["sign"]);
    const [kemKey, kemPub] = await imported("X25519", kemPriv, ["deriveBits"]);
    return new IdentityKeys({ edPub, kemPub, userId: await userId(edPub), edKey, kemKey });
  }

  async sign(message) {
    return base64(new Uint8Array(await subtle().sign("Ed25519", this.#edKey, message)));
  }

  /** The secret that these keys share with the X25519 key of another: 32 bytes. */
  async deriveShared(kemPub) {
    const other = await subtle().importKey("raw", unhex(kemPub), "X25519", false, []);
    return new Uint8Array(await subtle().deriveBits({ name: "X25519", public: other }, this.#kemKey, 256));
  }
}

/** Resolves when a transaction of IndexedDB is on the disk. */
function committed(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error);
  });
}

/** The user id of a public key. */
export const userId = async (edPub) => hex(await sha256(unhex(edPub))).slice(0, 32);

// --- Certificates ----------------------------------------------------------------------------------------------------

const LIFETIME_S = 30 * 24 * 3600;
const isKey = (value) => typeof value === "string" && /^[0-9a-f]{64}$/.test(value);
const isTexts = (value) => Array.isArray(value) && value.every((each) => typeof each === "string");

function checkedCertificate(members) {
  const { kind, iss, issUserId, sub, subKem, aud, scope, nbf, exp, nonce, sig } = object(members);
  const isForAll = kind === "audience";
  const isWellFormed = ["device", "member", "audience"].includes(kind)
    && isKey(iss) && [issUserId, nonce, sig].every((each) => typeof each === "string")
    && (isForAll ? sub === undefined && (aud === undefined || (isTexts(aud) && aud.length && aud.every(isKey)))
      : isKey(sub) && typeof subKem === "string" && aud === undefined)
    && isTexts(scope?.ops) && isTexts(scope.collections) && isTexts(scope.paths ?? [])
    && Number.isInteger(nbf) && Number.isInteger(exp) && exp > nbf;
  if (!isWellFormed) throw new TypeError("this is no certificate");
  return Object.freeze(members);
}

async function signedMembers(issuer, tag, members) {
  return { ...members, sig: await issuer.sign(canonicalBytes(members, `${tag}\n`)) };
}

async function issue(issuer, kind, subject, grant, collections, { nowS, expiresAtS } = {}) {
  const nbf = Math.floor(nowS ?? Date.now() / 1000);
  return checkedCertificate(await signedMembers(issuer, "starfish-capcert-v1", {
    v: 1, kind, iss: issuer.edPub, issUserId: await userId(issuer.edPub), ...subject,
    scope: { ops: grant.ops, paths: grant.paths, collections },
    nbf, exp: Math.floor(expiresAtS ?? nbf + LIFETIME_S), nonce: base64(randomBytes(16)),
  }));
}
const readerGrant = (collection) => ({ ops: ["read", "list"], paths: [`${collection}/**`, `!${collection}/_members`] });

/** Lets another key act as the issuer: a further device of the same person. */
export function issueDeviceCertificate(issuer, { edPub, kemPub }, options = {}) {
  const { grant = { ops: ["read", "list", "write"], paths: ["**"] }, collections = ["*"] } = options;
  return issue(issuer, "device", { sub: edPub, subKem: kemPub }, grant, collections, options);
}

/** Lets another person into a collection. */
export async function issueMemberCertificate(issuer, { edPub, kemPub }, collection, options = {}) {
  const subject = { sub: edPub, subKem: kemPub, subUserId: await userId(edPub) };
  return issue(issuer, "member", subject, options.grant ?? readerGrant(collection), [collection], options);
}

/** Lets the keys of `aud`, or anybody who has the certificate, into a collection. */
export function issueAudienceCertificate(issuer, collection, options = {}) {
  const subject = options.aud ? { aud: options.aud } : {};
  return issue(issuer, "audience", subject, options.grant ?? readerGrant(collection), [collection], options);
}

function parsedJson(source, what) {
  try {
    return object(JSON.parse(source));
  } catch {
    throw new TypeError(`this is no ${what}`);
  }
}

/** The certificate in a text that somebody issued. Throws TypeError for anything else. */
export const parseCertificate = (source) => checkedCertificate(parsedJson(source, "certificate"));

/** The URL fragment that shares an audience certificate. */
export function publicLink(certificate) {
  if (certificate.kind !== "audience") throw new TypeError("a link can only share an audience certificate");
  return base64url(canonicalBytes({ cap: certificate, v: 1 }));
}

/** The certificate in the fragment of a public link. Throws TypeError for anything else. */
export function parsePublicLink(fragment) {
  const encoded = fragment.trim().replace(/^#/, "");
  if (!/^[\w-]+$/.test(encoded)) throw new TypeError("this is no public link");
  const { v, cap } = parsedJson(new TextDecoder().decode(unbase64url(encoded)), "public link");
  if (v !== 1 || cap?.kind !== "audience") throw new TypeError("this is no public link");
  return checkedCertificate(cap);
}

/** A list that revokes certificates and whole keys of the issuer; `client.revoke` publishes it. */
export async function issueRevocationList(issuer, generation, { certificates = [], subjects = [], earlier = {} }) {
  const { sig, ...known } = earlier;
  const revoked = certificates.map(({ sub = "", nonce, exp }) => ({ sub, nonce, exp }));
  const revokedSubjects = mergedEntries(known.revokedSubjects, subjects.map(({ sub, exp }) => ({ sub, exp })));
  return signedMembers(issuer, "starfish-revlist-v1", {
    ...known, v: 1, iss: issuer.edPub, issUserId: await userId(issuer.edPub), generation,
    revoked: mergedEntries(known.revoked, revoked), ...(revokedSubjects.length && { revokedSubjects }),
  });
}

/** The entries of both lists, each subject and nonce once, with its later expiry; 0 or less never expires. */
function mergedEntries(earlier = [], own) {
  const entries = new Map(earlier.map((entry) => [`${entry.sub} ${entry.nonce}`, entry]));
  for (const entry of own) {
    const name = `${entry.sub} ${entry.nonce}`, known = entries.get(name);
    if (!known || (known.exp > 0 && known.exp < entry.exp)) entries.set(name, entry);
  }
  return [...entries.values()];
}

/** Throws BadSignature for a revocation list that its issuer has not signed. */
async function verifyRevocationList(list, issuer) {
  const { sig, ...members } = list;
  const message = canonicalBytes(members, "starfish-revlist-v1\n");
  const isSigned = isKey(list.iss) && await userId(list.iss) === issuer && typeof sig === "string"
    && await subtle().verify("Ed25519", await publicKey(list.iss), unbase64(sig), message);
  if (!isSigned) throw new errors.BadSignature("the revocation list is not signed by its issuer");
  return list;
}

// --- Client ----------------------------------------------------------------------------------------------------------

const JSON_TYPE = "application/json";
const isJsonType = (type) => (type ?? "").split(";")[0].trim().toLowerCase() === JSON_TYPE;
const RENEW_BEFORE_S = 24 * 3600; // clocks differ
const CLOCK_ERROR_MS = 5_000; // up to which the clock of this machine is taken for right
const CLOCK_SKEW_MS = 300_000; // that servers allow
const HASH_DIGITS = 16;

/** The path with a query of the members that are neither null nor undefined. */
function withQuery(path, members) {
  const given = Object.entries(members).filter(([, value]) => value !== undefined && value !== null);
  const query = new URLSearchParams(given).toString().replaceAll("%2C", ",").replaceAll("%3A", ":");
  return query ? `${path}?${query}` : path;
}

/** The seconds to wait after so many failures; null to give up. */
function waitS({ attempts, initialS, maxS }, failures, retryAfterS = 0, mayGiveUp = true) {
  if (mayGiveUp && (failures >= attempts || retryAfterS > maxS)) return null;
  return Math.max(Math.min(initialS * 2 ** (failures - 1), maxS) * (1 - Math.random() / 2), retryAfterS);
}

/** One request and its response. It is aborted after `limitS` without a `restart`, and by the signal. */
class Exchange {
  #control = new AbortController();
  #timer;

  constructor(address, limitS, signal) {
    this.address = address;
    this.signal = signal ? AbortSignal.any([this.#control.signal, signal]) : this.#control.signal;
    this.restart = () => {
      clearTimeout(this.#timer);
      const expire = () => this.#control.abort(new Unreachable(`${address}: no answer in time`));
      this.#timer = setTimeout(expire, limitS * 1000);
    };
    this.restart();
  }

  /** What comes over the network. Throws Unreachable if it does not come. */
  async received(promise) {
    try {
      return await promise;
    } catch (error) {
      if (this.signal.aborted) throw this.signal.reason;
      throw new Unreachable(`${this.address}: no answer (${error.message})`, { cause: error });
    }
  }

  async *chunks(response) {
    const reader = response.body.getReader();
    for (let read; !(read = await this.received(reader.read())).done;) {
      this.restart();
      yield read.value;
    }
  }

  async error(response) {
    const body = await this.received(response.text());
    let members = {};
    try {
      members = object(JSON.parse(body));
    } catch { /* of a proxy, in another format */ }
    return responseError(response.status, members, response.headers.get("Retry-After"));
  }

  close() {
    clearTimeout(this.#timer);
    this.#control.abort();
  }
}

/** The calls of the protocol, for one caller of one server. */
export class Client {
  #base;
  #host;
  #prefix;
  #keys;
  #certificate;
  #isOwn; // a certificate that the keys have issued for themselves
  #timeoutS;
  #fetch;
  #aheadMs = 0; // of the clock of this machine

  constructor(baseUrl, { keys, certificate, namespace, timeoutS = 30, backoff, fetch } = {}) {
    const url = new URL(baseUrl, globalThis.location?.href);
    if (!/^https?:$/.test(url.protocol) || url.username || url.search || url.hash) {
      throw new TypeError(`not the http or https address of a server: ${baseUrl}`);
    }
    this.#base = url.origin + url.pathname.replace(/\/+$/, "");
    this.#host = url.host;
    this.#prefix = namespace ? `/v1/${namespace}` : "";
    this.#keys = keys;
    this.#timeoutS = timeoutS;
    this.#fetch = fetch ?? ((...args) => globalThis.fetch(...args));
    this.backoff = { attempts: 4, initialS: 0.25, maxS: 10, ...backoff };
    this.#isOwn = !certificate;
    if (certificate) this.certificate = certificate;
  }

  get address() { return this.#base + this.#prefix; }
  get identity() {
    const { kind, issUserId } = this.#certificate ?? {};
    return kind === "device" ? issUserId : this.#keys?.userId ?? "";
  }
  get author() { return this.#keys?.edPub ?? null; }
  get certificate() { return this.#certificate ?? null; }
  set certificate(certificate) {
    if (!this.#keys || (certificate.sub ?? this.#keys.edPub) !== this.#keys.edPub) {
      throw new TypeError("the certificate is for another key");
    }
    [this.#certificate, this.#isOwn] = [certificate, false];
  }
  nowMs() { return Date.now() + this.#aheadMs; }

  async pull(key, { withKeyring, version, since, last, full } = {}) {
    for (const [name, value] of Object.entries({ since, last })) {
      if (value === undefined) continue;
      if (!Number.isSafeInteger(value) || value < 0) throw new TypeError(`${name} must be a whole number, 0 or more`);
      if (full || withKeyring) throw new TypeError(`${full ? "full" : "withKeyring"} and ${name} exclude each other`);
    }
    const query = { checkpoint: since, last, full: full || null, withKeyring: withKeyring ? 1 : null, version };
    const pulled = await this.#request("GET", withQuery(this.#target("pull", key), query), pullResult);
    // A server without history ignores the version.
    if (version !== undefined && pulled.hash !== version) throw new errors.VersionNotFound();
    return pulled;
  }

  async push(key, data, baseHash = null, { idempotencyKey, signAuthor = false, writtenMs } = {}) {
    const members = { data: copy(data), baseHash };
    if (signAuthor) Object.assign(members, await this.#authorProof("starfish-doc-author-v1", key, members.data));
    return this.#write(withQuery(this.#target("push", key), { written: writtenMs }), members, idempotencyKey);
  }

  async append(key, data, { idempotencyKey, signAuthor = Boolean(this.#keys), tsMs } = {}) {
    const members = { data: copy(data), ts: tsMs };
    if (signAuthor) Object.assign(members, await this.#authorProof("starfish-append-author-v1", key, members.data));
    return this.#write(this.#target("push", key), members, idempotencyKey);
  }

  delete(key, baseHash, { idempotencyKey = hex(randomBytes(16)) } = {}) {
    const headers = { "Idempotency-Key": idempotencyKey };
    return this.#request("DELETE", withQuery(this.#target("push", key), { baseHash }), pushResult, { headers });
  }

  history(key) {
    return this.#request("GET", this.#target("history", key), ({ versions }) => versions.map((each) => ({
      hash: text(each.hash), timestampMs: whole(each.timestamp), size: each.size, replacedMs: each.replaced,
      identity: each.identity, authorPubkey: each.authorPubkey,
    })));
  }

  pullBundle(key) {
    return this.#request("GET", this.#target("pull", key), ({ collections, timestamp }) => Object.fromEntries(
      Object.entries(collections).map(([name, member]) => [name, pullResult({ ...member, timestamp })])));
  }

  async batchPull(collection, params, { known, append } = {}) {
    if (!params.length) return [];
    const of = (list) => list && JSON.stringify({ [collection]: list });
    const digits = known?.map((hash) => hash?.slice(0, HASH_DIGITS) || null);
    const query = { collections: collection, params: of(params), appendParams: of(append), known: of(digits) };
    return this.#request("GET", withQuery(`${this.#prefix}/batch/pull`, query), ({ collections }) => {
      const entries = collections[collection].map(batchEntry);
      if (entries.length !== params.length) throw new TypeError("an entry for each of the params was asked for");
      return entries;
    });
  }

  async *list(prefix = "", { after, pageSize = 1000 } = {}) {
    for await (const [name] of this.#listed(prefix, after, { limit: pageSize })) yield name;
  }

  listHashes(prefix = "", { after, pageSize = 5000 } = {}) {
    return this.#listed(prefix, after, { limit: pageSize, hashes: true });
  }

  async *#listed(prefix, after, query) {
    const target = prefix ? this.#target("list", prefix) : `${this.#prefix}/list`;
    for (let hasMore = true; hasMore;) {
      const page = await this.#request("GET", withQuery(target, { ...query, after }), object);
      for (const [at, name] of page.items.entries()) yield [name, page.hashes?.[at] ?? null];
      after = page.items.at(-1) ?? after;
      ({ hasMore } = page);
    }
  }

  async pushBlob(key, source, contentType, { idempotencyKey = hex(randomBytes(16)) } = {}) {
    const body = source instanceof Blob ? source : new Blob([source]);
    // The signature does not cover the bytes of a file, unless they are JSON.
    const signed = isJsonType(contentType) ? new Uint8Array(await body.arrayBuffer()) : new Uint8Array();
    const headers = { "Content-Type": contentType, "Idempotency-Key": idempotencyKey };
    const limitS = this.#timeoutS + body.size / 1024; // servers want 1 KB a second
    return this.#request("POST", this.#target("push", key), pushResult, { body, signed, headers, limitS });
  }

  pullBlob(key) {
    return this.#repeated(() => this.#exchange("GET", this.#target("pull", key), {}, async (response, exchange) => {
      if (response.status !== 200) throw await exchange.error(response);
      const chunks = [];
      for await (const chunk of exchange.chunks(response)) chunks.push(chunk);
      const contentType = response.headers.get("Content-Type") ?? "application/octet-stream";
      const blob = new Blob(chunks, { type: contentType });
      const hash = (response.headers.get("ETag") ?? "").replace(/^W\//, "").replaceAll('"', "");
      if (!hash && isJsonType(contentType) && JSON.parse(await blob.text()).hash === "") return null;
      if (/^[0-9a-f]{64}$/.test(hash) && hex(await sha256(await blob.arrayBuffer())) !== hash) {
        if (isJsonType(contentType)) throw new TypeError("what is stored is a document, not a file");
        throw new Unreachable("the file was damaged on its way: its hash is another");
      }
      return { blob, contentType, hash };
    }));
  }

  changes(since = null, collections = null, params = {}, limit = undefined) {
    return this.#request("GET", this.#selection("changes", collections, params, { since, limit }), changesPage);
  }

  async *changePages(since = null, collections = null, params = {}, limit = undefined) {
    for (let hasMore = true; hasMore;) {
      const page = await this.changes(since, collections, params, limit);
      yield page;
      ({ cursor: since, hasMore } = page);
    }
  }

  keyTemplates(collections) {
    const target = this.#selection("changes", collections, {}, { since: "now", storagePaths: true });
    return this.#request("GET", target, ({ storagePaths }) => object(storagePaths));
  }

  serverConfig() {
    return this.#request("GET", `${this.#prefix}/config`, object);
  }

  usage(spaces = []) {
    return this.#request("GET", withQuery(`${this.#prefix}/usage`, { spaces: spaces.join() || null }), object);
  }

  async revoke(list) {
    const body = canonicalBytes(list), headers = { "Content-Type": JSON_TYPE };
    // Not repeated: the same generation again would be an error.
    return this.#exchange("POST", "/revocations", { body, headers }, (response, exchange) => (
      this.#decoded(response, exchange, ({ generation }) => whole(generation))));
  }

  async revocations(issuer) {
    const target = `/revocations/${encodeURIComponent(issuer)}`;
    try {
      const list = await this.#request("GET", target, object, { isSigned: false });
      return await verifyRevocationList(list, issuer);
    } catch (error) {
      if (error instanceof errors.NotFound) return null;
      throw error;
    }
  }

  #write(target, members, idempotencyKey = hex(randomBytes(16))) {
    const headers = { "Content-Type": JSON_TYPE, "Idempotency-Key": idempotencyKey };
    return this.#request("POST", target, pushResult, { body: encoder.encode(JSON.stringify(members)), headers });
  }

  async #authorProof(tag, key, data) {
    if (!this.#keys) throw new TypeError("an author proof needs keys");
    const message = canonicalBytes({ d: data, k: documentKey(key) }, `${tag}\n`);
    return { authorPubkey: this.#keys.edPub, authorSignature: await this.#keys.sign(message) };
  }

  #target(action, key) {
    const segments = documentKey(key).split("/");
    // A URL would lose these segments, and name another document.
    if (segments.some((each) => each === "." || each === "..")) throw new errors.InvalidPathParameter();
    const encoded = segments.map((each) => encodeURIComponent(each).replaceAll("%3A", ":").replaceAll("%40", "@"));
    return `${this.#prefix}/${action}/${encoded.join("/")}`;
  }

  #selection(route, collections, params, query = {}) {
    const narrowed = Object.keys(params ?? {}).length ? JSON.stringify(params) : null;
    return withQuery(`${this.#prefix}/${route}`, { ...query, collections: collections?.join(), params: narrowed });
  }

  #request(method, target, decode, options = {}) {
    return this.#repeated(() => this.#exchange(method, target, options, (response, exchange) => (
      this.#decoded(response, exchange, decode))));
  }

  async #repeated(attempt) {
    for (let failures = 1; ; failures++) {
      try {
        return await attempt();
      } catch (error) {
        const mayRepeat = [Unreachable, errors.RateLimited, errors.Unavailable].some((kind) => error instanceof kind);
        const pauseS = mayRepeat ? waitS(this.backoff, failures, error.retryAfterS) : null;
        if (pauseS === null) throw error;
        await sleep(pauseS * 1000);
      }
    }
  }

  /** Returns what `use` makes of the response to one request, which is closed then. */
  async #exchange(method, target, options, use) {
    const exchange = new Exchange(this.address, options.limitS ?? this.#timeoutS);
    try {
      return await use(await this.#send(exchange, method, target, options), exchange);
    } finally {
      exchange.close();
    }
  }

  async #decoded(response, exchange, decode) {
    if (response.status !== 200) throw await exchange.error(response);
    if (!isJsonType(response.headers.get("Content-Type")) && response.headers.has("ETag")) {
      throw new TypeError("a file is there: pullBlob gets it");
    }
    const body = await exchange.received(response.text());
    try {
      return decode(object(JSON.parse(body)));
    } catch (error) {
      throw new Unreachable(`${this.address}: the answer is not understood`, { cause: error });
    }
  }

  /** Sends a request, and once more if the clock with which it was signed was wrong. */
  async #send(exchange, method, target, { body, signed = body, headers = {}, isSigned = Boolean(this.#keys) }) {
    for (let isFirst = true; ; isFirst = false) {
      const tsMs = this.nowMs();
      const credentials = isSigned ? await this.#credentials(method, target, signed, tsMs) : {};
      const response = await exchange.received(this.#fetch(this.#base + target, {
        method, body, headers: { ...headers, ...credentials }, signal: exchange.signal,
        cache: "no-store", credentials: "omit", redirect: "error",
      }));
      const serverMs = Date.parse(response.headers.get("Date") ?? "");
      if (serverMs < tsMs - CLOCK_ERROR_MS || serverMs > this.nowMs() + CLOCK_ERROR_MS) {
        this.#aheadMs = serverMs - Date.now();
      }
      // A batch with invalid credentials is that of an anonymous caller, so that reads are always repeated.
      const isStale = isSigned && Math.abs(serverMs - tsMs) > CLOCK_SKEW_MS;
      if (!isFirst || !isStale || (response.status !== 401 && method !== "GET")) return response;
      await response.body?.cancel();
    }
  }

  async #credentials(method, target, body = new Uint8Array(), tsMs) {
    const certificate = await this.#currentCertificate(tsMs / 1000);
    const nonce = base64(randomBytes(16));
    const members = { m: method, p: target, b: hex(await sha256(body)), h: this.#host, ts: tsMs, nonce };
    return {
      Authorization: `Cap ${base64(canonicalBytes(certificate))}`,
      "X-Starfish-Sig": await this.#keys.sign(canonicalBytes(members, "starfish-req-v1\n")),
      "X-Starfish-Ts": String(tsMs),
      "X-Starfish-Nonce": nonce,
      ...(certificate.kind === "audience" && { "X-Starfish-Pub": this.#keys.edPub }),
    };
  }

  async #currentCertificate(nowS) {
    const known = this.#certificate;
    if (known && (!this.#isOwn || (known.nbf <= nowS && nowS < known.exp - RENEW_BEFORE_S))) return known;
    const issued = await issueDeviceCertificate(this.#keys, this.#keys, { nowS });
    if (this.#isOwn) this.#certificate = issued; // nobody has set another one meanwhile
    return this.#certificate;
  }

  watch(collections = null, params = {}, { idleS = IDLE_S, signal, ...options } = {}) {
    const control = new AbortController();
    const ends = signal ? AbortSignal.any([signal, control.signal]) : control.signal;
    const target = this.#selection("events", collections, params);
    const connect = (headers) => this.#stream(target, headers, idleS, ends);
    const events = followed(connect, { ...options, signal: ends, backoff: this.backoff });
    const leave = events.return.bind(events);
    events.return = (value) => (control.abort(), leave(value)); // also one that waits for the next event
    return events;
  }

  async *#stream(target, headers, idleS, signal) {
    const exchange = new Exchange(this.address, idleS, signal);
    try {
      const response = await this.#send(exchange, "GET", target, { headers });
      if (response.status !== 200) throw await exchange.error(response);
      if (!response.headers.get("Content-Type")?.startsWith("text/event-stream")) {
        throw new Unreachable(`${this.address}: the answer is not understood`);
      }
      yield* exchange.chunks(response);
    } finally {
      exchange.close();
    }
  }
}

// --- Change stream ---------------------------------------------------------------------------------------------------

const IDLE_S = 15; // servers send a heartbeat every 4 s
const MAX_EVENT_CHARS = 1 << 20;

/** Parses the events of one connection: data, type and id of each, undefined where it has none. */
class EventParser {
  retryS = 0;
  #decoder = new TextDecoder();
  #rest = "";
  #isAfterCr = false;
  #block = {};

  *feed(bytes) {
    let chunk = this.#decoder.decode(bytes, { stream: true });
    if (!chunk) return;
    if (this.#isAfterCr && chunk.startsWith("\n")) chunk = chunk.slice(1); // the line has ended before
    this.#isAfterCr = chunk.endsWith("\r");
    const lines = (this.#rest + chunk).split(/\r\n?|\n/);
    this.#rest = lines.pop();
    for (const line of lines) {
      if (line) {
        this.#field(...line.match(/^([^:]*)(?:: ?)?(.*)$/s).slice(1));
      } else {
        const block = this.#block;
        this.#block = {};
        if (block.data !== undefined || block.id !== undefined) yield block;
      }
    }
    if (this.#rest.length + (this.#block.data?.length ?? 0) > MAX_EVENT_CHARS) throw new TypeError("too long an event");
  }

  #field(name, value) {
    const block = this.#block;
    if (name === "data") block.data = block.data === undefined ? value : `${block.data}\n${value}`;
    else if (name === "event") block.type = value;
    else if (name === "id" && !value.includes("\0")) block.id = value;
    else if (name === "retry" && /^\d{1,8}$/.test(value)) this.retryS = Number(value) / 1000;
  }
}

/** The events of a watch, over connections that are made anew. */
async function* followed(connect, { after = "", signal, backoff, onConnect, onDisconnect }) {
  let position = after, failures = 0, isLive = false, wasLive = false, parser;
  function* parsed(chunk) {
    try {
      for (const { data, type = "message", id = position } of parser.feed(chunk)) {
        let event = type === "reset" ? { reset: true, id } : null;
        if (data !== undefined && type === "message") event = changeEvent(JSON.parse(data), id);
        position = id; // only now: an event that cannot be parsed is not skipped
        yield event;
      }
    } catch (error) {
      throw new Unreachable("the stream of changes is not understood", { cause: error });
    }
    if (position) yield null;
  }
  while (!signal.aborted) {
    let error = new Unreachable("the stream of changes ended");
    parser = new EventParser();
    try {
      const headers = { Accept: "text/event-stream", ...(position && { "Last-Event-ID": position }) };
      for await (const chunk of connect(headers)) {
        if (isLive) failures = 0; // it lasts: not one that is cut as soon as it is opened
        for (const event of parsed(chunk)) {
          if (!isLive) onConnect?.();
          isLive = wasLive = true;
          if (event) yield event;
          if (signal.aborted) return;
        }
      }
    } catch (caught) {
      if (signal.aborted) return;
      if (!isRetryable(caught)) throw caught;
      error = caught;
    }
    const pauseS = waitS(backoff, ++failures, Math.max(error.retryAfterS ?? 0, parser.retryS), !wasLive);
    if (pauseS === null) throw error;
    if (isLive) onDisconnect?.(error);
    isLive = false;
    await sleep(pauseS * 1000, signal).catch(() => {}); // aborted
  }
}

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

