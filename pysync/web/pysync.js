// The browser client of pysync. pysync.d.ts beside this file describes what it exports.

// --- Errors ---

export class PysyncError extends Error {
  static status = 500;
  static code = "internal_error";

  constructor(message, { status, extras = {}, retryAfterS = 0 } = {}) {
    super(message || new.target.code);
    Object.assign(this, { status: status ?? new.target.status, code: new.target.code, extras, retryAfterS });
  }
  get currentHash() { return this.extras.currentHash ?? ""; }
}
export class Unreachable extends Error {}
export class UnsupportedBrowser extends Error {}
export class StorageError extends Error {
  constructor(message, code = "failed", options) { Object.assign(super(message, options), { code }); }
}
export class ReplicaError extends Error {}
export class UnknownBase extends Error {
  constructor(currentHash) { Object.assign(super("the document has changed: pull first"), { currentHash }); }
}
export class SealedError extends Error {
  constructor(name, message) { Object.assign(super(message), { name }); }
}

// By status: the class of unknown codes (- for none), after > its subclasses, and others. Some codes follow a colon.
const ERROR_TABLE = `400 BadRequest > InvalidPathParameter InvalidJson BodyTooDeep BodyNotObject InvalidData
  InvalidBaseHash AuthorProofMissing SchemaViolation InvalidWritten InvalidLimit InvalidAfter InvalidSince
  HashesNotAvailable InvalidRevocation MissingCollections UnknownCollection InvalidParams InvalidAppendParams
  InvalidKnown TooManyCollections BatchAppendBudgetExceeded BatchTooLarge BatchKeyDenied DataNotSealed:not_sealed
  AppendProofMissing InvalidTs TsTooFarAhead InvalidCheckpoint InvalidLast CheckpointTooOld PullBoundRequired
  FullWithBounds FullNotAllowed InvalidEvents AppendParamsNotSupported, 401 Unauthorized,
  403 Forbidden > ForeignOrigin BadSignature TooManyIssuers, 404 NotFound VersionNotFound, 405 MethodNotAllowed,
  408 RequestTimeout, 409 - Conflict:hash_mismatch NonMonotonicTimestamp AppendLimitExceeded KeyConflict
  StaleGeneration ReloadRefused OutcomeUnknown, 410 - Erased, 413 PayloadTooLarge, 414 UriTooLong,
  415 UnsupportedMediaType, 416 RangeNotSatisfiable, 421 MisdirectedRequest, 422 - IdempotencyKeyReused,
  429 RateLimited, 500 InternalError AuthorizationError DocumentCorrupt,
  503 Unavailable > Overloaded StoreUnavailable CoordinatorUnavailable RolesUnavailable, 507 QuotaExceeded`;
export const errors = {};
const errorsByCode = { __proto__: null }, errorsByStatus = {}; // codes come from servers
for (const row of ERROR_TABLE.split(",")) {
  const [status, first, ...rest] = row.trim().split(/\s+/);
  for (const entry of [first, ...rest].filter((each) => /\w/.test(each))) {
    const [name, code = name.replace(/\B[A-Z]/g, "_$&").toLowerCase()] = entry.split(":");
    const Parent = rest[0] === ">" && entry !== first ? errors[first] : PysyncError;
    errors[name] = errorsByCode[code] = { [name]: class extends Parent {} }[name];
    Object.assign(errors[name], { status: Number(status), code });
  }
  errorsByStatus[status] = errors[first];
}
const errorClasses = {
  ...errors, PysyncError, Unreachable, UnsupportedBrowser, StorageError, ReplicaError, UnknownBase, SealedError,
};
for (const [name, kind] of Object.entries(errorClasses)) kind.prototype.name = name;

function serverError(status, members, retryAfterS = 0) {
  const { error, code, ...extras } = members ?? {}, known = String(error).toLowerCase().replaceAll(" ", "_");
  const Kind = errorsByCode[code] ?? errorsByCode[known] ?? errorsByStatus[status] ?? PysyncError;
  return new Kind(error || `HTTP ${status}`, { status, extras, retryAfterS });
}
const isAny = (error, ...kinds) => kinds.some((kind) => error instanceof kind);
const isRetryable = (error) => error instanceof Unreachable || error.status >= 500 || [408, 429].includes(error.status);
const isTransient = (error) => isAny(error, Unreachable, errors.RateLimited, errors.Unavailable);

// --- Values ---

export const VERSION = "0.3.0.dev0";

const encoder = new TextEncoder();
const hex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
function unhex(text) {
  if (!/^([0-9a-f]{2})*$/.test(text)) throw new TypeError("expected hex digits in lower case");
  return Uint8Array.from(text.match(/../g) ?? [], (pair) => parseInt(pair, 16));
}
const base64 = (bytes) => btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
function unbase64(text) {
  return Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (char) => char.charCodeAt(0));
}
function decoded(source) {
  try {
    return unbase64(source);
  } catch {
    return undefined;
  }
}
const concat = async (...arrays) => new Uint8Array(await new Blob(arrays).arrayBuffer());
const randomBytes = (size) => crypto.getRandomValues(new Uint8Array(size));
const randomKey = () => hex(randomBytes(16));
function subtle() {
  if (globalThis.crypto?.subtle) return crypto.subtle;
  throw new UnsupportedBrowser("pages have cryptography over https and on localhost only");
}
const sha256 = async (bytes) => new Uint8Array(await subtle().digest("SHA-256", bytes));

class Signal {
  isSet = false;

  set() {
    this.isSet = true;
    this.wake?.();
  }
  wait(ms) {
    return this.isSet ? undefined : new Promise((resolve) => {
      this.wake = resolve;
      if (ms) setTimeout(resolve, ms);
    });
  }
}

const either = (...signals) => AbortSignal.any(signals.filter(Boolean));
const sleep = (ms, signal) => new Promise((resolve) => {
  const timer = setTimeout(end, signal?.aborted ? 0 : ms);
  signal?.addEventListener("abort", end);
  function end() {
    clearTimeout(timer);
    signal?.removeEventListener("abort", end);
    resolve();
  }
});

/** Unlike that of UTF-16, this order has the surrogates last. */
function byCodePoint(one, other) {
  let at = 0;
  while (at < one.length && one[at] === other[at]) at++;
  return (one.codePointAt(at) ?? -1) - (other.codePointAt(at) ?? -1);
}

export function canonicalJson(value) {
  if (Array.isArray(value)) return `[${value.map(canonicalJson).join()}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  const names = Object.keys(value).filter((name) => value[name] !== undefined).sort(byCodePoint);
  return `{${names.map((name) => `${JSON.stringify(name)}:${canonicalJson(value[name])}`).join()}}`;
}
const canonicalBytes = (value, tag = "") => encoder.encode(tag + canonicalJson(value));

const DROPPED_NAMES = ["__proto__", "constructor", "prototype", "__class__", "__dict__"];
/** The data as the server would return it. */
function copy(value, isInArray = false) {
  if (value === null || typeof value === "boolean" || (typeof value === "string" && value.isWellFormed())) return value;
  if (typeof value === "number" && Number.isFinite(value)) return value + 0;
  if (typeof value === "number") throw new RangeError("JSON has no NaN and no infinite numbers");
  if (Array.isArray(value)) return Array.from(value, (each) => copy(each, true));
  if (Object.prototype.toString.call(value) !== "[object Object]") {
    throw new TypeError(`JSON cannot hold ${typeof value === "string" ? "half a character" : String(value)}`);
  }
  const isKept = ([name, member]) => member !== undefined && (isInArray || !DROPPED_NAMES.includes(name));
  const members = Object.entries(value).filter(isKept);
  return Object.fromEntries(members.map(([name, member]) => [copy(name), copy(member, isInArray)]));
}

export const documentHash = async (data) => hex(await sha256(canonicalBytes(copy(data))));
const documentKey = (key) => key.replace(/^\/(pull|push)\//, "");

class KeyTemplate {
  constructor(text) {
    const segments = text.split("/"), names = segments.map((segment) => segment.match(/^\{(\w+)\}$/)?.[1]);
    Object.assign(this, { segments, names, params: names.filter(Boolean), endsInParam: Boolean(names.at(-1)) });
  }
  fill(values) {
    const missing = this.params.find((name) => !Object.hasOwn(values, name));
    if (missing) throw new TypeError(`the parameter {${missing}} has no value`);
    return this.segments.map((segment, at) => (this.names[at] ? values[this.names[at]] : segment)).join("/");
  }
  matches(key) {
    const parts = key.split("/"), { names, segments } = this;
    return parts.length === segments.length && parts.every((part, at) => names[at] || part === segments[at]);
  }
  paramsOf(key) {
    const parts = key.split("/");
    return Object.fromEntries(this.params.map((name) => [name, parts[this.names.indexOf(name)]]));
  }
}

// A TypeError says that an answer is none of the protocol.
const typed = (type) => (value) => {
  if (typeof value === type && value !== null && !Array.isArray(value)) return value;
  throw new TypeError(`expected a value of type ${type}`);
};
const object = typed("object"), text = typed("string"), whole = typed("number");
function parsed(source) {
  try {
    return object(JSON.parse(source));
  } catch {
    return null;
  }
}
const pullResult = ({ data, hash, timestamp, authorPubkey, authorSignature, keyring, hasMore }) => ({
  data: object(data), hash: text(hash), timestampMs: whole(timestamp), authorPubkey, authorSignature,
  keyring: keyring && pullResult(keyring), hasMore: hasMore === true, unchanged: false,
});
const pushResult = ({ hash, timestamp = 0 }) => ({ hash: text(hash), timestampMs: whole(timestamp) });
const BATCH_STATUSES = { __proto__: null, "Collection not found": 404, "Missing required path parameter": 400 };
function batchEntry(entry) {
  const { unchanged, error } = entry;
  if (unchanged === true) return { ...pullResult({ ...entry, data: {} }), unchanged };
  return error === undefined ? pullResult(entry) : serverError(BATCH_STATUSES[error], { error });
}
const documentVersion = ({ hash, timestamp, replaced, size, identity, authorPubkey }) => (
  { ...pushResult({ hash, timestamp }), replacedMs: replaced, size, identity, authorPubkey });

export function elements(pulled, field = Object.keys(pulled.data)[0] ?? "") {
  const found = pulled.data[field] ?? (pulled.hash ? undefined : []);
  if (!Array.isArray(found)) throw new TypeError(`there is no log in "${field}"`);
  return found.map(({ ts, data, authorPubkey, authorSignature }) => (
    { tsMs: whole(ts), data: object(data), authorPubkey, authorSignature }));
}

const changeEvent = ({ collection, params = {}, hash, timestamp, namespace, removed }, id = "") => ({
  collection: text(collection), params: object(params), hash: text(hash), timestampMs: whole(timestamp), namespace,
  removed: removed === true, id,
});
const changesPage = ({ changes = [], cursor, hasMore, reset, restored }) => ({
  changes: changes.map((change) => changeEvent(change)), cursor: text(cursor), hasMore: hasMore === true,
  isReset: reset === true, restoredMs: restored,
});

// --- Keys ---

const requested = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});
const committed = (transaction) => new Promise((resolve, reject) => {
  transaction.oncomplete = () => resolve();
  transaction.onabort = () => reject(transaction.error);
});
function storageError(cause) {
  const isFull = cause?.name === "QuotaExceededError";
  const message = `the storage of this browser ${isFull ? "is full" : `failed: ${cause?.message}`}`;
  return new StorageError(message, isFull ? "full" : "failed", { cause });
}
const DURABLE = { durability: "strict" };
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

async function withKeys(use) {
  const database = await openDatabase("pysync-keys", (created) => created.createObjectStore("keys"));
  try {
    const keys = database.transaction("keys", "readwrite", DURABLE).objectStore("keys");
    return (await Promise.all([use(keys), committed(keys.transaction)]))[0];
  } catch (error) {
    throw storageError(error);
  } finally {
    database.close();
  }
}

const CURVES = { Ed25519: ["302e020100300506032b657004220420", "sign"],
  X25519: ["302e020100300506032b656e04220420", "deriveBits"] };
async function importedPair(curve, secret) {
  const [prefix, usage] = CURVES[curve], encoded = unhex(prefix + secret);
  const imported = (isExtractable) => subtle().importKey("pkcs8", encoded, curve, isExtractable, [usage]);
  const { x } = await subtle().exportKey("jwk", await imported(true));
  return [await imported(false), hex(unbase64(x))];
}
async function newPair(curve) {
  const { privateKey, publicKey } = await subtle().generateKey(curve, false, [CURVES[curve][1]]);
  return [privateKey, hex(new Uint8Array(await subtle().exportKey("raw", publicKey)))];
}
const secretKey = (bytes) => subtle().importKey("raw", bytes, "HKDF", false, ["deriveBits"]);
const derived = async (options, key) => new Uint8Array(await subtle().deriveBits(options, key, 256));
function derivedSecret(key, name) {
  const info = encoder.encode(name);
  return derived({ name: "HKDF", hash: "SHA-256", salt: info, info }, key);
}
const tooOld = "this browser is older than Chrome 137, Firefox 130 and Safari 17.4";
async function keysOf(make) {
  try {
    const ed = await make("Ed25519"), kem = await make("X25519");
    return new IdentityKeys(ed, kem, await userId(ed[1]));
  } catch (cause) {
    if (!["NotSupportedError", "SyntaxError"].includes(cause?.name)) throw cause;
    throw new UnsupportedBrowser(tooOld, { cause });
  }
}

export class IdentityKeys {
  #edKey; #kemKey;

  constructor([edKey, edPub], [kemKey, kemPub], id) {
    Object.assign(this, { edPub, kemPub, userId: id });
    [this.#edKey, this.#kemKey] = [edKey, kemKey];
  }

  static async open(name = "default") {
    const made = {};
    await keysOf(async (curve) => {
      const pair = made[curve] = await newPair(curve);
      // WebKit stores no X25519, old Firefox no Ed25519.
      const stored = await Promise.resolve(pair[0]).then(structuredClone).catch(() => null);
      if (!stored) pair[0] = await secretKey(randomBytes(32));
      return pair;
    });
    const kept = await withKeys(async (keys) => {
      const known = await requested(keys.get(name));
      if (!known) keys.add(made, name); // fails for an unreadable one
      return known ?? made;
    });
    return keysOf(async (curve) => {
      const pair = kept[curve], isSecret = pair[0].algorithm.name === "HKDF";
      return isSecret ? importedPair(curve, hex(await derivedSecret(pair[0], curve))) : pair;
    });
  }
  static forget(name = "default") { return withKeys((keys) => { keys.delete(name); }); }
  static generate() { return keysOf(newPair); }
  static fromPrivate(edPriv, kemPriv) {
    const secrets = { Ed25519: edPriv, X25519: kemPriv };
    return keysOf((curve) => importedPair(curve, secrets[curve]));
  }
  async sign(message) { return base64(new Uint8Array(await subtle().sign("Ed25519", this.#edKey, message))); }
  async deriveShared(kemPub) {
    const others = await subtle().importKey("raw", unhex(kemPub), "X25519", false, []);
    return derived({ name: "X25519", public: others }, this.#kemKey);
  }
}

export const userId = async (edPub) => hex(await sha256(unhex(edPub))).slice(0, 32);

// --- Certificates ---

const LIFETIME_S = 30 * 24 * 3600;
const isKey = (value) => typeof value === "string" && /^[0-9a-f]{64}$/.test(value);
const isTexts = (value) => Array.isArray(value) && value.every((each) => typeof each === "string");

function checkedCertificate(members) {
  const { kind, iss, sub, aud, scope, nbf, exp, nonce, sig } = members ?? {};
  const subjects = kind === "audience" && sub === undefined ? aud ?? [iss] : [sub];
  const isWellFormed = ["device", "member", "audience"].includes(kind) && Array.isArray(subjects) && subjects.length > 0
    && [iss, ...subjects].every(isKey) && isTexts([nonce, sig])
    && [scope?.ops, scope?.collections, scope?.paths ?? []].every(isTexts) && nbf < exp;
  if (!isWellFormed) throw new TypeError("this is no certificate");
  return Object.freeze(members);
}
async function verifiedCertificate(members) {
  const { issUserId } = checkedCertificate(members);
  if (await isIssued(members, issUserId, CERTIFICATE_TAG)) return members;
  throw new TypeError("the certificate is not signed by its issuer");
}

const CERTIFICATE_TAG = "starfish-capcert-v1\n", REVOCATION_TAG = "starfish-revlist-v1\n";
async function signedMembers(issuer, tag, members) {
  const signed = { v: 1, iss: issuer.edPub, issUserId: await userId(issuer.edPub), ...members };
  return { ...signed, sig: await issuer.sign(canonicalBytes(signed, tag)) };
}
async function issue(issuer, kind, subject, collections, { grant, nowS, expiresAtS }) {
  const nbf = Math.floor(nowS ?? Date.now() / 1000), exp = Math.floor(expiresAtS ?? nbf + LIFETIME_S);
  const { ops, paths } = grant
    ?? { ops: ["read", "list"], paths: [`${collections[0]}/**`, `!${collections[0]}/_members`] };
  const members = { kind, ...subject, scope: { ops, paths, collections }, nbf, exp, nonce: base64(randomBytes(16)) };
  return checkedCertificate(await signedMembers(issuer, CERTIFICATE_TAG, members));
}

const EVERYTHING = { ops: ["read", "list", "write"], paths: ["**"] };
export function issueDeviceCertificate(issuer, { edPub, kemPub }, options = {}) {
  const { collections = ["*"], grant = EVERYTHING } = options;
  return issue(issuer, "device", { sub: edPub, subKem: kemPub }, collections, { ...options, grant });
}
export async function issueMemberCertificate(issuer, { edPub, kemPub }, collection, options = {}) {
  const subject = { sub: edPub, subKem: kemPub, subUserId: await userId(edPub) };
  return issue(issuer, "member", subject, [collection], options);
}
export function issueAudienceCertificate(issuer, collection, { aud, ...options } = {}) {
  return issue(issuer, "audience", aud ? { aud } : {}, [collection], options);
}
export const parseCertificate = (source) => verifiedCertificate(parsed(source));
export function publicLink(certificate) {
  if (certificate.kind !== "audience") throw new TypeError("a link can only share an audience certificate");
  const encoded = base64(canonicalBytes({ cap: certificate, v: 1 }));
  return encoded.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}
export async function parsePublicLink(fragment) {
  const { v, cap } = parsed(new TextDecoder().decode(decoded(fragment.trim().replace(/^#/, "")))) ?? {};
  if (v !== 1 || cap?.kind !== "audience") throw new TypeError("this is no public link");
  return verifiedCertificate(cap);
}

export async function issueRevocationList(issuer, generation, { certificates = [], subjects = [], earlier = {} }) {
  const { sig, ...known } = earlier;
  const revoked = merged(known.revoked, certificates.map(({ sub = "", nonce, exp }) => ({ sub, nonce, exp })));
  const revokedSubjects = merged(known.revokedSubjects, subjects.map(({ sub, exp }) => ({ sub, exp })));
  const members = { ...known, generation, revoked, ...(revokedSubjects.length && { revokedSubjects }) };
  return signedMembers(issuer, REVOCATION_TAG, members);
}
function merged(earlier = [], own) {
  const entries = new Map();
  for (const entry of [...earlier, ...own]) {
    const name = `${entry.sub} ${entry.nonce}`, known = entries.get(name);
    if (!known || (known.exp > 0 && known.exp < entry.exp)) entries.set(name, entry);
  }
  return [...entries.values()];
}

async function isSigned(message, signature, edPub) {
  try {
    const key = await subtle().importKey("raw", unhex(edPub), "Ed25519", false, ["verify"]);
    return await subtle().verify("Ed25519", key, unbase64(signature), message);
  } catch {
    return false;
  }
}
async function isIssued({ sig, ...members }, issuer, tag) {
  const { iss } = members;
  return isKey(iss) && await userId(iss) === issuer && isSigned(canonicalBytes(members, tag), sig, iss);
}

// --- Merge ---

export const MISSING = Symbol("MISSING");

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const membersOf = (value) => new Map(isObject(value) ? Object.entries(value) : []);
const allAt = (sides, name) => sides.map((side) => (side.has(name) ? side.get(name) : MISSING));

function same(one, other) {
  if (Array.isArray(one) && Array.isArray(other)) {
    return one.length === other.length && one.every((value, at) => same(value, other[at]));
  }
  if (!isObject(one) || !isObject(other)) return one === other;
  const names = Object.keys(one);
  return names.length === Object.keys(other).length
    && names.every((name) => Object.hasOwn(other, name) && same(one[name], other[name]));
}

export const localWins = ({ local, remote }) => (local === MISSING ? remote : local);

export function mergeRemoteWins(local, remote) {
  const members = Object.entries({ ...local, ...remote }).filter(([name]) => !DROPPED_NAMES.includes(name));
  return Object.fromEntries(members.map(([name, value]) => [name, !isObject(value) ? value
    : mergeRemoteWins(isObject(local[name]) ? local[name] : {}, value)]));
}

export class ThreeWayMerge {
  constructor(onConflict = localWins, idMember = "id") { Object.assign(this, { onConflict, idMember }); }

  merge(base, local, remote) {
    const merged = this.#value([], [base, local, remote]);
    return isObject(merged) ? merged : {};
  }
  dropped(base, local, remote, merged) {
    return [...this.#dropped([], [base, local, remote, merged], true),
      ...this.#dropped([], [base, remote, local, merged], false)];
  }

  #value(path, sides) {
    const [base, local, remote] = sides;
    if (same(local, remote) || same(remote, base)) return local;
    if (same(local, base)) return remote;
    if (isObject(local) && isObject(remote)) {
      return Object.fromEntries(this.#merged(path, sides.map(membersOf), Object.keys({ ...remote, ...local })));
    }
    const lists = sides.map((side) => this.#entries(side));
    if (!lists[1] || !lists[2]) return this.onConflict({ path, base, local, remote });
    lists[0] ??= new Map();
    return this.#merged(path, lists, mergedOrder(...lists)).map(([, entry]) => entry);
  }
  #merged(path, sides, names) {
    const values = names.map((name) => [name, this.#value([...path, name], allAt(sides, name))]);
    return values.filter(([, value]) => value !== MISSING);
  }
  #entries(list) {
    if (!Array.isArray(list)) return null;
    const entries = new Map(list.map((entry) => [isObject(entry) ? entry[this.idMember] : null, entry]));
    const areIds = [...entries.keys()].every((id) => typeof id === "string" || Number.isInteger(id));
    return areIds && entries.size === list.length ? entries : null;
  }

  *#dropped(path, sides, local) {
    const [base, value, other, merged] = sides;
    if (same(value, base) || same(value, merged)) return;
    let inner = sides.map(membersOf);
    if (!isObject(value) || !isObject(merged)) {
      const lists = sides.map((side) => this.#entries(side)), areLists = lists[1] && lists[3];
      inner = lists.map((entries) => (areLists && entries) || new Map());
      const isGone = areLists ? isReorderingDropped(inner) : same(merged, other) || same(merged, base);
      if (isGone) yield { path, value, local };
    }
    for (const name of new Set([...inner[0].keys(), ...inner[1].keys()])) {
      yield* this.#dropped([...path, name], allAt(inner, name), local);
    }
  }
}

const shared = (entries, ...others) => [...entries.keys()].filter((id) => others.every((other) => other.has(id)));

function mergedOrder(base, local, remote) {
  const isReordered = !same(shared(local, base), shared(base, local));
  const [first, second] = isReordered ? [local, remote] : [remote, local];
  let group = [];
  const groups = new Map([[MISSING, group]]), order = [];
  for (const id of second.keys()) {
    if (first.has(id)) groups.set(id, group = []);
    else group.push(id);
  }
  group = groups.get(MISSING);
  for (const id of first.keys()) {
    if (second.has(id)) {
      order.push(group);
      group = groups.get(id);
    }
    order.push(id);
  }
  return [...order, group].flat();
}

function isReorderingDropped([base, edited, , merged]) {
  const order = shared(edited, base, merged);
  return !same(shared(base, edited, merged), order) && !same(order, shared(merged, base, edited));
}

// --- Sealed data ---

const IV_BYTES = 12, TAG_BYTES = 16, KEY_BYTES = 32, EPOCH_BYTES = 4, ENVELOPE_EPOCH = 0;
const inSeconds = (ms) => Math.floor(ms / 1000);
const blobContext = (epoch, aad) => `starfish-blob:${epoch}:${aad}`;
function fail(name, message) {
  throw new SealedError(name, message);
}

async function aesGcm(usage, rawKey, iv, bytes, aad) {
  const key = await subtle().importKey("raw", rawKey, "AES-GCM", false, [usage]);
  const options = { name: "AES-GCM", iv, additionalData: encoder.encode(aad) };
  return new Uint8Array(await subtle()[usage](options, key, bytes));
}
async function encrypt(key, plaintext, aad) {
  const iv = randomBytes(IV_BYTES);
  return concat(iv, await aesGcm("encrypt", key, iv, plaintext, aad));
}
async function decrypt(key, sealed, aad) {
  if (sealed.length < IV_BYTES + TAG_BYTES) fail("Truncated", "Encrypted payload is too short");
  return aesGcm("decrypt", key, sealed.subarray(0, IV_BYTES), sealed.subarray(IV_BYTES), aad).catch(() => (
    fail("DecryptionFailed", "Decryption failed: other bytes, context or epoch")));
}

async function wrappingKey(keys, kemPub) {
  return derivedSecret(await secretKey(await keys.deriveShared(kemPub)), "starfish-wrap");
}
async function wrapKey(contentKey, subKem, epoch, adder, addedAt) {
  const ephemeral = await IdentityKeys.generate(), key = await wrappingKey(ephemeral, subKem).catch(() => null);
  if (!key) throw new TypeError("the recipient is no X25519 key in hex");
  const ct = base64(await encrypt(key, contentKey, ""));
  const entry = { subKem, ephKem: ephemeral.kemPub, ct, addedBy: adder.edPub, addedAt };
  return { ...entry, addedSig: await adder.sign(canonicalBytes({ ...entry, epoch })) };
}
async function unwrapKey(entry, keys) {
  const key = await wrappingKey(keys, entry.ephKem).catch(() => fail("DecryptionFailed", "a weak key"));
  const contentKey = await decrypt(key, decoded(entry.ct), "");
  return contentKey.length === KEY_BYTES ? contentKey : fail("DecryptionFailed", "a key without 32 bytes");
}

async function verifyEntry({ subKem, ephKem, ct, addedBy, addedAt, addedSig }, epoch, trusted) {
  if (trusted && !(isKey(addedBy) && trusted.includes(addedBy))) fail("UntrustedAdder", `${addedBy} is not trusted`);
  const isWhole = [subKem, ephKem, addedBy].every(isKey) && Number.isSafeInteger(addedAt) && decoded(ct);
  const message = canonicalBytes({ subKem, ephKem, ct, addedBy, addedAt, epoch });
  if (!isWhole || !await isSigned(message, addedSig, addedBy)) fail("ForgedEntry", `epoch ${epoch} has a forged key`);
}

async function newEpoch(epoch, kems, adder, nowS) {
  const contentKey = randomBytes(KEY_BYTES), recipients = [...new Set(kems)];
  const wrapped = recipients.map((kem) => wrapKey(contentKey, kem, epoch, adder, nowS));
  return { createdAt: nowS, wrappedKeys: await Promise.all(wrapped) };
}

export class Keyring {
  #entries = new Map(); // by epoch

  constructor(data) {
    for (const [name, members] of membersOf(data.epochs)) {
      const isEpoch = /^[1-9]\d{0,9}$/.test(name) && Number(name) < 2 ** 32 && Array.isArray(members?.wrappedKeys);
      if (isEpoch) this.#entries.set(Number(name), members.wrappedKeys.filter(isObject));
    }
    Object.assign(this, { data: { ...data }, epoch: data.currentEpoch });
    if (data.v !== 1 || !this.#entries.has(this.epoch)) fail("MalformedKeyring", "this is no keyring");
  }
  static async create(adder, recipients = [], nowS = inSeconds(Date.now())) {
    const epochs = { 1: await newEpoch(1, [adder.kemPub, ...recipients], adder, nowS) };
    return new Keyring({ v: 1, currentEpoch: 1, epochs });
  }
  get recipients() { return this.#entries.get(this.epoch).map(({ subKem }) => subKem).filter((kem) => isTexts([kem])); }

  async open(keys, trusted, minEpoch = 1) {
    const contentKeys = new Map([[this.epoch, await this.#contentKey(keys, trusted, minEpoch)]]);
    for (const epoch of this.#entries.keys()) {
      const key = contentKeys.get(epoch) ?? await this.#contentKey(keys, trusted, 1, epoch).catch(() => null);
      if (key) contentKeys.set(epoch, key);
    }
    return new UnlockedKeyring(this.epoch, contentKeys);
  }
  async add(keys, recipient, trusted, { minEpoch = 1, nowS = inSeconds(Date.now()) } = {}) {
    if (this.recipients.includes(recipient)) fail("AlreadyPresent", `${recipient} is already present`);
    const contentKey = await this.#contentKey(keys, trusted, minEpoch), members = this.data.epochs[this.epoch];
    const entry = await wrapKey(contentKey, recipient, this.epoch, keys, nowS);
    return this.#with(this.epoch, { ...members, wrappedKeys: [...members.wrappedKeys, entry] });
  }
  async remove(keys, recipient, trusted, { minEpoch = 1, nowS = inSeconds(Date.now()) } = {}) {
    this.#check(minEpoch);
    if (!this.recipients.includes(recipient)) fail("NotARecipient", `${recipient} is not in epoch ${this.epoch}`);
    const kems = await Promise.all(this.#entries.get(this.epoch).map((entry) => (
      verifyEntry(entry, this.epoch, trusted).then(() => entry.subKem, () => recipient))));
    const others = kems.filter((kem) => kem !== recipient);
    if (!others.length) fail("LastRecipient", `without ${recipient} nobody trusted is left`);
    return this.#with(this.epoch + 1, await newEpoch(this.epoch + 1, others, keys, nowS));
  }

  #check(minEpoch) {
    if (this.epoch < minEpoch) fail("KeyringRolledBack", `it was at epoch ${minEpoch} before`);
  }
  async #contentKey(keys, trusted, minEpoch, epoch = this.epoch) {
    this.#check(minEpoch);
    const [mine, ...more] = this.#entries.get(epoch).filter(({ subKem }) => subKem === keys.kemPub);
    if (!mine) fail("NotARecipient", `${keys.kemPub} is not in epoch ${epoch}`);
    if (more.length) fail("AmbiguousEntry", `${keys.kemPub} is in epoch ${epoch} twice`);
    await verifyEntry(mine, epoch, trusted);
    return unwrapKey(mine, keys);
  }
  #with(epoch, members) {
    return new Keyring({ ...this.data, currentEpoch: epoch, epochs: { ...this.data.epochs, [epoch]: members } });
  }
}

export class UnlockedKeyring {
  #keys;

  constructor(epoch, contentKeys) { [this.epoch, this.#keys] = [epoch, contentKeys]; }

  async seal(data) {
    const sealed = await encrypt(this.#key(this.epoch), encoder.encode(JSON.stringify(copy(data))), `${this.epoch}`);
    return { _encrypted: base64(sealed), _epoch: this.epoch };
  }
  async open({ _encrypted, _epoch }) {
    const payload = decoded(_encrypted) ?? fail("NotSealed", "the document is not sealed");
    const epoch = Number.isInteger(_epoch) ? _epoch : this.epoch;
    const plaintext = new TextDecoder().decode(await decrypt(this.#key(epoch), payload, `${epoch}`));
    return parsed(plaintext) ?? fail("NotSealed", "it is no JSON object");
  }
  async sealBytes(plaintext, aad = "") {
    const header = new DataView(new ArrayBuffer(EPOCH_BYTES));
    header.setUint32(0, this.epoch);
    const sealed = await encrypt(this.#key(this.epoch), plaintext, blobContext(this.epoch, aad));
    return concat(new Uint8Array(header.buffer), sealed);
  }
  async openBytes(sealed, aad = "") {
    const bytes = new Uint8Array(sealed.buffer ?? sealed, sealed.byteOffset, sealed.byteLength);
    if (bytes.length < EPOCH_BYTES + IV_BYTES + TAG_BYTES) {
      fail("Truncated", "sealed blob shorter than its epoch+iv header");
    }
    const epoch = new DataView(bytes.buffer, bytes.byteOffset).getUint32(0);
    return decrypt(this.#key(epoch), bytes.subarray(EPOCH_BYTES), blobContext(epoch, aad));
  }
  #key(epoch) {
    return this.#keys.get(epoch) ?? fail("UnknownEpoch", `No key available for epoch ${epoch}`);
  }
}

export class RemoteKeyring {
  #of;

  constructor(client, name, keys, trusted, minEpoch = 1) {
    this.#of = { client, key: `${documentKey(name)}/_keyring`, keys, trusted: [...trusted] };
    this.minEpoch = minEpoch;
  }
  async create(recipients = []) {
    const { client, key, keys } = this.#of;
    const keyring = await Keyring.create(keys, recipients, inSeconds(client.nowMs()));
    const opened = await this.#open(keyring);
    await client.push(key, keyring.data);
    return this.#seen(opened);
  }
  async open() { return this.#seen(await this.#open(await this.read())); }
  async read() { return this.#keyring((await this.#of.client.pull(this.#of.key)).data); }
  add(recipient) { return this.#change("add", recipient); }
  remove(recipient) { return this.#change("remove", recipient); }

  async #change(method, recipient) {
    const { client, key, keys, trusted } = this.#of;
    let opened;
    await new SyncDocument(client, key).update(async (data) => {
      const options = { minEpoch: this.minEpoch, nowS: inSeconds(client.nowMs()) };
      const keyring = await this.#keyring(data)[method](keys, recipient, trusted, options);
      opened = await this.#open(keyring); // or nobody sees it
      return keyring.data;
    });
    return this.#seen(opened);
  }
  #open(keyring) { return keyring.open(this.#of.keys, this.#of.trusted, this.minEpoch); }
  #seen(opened) {
    this.minEpoch = Math.max(this.minEpoch, opened.epoch);
    return opened;
  }
  #keyring(data) {
    return Object.keys(data).length ? new Keyring(data) : fail("KeyringMissing", `no keyring at ${this.#of.key}`);
  }
}

export async function sealAndPushBlob(client, keyring, key, plaintext, aad = documentKey(key)) {
  return client.pushBlob(key, await keyring.sealBytes(plaintext, aad), "application/octet-stream");
}
export async function pullAndOpenBlob(client, keyring, key, aad = documentKey(key)) {
  const file = await client.pullBlob(key);
  return file && keyring.openBytes(await file.blob.arrayBuffer(), aad);
}

export async function sealEnvelope(plaintext, recipientKem, sealer, aad = "") {
  const contentKey = randomBytes(KEY_BYTES);
  const entry = await wrapKey(contentKey, recipientKem, ENVELOPE_EPOCH, sealer, inSeconds(Date.now()));
  return { entry, ct: base64(await encrypt(contentKey, plaintext, aad)), ...(aad && { v: 1 }) };
}
export async function openEnvelope({ v, entry, ct }, keys, { aad = "", sealer } = {}) {
  if (v === 1 && !aad) fail("AadRequired", "aad required");
  const sealed = decoded(ct);
  if (!isObject(entry) || !sealed) fail("NotSealed", "this is no envelope");
  await verifyEntry(entry, ENVELOPE_EPOCH, sealer ? [sealer] : null);
  return { plaintext: await decrypt(await unwrapKey(entry, keys), sealed, aad), sealedBy: entry.addedBy };
}

// --- Client ---

const JSON_TYPE = "application/json";
const isJsonType = (type) => (type ?? "").split(";")[0].trim().toLowerCase() === JSON_TYPE;
const RENEW_BEFORE_S = 24 * 3600;
const CLOCK_ERROR_MS = 5_000;
const HASH_DIGITS = 16;
const MAX_TIMER_S = 2 ** 31 / 1000 - 1; // a longer one fires at once

function withQuery(path, members) {
  const given = Object.entries(members).filter(([, value]) => value !== undefined && value !== null);
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}
function waitS({ attempts, initialS, maxS }, failures, retryAfterS = 0, mayGiveUp = true) {
  if (mayGiveUp && (failures >= attempts || retryAfterS > maxS)) return null;
  const pauseS = Math.max(Math.min(initialS * 2 ** (failures - 1), maxS) * (1 - Math.random() / 2), retryAfterS);
  return Math.min(pauseS, MAX_TIMER_S);
}

/** A request, which is aborted after `limitS` without a `restart`. */
class Exchange {
  #control = new AbortController();
  #timer;

  constructor(address, limitS, signal) {
    Object.assign(this, { address, limitS, signal: either(this.#control.signal, signal) });
    this.restart();
  }
  restart() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#control.abort(this.failure("no answer in time")), this.limitS * 1000);
  }
  close() {
    clearTimeout(this.#timer);
    this.#control.abort();
  }
  failure(message, cause) { return new Unreachable(`${this.address}: ${message}`, { cause }); }
  received(promise) {
    return promise.catch((cause) => {
      throw this.signal.aborted ? this.signal.reason : this.failure(`no answer (${cause.message})`, cause);
    });
  }
  async *chunks(response) {
    const reader = response.body.getReader();
    for (let read; !(read = await this.received(reader.read())).done; this.restart()) yield read.value;
  }
}

const json = (decode) => async (response, exchange) => {
  const isFile = response.headers.has("ETag") && !isJsonType(response.headers.get("Content-Type"));
  if (isFile) throw new TypeError("a file is there: pullBlob gets it");
  const body = await exchange.received(response.text());
  try {
    return decode(object(JSON.parse(body)));
  } catch (cause) {
    throw exchange.failure("the answer is not understood", cause);
  }
};

async function readFile(response, exchange) {
  const chunks = [];
  for await (const chunk of exchange.chunks(response)) chunks.push(chunk);
  const contentType = response.headers.get("Content-Type") ?? "application/octet-stream";
  const blob = new Blob(chunks, { type: contentType }), isJson = isJsonType(contentType);
  const hash = response.headers.get("ETag")?.match(/[0-9a-f]{64}/)?.[0] ?? "";
  if (!hash && isJson && parsed(await blob.text())?.hash === "") return null;
  if (hash && hex(await sha256(await blob.arrayBuffer())) !== hash) {
    if (isJson) throw new TypeError("what is stored is a document, not a file");
    throw new Unreachable("the file was damaged on its way: its hash is another");
  }
  return { blob, contentType, hash };
}

export class Client {
  #base; #host; #prefix; #keys; #timeoutS; #fetch;
  #certificate = null; #isOwn = true; #behindMs = 0;

  constructor(baseUrl, { keys, certificate, namespace, timeoutS = 30, backoff, fetch } = {}) {
    if (!AbortSignal.any) throw new UnsupportedBrowser(tooOld);
    const url = new URL(baseUrl, globalThis.location?.href);
    if (!/^https?:$/.test(url.protocol) || url.username || url.search || url.hash) {
      throw new TypeError(`not the http or https address of a server: ${baseUrl}`);
    }
    this.#base = url.origin + url.pathname.replace(/\/+$/, "");
    [this.#host, this.#prefix] = [url.host, namespace ? `/v1/${namespace}` : ""];
    [this.#keys, this.#timeoutS, this.#fetch] = [keys, timeoutS, fetch ?? globalThis.fetch.bind(globalThis)];
    this.backoff = { attempts: 4, initialS: 0.25, maxS: 10, ...backoff };
    if (certificate) this.certificate = certificate;
  }

  get address() { return this.#base + this.#prefix; }
  get author() { return this.#keys?.edPub ?? null; }
  get identity() {
    return this.#certificate?.kind === "device" ? this.#certificate.issUserId : this.#keys?.userId ?? "";
  }
  get certificate() { return this.#certificate; }
  set certificate(certificate) {
    const isForOther = (certificate.sub ?? this.author) !== this.author;
    if (!this.#keys || isForOther) throw new TypeError("the certificate is for another key");
    [this.#certificate, this.#isOwn] = [certificate, false];
  }
  nowMs() { return Date.now() + this.#behindMs; }

  async pull(key, { withKeyring, version, since, last, full } = {}) {
    const query = { checkpoint: since, last, full: full || null, withKeyring: withKeyring ? 1 : null, version };
    const pulled = await this.#get(withQuery(this.#target("pull", key), query), pullResult);
    if (version !== undefined && pulled.hash !== version) throw new errors.VersionNotFound();
    return pulled;
  }
  async push(key, data, baseHash = null, { idempotencyKey, signAuthor = false, writtenMs } = {}) {
    const members = await this.#authored(signAuthor && "starfish-doc-author-v1\n", key, { data: copy(data), baseHash });
    const target = withQuery(this.#target("push", key), { written: writtenMs });
    return this.#request("POST", target, json(pushResult), { data: members, idempotencyKey });
  }
  async append(key, data, { idempotencyKey, signAuthor = Boolean(this.#keys), tsMs } = {}) {
    const tag = signAuthor && "starfish-append-author-v1\n";
    const members = await this.#authored(tag, key, { data: copy(data), ts: tsMs });
    return this.#request("POST", this.#target("push", key), json(pushResult), { data: members, idempotencyKey });
  }
  async delete(key, baseHash, { idempotencyKey } = {}) {
    const target = withQuery(this.#target("push", key), { baseHash });
    return this.#request("DELETE", target, json(pushResult), { idempotencyKey });
  }
  async #authored(tag, key, members) {
    if (!tag) return members;
    if (!this.#keys) throw new TypeError("an author proof needs keys");
    const message = canonicalBytes({ d: members.data, k: documentKey(key) }, tag);
    return { ...members, authorPubkey: this.author, authorSignature: await this.#keys.sign(message) };
  }
  async history(key) {
    return this.#get(this.#target("history", key), ({ versions }) => versions.map(documentVersion));
  }
  async batchPull(collection, params, { known, append } = {}) {
    if (!params.length) return [];
    const of = (list) => list && JSON.stringify({ [collection]: list });
    const digits = known?.map((hash) => hash?.slice(0, HASH_DIGITS) || null);
    const query = { collections: collection, params: of(params), appendParams: of(append), known: of(digits) };
    return this.#get(withQuery(`${this.#prefix}/batch/pull`, query), ({ collections }) => {
      const entries = collections[collection].map(batchEntry);
      if (entries.length !== params.length) throw new TypeError("entries are missing");
      return entries;
    });
  }
  async *list(prefix = "", options = {}) {
    for await (const [name] of this.#listed(prefix, { pageSize: 1000, ...options })) yield name;
  }
  listHashes(prefix = "", options = {}) { return this.#listed(prefix, { pageSize: 5000, ...options, hashes: true }); }
  async *#listed(prefix, { after, pageSize, hashes }) {
    const target = prefix ? this.#target("list", prefix) : `${this.#prefix}/list`;
    for (let page = { hasMore: true }; page.hasMore; after = page.items.at(-1) ?? after) {
      page = await this.#get(withQuery(target, { limit: pageSize, hashes, after }), object);
      yield* page.items.map((name, at) => [name, page.hashes?.[at] ?? null]);
    }
  }
  async pushBlob(key, source, contentType, { idempotencyKey } = {}) {
    const body = new Blob([source]);
    // The bytes of a file are not signed, unless they are JSON.
    const signed = isJsonType(contentType) ? await body.arrayBuffer() : new Uint8Array();
    const limitS = this.#timeoutS + body.size / 1024; // servers want 1 KB a second
    const options = { body, signed, contentType, idempotencyKey, limitS };
    return this.#request("POST", this.#target("push", key), json(pushResult), options);
  }
  async pullBlob(key) { return this.#request("GET", this.#target("pull", key), readFile); }
  async changes(since, collections, params, limit) {
    return this.#get(this.#selection("changes", collections, params, { since, limit }), changesPage);
  }
  async *changePages(since, collections, params, limit) {
    for (let page = { cursor: since, hasMore: true }; page.hasMore;) {
      page = await this.changes(page.cursor, collections, params, limit);
      yield page;
    }
  }
  async keyTemplates(collections) {
    const target = this.#selection("changes", collections, null, { since: "now", storagePaths: true });
    return this.#get(target, ({ storagePaths }) => object(storagePaths));
  }
  async revoke(list) {
    const options = { data: list, attempts: 1 }; // the same generation again would be an error
    return this.#request("POST", "/revocations", json(({ generation }) => whole(generation)), options);
  }
  async revocations(issuer) {
    const got = this.#get(`/revocations/${encodeURIComponent(issuer)}`, object, { isSigned: false });
    const list = await got.catch((error) => (error instanceof errors.NotFound ? null : Promise.reject(error)));
    if (!list || await isIssued(list, issuer, REVOCATION_TAG)) return list;
    throw new errors.BadSignature("the revocation list is not signed by its issuer");
  }
  request(method, target, body) { return this.#request(method, this.#prefix + target, json(object), { data: body }); }
  watch(collections, params, { idleS = IDLE_S, signal, ...options } = {}) {
    const control = new AbortController(), target = this.#selection("events", collections, params);
    const ends = either(signal, control.signal);
    const connect = (headers) => this.#stream(target, headers, idleS, ends);
    const events = followed(connect, { ...options, signal: ends, backoff: this.backoff });
    const leave = events.return.bind(events);
    events.return = (value) => (control.abort(), leave(value));
    return events;
  }
  async *#stream(target, headers, idleS, signal) {
    const exchange = new Exchange(this.address, idleS, signal);
    try {
      const response = await this.#send(exchange, "GET", target, { headers });
      if (response.headers.get("Content-Type")?.startsWith("text/event-stream")) yield* exchange.chunks(response);
      else throw exchange.failure("the answer is not understood");
    } finally {
      exchange.close();
    }
  }

  #target(action, key) {
    const segments = documentKey(key).split("/");
    // A URL would lose these segments, and name another document.
    if (segments.some((each) => each === "." || each === "..")) throw new errors.InvalidPathParameter();
    const encoded = segments.map((each) => encodeURIComponent(each).replaceAll("%3A", ":").replaceAll("%40", "@"));
    return `${this.#prefix}/${action}/${encoded.join("/")}`;
  }
  #selection(route, collections, params, query = {}) {
    const narrowed = params && JSON.stringify(params);
    return withQuery(`${this.#prefix}/${route}`, { ...query, collections: collections?.join(), params: narrowed });
  }
  #get(target, decode, options) { return this.#request("GET", target, json(decode), options); }
  async #request(method, target, read, options = {}) {
    const { data, limitS = this.#timeoutS, attempts = this.backoff.attempts, ...sent } = options;
    const { contentType = JSON_TYPE, idempotencyKey = randomKey() } = options;
    if (data) sent.body = encoder.encode(JSON.stringify(data));
    if (method !== "GET") sent.headers = { "Content-Type": contentType, "Idempotency-Key": idempotencyKey };
    for (let failures = 1; ; failures++) {
      const exchange = new Exchange(this.address, limitS);
      try {
        return await read(await this.#send(exchange, method, target, sent), exchange);
      } catch (error) {
        const pauseS = isTransient(error) ? waitS({ ...this.backoff, attempts }, failures, error.retryAfterS) : null;
        if (pauseS === null) throw error;
        await sleep(pauseS * 1000);
      } finally {
        exchange.close();
      }
    }
  }
  /** Sends again if credentials were invalid: the clock was wrong, or the browser has repeated the request. */
  async #send(exchange, method, target, { body, signed = body, headers, isSigned = Boolean(this.#keys) }) {
    for (let isFirst = true; ; isFirst = false) {
      const tsMs = this.nowMs();
      const credentials = isSigned ? await this.#credentials(method, target, signed, tsMs) : {};
      const response = await exchange.received(this.#fetch(this.#base + target, {
        method, body, headers: { ...headers, ...credentials }, signal: exchange.signal,
        cache: "no-store", credentials: "omit", redirect: "error",
      }));
      // A batch is answered with 200 and this header.
      const isRejected = isSigned && (response.status === 401 || response.headers.has("WWW-Authenticate"));
      const serverMs = Date.parse(response.headers.get("Date") ?? "");
      const isWrong = serverMs < tsMs - CLOCK_ERROR_MS || serverMs > this.nowMs() + CLOCK_ERROR_MS;
      // Any other answer may have been in a cache for long.
      if (isWrong && (isRejected || method !== "GET")) this.#behindMs = serverMs - Date.now();
      if (isFirst && isRejected) await response.body?.cancel();
      else if (response.status === 200 && !isRejected) return response;
      else if (response.status === 200) throw new errors.Unauthorized();
      else throw serverError(response.status, parsed(await exchange.received(response.text())),
        Number(response.headers.get("Retry-After")?.match(/^\d+$/) ?? 0));
    }
  }
  async #credentials(method, target, body = new Uint8Array(), tsMs) {
    const certificate = await this.#currentCertificate(tsMs / 1000), nonce = base64(randomBytes(16));
    const members = { m: method, p: target, b: hex(await sha256(body)), h: this.#host, ts: tsMs, nonce };
    return {
      Authorization: `Cap ${base64(canonicalBytes(certificate))}`,
      "X-Starfish-Sig": await this.#keys.sign(canonicalBytes(members, "starfish-req-v1\n")),
      "X-Starfish-Ts": String(tsMs), "X-Starfish-Nonce": nonce,
      ...(certificate.kind === "audience" && { "X-Starfish-Pub": this.author }),
    };
  }
  async #currentCertificate(nowS) {
    const known = this.#certificate;
    if (known && (!this.#isOwn || (known.nbf <= nowS && nowS < known.exp - RENEW_BEFORE_S))) return known;
    const issued = await issueDeviceCertificate(this.#keys, this.#keys, { nowS });
    if (this.#isOwn) this.#certificate = issued; // nobody has set another one meanwhile
    return this.#certificate;
  }
}

// --- Change stream ---

const IDLE_S = 15; // servers send a heartbeat every 4 s
const MAX_EVENT_CHARS = 1 << 20;

async function* blocksOf(chunks) {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const chunk of chunks) {
    const received = (rest + decoder.decode(chunk, { stream: true })).replace(/\r\n|\r(?!$)/g, "\n");
    const blocks = received.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const fields = {};
      for (const line of block.split("\n")) {
        const [, name, value] = line.match(/^([^:]*):? ?(.*)$/s);
        if (name === "data" && "data" in fields) fields.data += `\n${value}`;
        else if (name !== "id" || !value.includes("\0")) fields[name] = value;
      }
      yield fields;
    }
    if (rest.length > MAX_EVENT_CHARS) throw new Unreachable("an event in the stream of changes is too long");
  }
}

function changeOf({ event = "", data }, id) {
  if (event === "reset") return { reset: true, id };
  if (data === undefined || !["", "message"].includes(event)) return null;
  try {
    return changeEvent(JSON.parse(data), id);
  } catch (cause) {
    throw new Unreachable("the stream of changes is not understood", { cause });
  }
}

async function* followed(connect, { after = "", signal, backoff, onConnect, onDisconnect }) {
  let position = after, failures = 0, wasLive = false;
  while (!signal.aborted) {
    let isLive = false, retryS = 0, error = new Unreachable("the stream of changes ended");
    try {
      const resumed = position && { "Last-Event-ID": position };
      for await (const block of blocksOf(connect({ Accept: "text/event-stream", ...resumed }))) {
        if (isLive) failures = 0;
        if (/^\d{1,8}$/.test(block.retry)) retryS = Number(block.retry) / 1000;
        const change = changeOf(block, block.id ?? position);
        position = block.id ?? position; // only now: a change that cannot be parsed is not skipped
        if (!isLive && (change || position)) {
          isLive = wasLive = true;
          onConnect?.();
        }
        if (change) yield change;
        if (signal.aborted) return;
      }
    } catch (caught) {
      if (signal.aborted) return;
      if (!isRetryable(caught)) throw caught;
      error = caught;
    }
    const pauseS = waitS(backoff, ++failures, Math.max(error.retryAfterS ?? 0, retryS), !wasLive);
    if (pauseS === null) throw error;
    if (isLive) onDisconnect?.(error);
    await sleep(pauseS * 1000, signal);
  }
}

// --- SyncDocument ---

const MAX_DROPPED = 1000;
const POLL_MS = 2000; // without a change stream
const RESUBSCRIBE_MS = 30_000;

class DocumentRules {
  constructor({ onConflict, idMember, resolve, sealing }) {
    Object.assign(this, { threeWay: new ThreeWayMerge(onConflict, idMember), resolve, sealing });
  }
  merge(base, edited, theirs) {
    const isResolved = this.resolve && !same(base, theirs) && !same(base, edited);
    const merged = isResolved ? this.resolve(copy(edited), copy(theirs)) : this.threeWay.merge(base, edited, theirs);
    return [merged, this.threeWay.dropped(base, edited, theirs, merged)];
  }
  async seal(data) { return this.sealing ? this.sealing.seal(data) : data; }
  async open(stored) { return this.sealing ? this.sealing.open(stored) : stored; }
}

export class SyncDocument {
  #client;
  #rules;
  #options;
  #hasRemote = false;
  #base = "{}";
  #baseHash = "";
  #last = Promise.resolve();

  constructor(client, key, { retries = 3, signAuthor = false, ...rules } = {}) {
    Object.assign(this, { key, data: {}, hash: "", dropped: [] });
    [this.#client, this.#rules, this.#options] = [client, new DocumentRules(rules), { retries, signAuthor }];
  }

  pull() {
    return this.#inTurn(async () => {
      this.#apply(...await this.#fetch());
      return this.data;
    });
  }
  push(data) {
    return this.#inTurn(() => {
      if (data && copy(data)) this.data = data;
      return this.#store((edited) => edited);
    });
  }
  update(change) {
    return this.#inTurn(async () => {
      if (!this.#hasRemote) this.#apply(...await this.#fetch());
      return this.#store(change);
    });
  }
  get isEdited() {
    const isBaseKnown = this.hash === this.#baseHash;
    return isBaseKnown ? canonicalJson(copy(this.data)) !== this.#base : Object.keys(this.data).length > 0;
  }
  dump() {
    const { key, hash, data } = this;
    return { version: 1, key: documentKey(key), hash, base: this.#baseData(), data: copy(data) };
  }
  restore({ version, key, hash, base = null, data }) {
    if (version !== 1 || typeof hash !== "string" || !isObject(data) || !isObject(base ?? {})) {
      throw new TypeError("this is not what dump() of a SyncDocument returned");
    }
    if (key !== documentKey(this.key)) throw new TypeError(`this state is of ${key}, not of ${this.key}`);
    if (base) this.#setBase(base, hash);
    Object.assign(this, { data: copy(data), hash });
  }

  async *follow({ collection, params, signal, onDisconnect } = {}) {
    const left = new AbortController(), ended = either(left.signal, signal);
    const news = new Signal(), end = new Promise((resolve) => ended.addEventListener("abort", resolve));
    let announced = [], isLive = false, isAway = false, rejection, given;
    const notify = (hash, live = isLive) => {
      announced.push(hash);
      isLive = live;
      news.set();
    };
    end.then(() => notify());
    this.#listen(collection, params, ended, notify).catch((error) => {
      rejection = error;
      notify(null, false);
    });
    try {
      for (let hasStarted = this.#hasRemote; !ended.aborted; hasStarted = true) {
        const isCurrent = isLive && !isAway && announced.every((hash) => hash === this.hash);
        [announced, news.isSet] = [[], false];
        const pull = () => this.pull().then(() => null, (error) => error);
        const failure = isCurrent ? null : await Promise.race([pull(), end]);
        if (rejection || (failure && !(hasStarted && isTransient(failure)))) throw rejection ?? failure;
        if (failure && !isAway) onDisconnect?.(failure);
        isAway = Boolean(failure);
        if (!isAway && !ended.aborted && given !== this.hash) {
          given = this.hash;
          yield this.data;
        }
        await news.wait(isLive && !isAway ? 0 : Math.max(POLL_MS, 1000 * (failure?.retryAfterS ?? 0)));
      }
    } finally {
      left.abort();
    }
  }

  async #listen(collection, params, signal, notify) {
    const segments = documentKey(this.key).split("/");
    const mayMatch = (event) => Object.values(event.params).every((value) => segments.includes(String(value)));
    const filter = collection ? [[collection], params && { [collection]: params }] : [null, undefined];
    const options = { signal, onConnect: () => notify(null, true), onDisconnect: () => notify(null, false) };
    while (!signal.aborted) {
      try {
        for await (const event of this.#client.watch(...filter, options)) {
          if (event.reset || mayMatch(event)) notify(event.hash ?? null);
        }
      } catch (error) {
        if (collection && isAny(error, errors.BadRequest)) throw error;
        notify(null, false);
        await sleep(RESUBSCRIBE_MS, signal);
      }
    }
  }

  #inTurn(work) {
    const done = this.#last.then(work);
    this.#last = done.catch(() => {});
    return done;
  }
  #baseData() { return this.hash === this.#baseHash ? JSON.parse(this.#base) : null; }
  #setBase(data, hash) {
    [this.hash, this.#base, this.#baseHash, this.#hasRemote] = [hash, canonicalJson(data), hash, true];
  }
  async #fetch() {
    const { data, hash } = await this.#client.pull(this.key);
    // An answer without a hash must not get in data that was not sealed.
    return [hash || Object.keys(data).length ? await this.#rules.open(data) : {}, hash];
  }
  #apply(theirs, hash) {
    if (this.isEdited) {
      const [merged, dropped] = this.#merge(this.#baseData(), copy(this.data), theirs, hash);
      if (!same(merged, this.data)) this.data = merged;
      this.#drop(dropped);
    } else if (hash !== this.hash || !this.#hasRemote) {
      this.data = theirs;
    }
    this.#setBase(theirs, hash);
  }
  #merge(base, edited, theirs, hash) {
    if (!base && hash !== this.hash && !this.#rules.resolve && !same(edited, theirs)) throw new UnknownBase(hash);
    return this.#rules.merge(base ?? (hash === this.hash ? theirs : {}), edited, theirs);
  }
  #drop(dropped) { this.dropped = [...this.dropped, ...dropped].slice(-MAX_DROPPED); }

  async #store(change) {
    let edited = copy(this.data), base = this.#baseData(), hash = this.hash;
    const began = canonicalJson(edited), lost = [], { retries, signAuthor } = this.#options;
    for (let attempt = 0; ; attempt++) {
      const data = copy(await change(copy(edited))), sealed = await this.#rules.seal(data);
      const pushed = await this.#client.push(this.key, sealed, hash || null, { signAuthor }).catch((error) => {
        if (!(error instanceof errors.Conflict) || attempt === retries) throw error;
      });
      if (pushed) {
        // Only now: a newer base without its data would be overwritten.
        const now = copy(this.data);
        if (canonicalJson(now) !== began) this.data = this.#rules.threeWay.merge(JSON.parse(began), now, data);
        else if (canonicalJson(data) !== began) this.data = data;
        this.#drop(lost);
        this.#setBase(data, pushed.hash);
        return pushed;
      }
      const [theirs, current] = await this.#fetch(), [merged, dropped] = this.#merge(base, edited, theirs, current);
      [edited, base, hash] = [merged, theirs, current];
      lost.push(...dropped);
      await sleep(Math.min(100 * 2 ** attempt, 2000) + 100 * Math.random());
    }
  }
}

// --- Replica: storage ---

const TAIL_ELEMENTS = 1000; // of each log
const REMOVALS_MS = 90 * 24 * 3_600_000; // a server that is restored may need them
const replicaName = (name) => `pysync-replica:${name}`;
const below = (prefix) => IDBKeyRange.bound(prefix, `${prefix}\x7f`); // keys are ASCII
const newest = (list, count) => list.slice(Math.max(list.length - count, 0));
const elementsOf = (key) => IDBKeyRange.bound([key], [key, []]);

const remoteVersion = (key, hash, { data = null, writtenMs = 0, checkpointMs = null } = {}) => (
  { key, hash, data, writtenMs, checkpointMs, ...(!hash && { removedMs: writtenMs }) });
const pulledVersion = (key, { hash, data, timestampMs }, writtenMs = timestampMs) => (
  remoteVersion(key, hash, { data: hash ? JSON.stringify(data) : null, writtenMs }));

const UNSENT = { sent: null, sentHash: null, idempotencyKey: "" };
/** With an `idempotencyKey`, `sent` may be on its way. */
const newEdit = (key, kind, members) => (
  { key, kind, data: null, base: null, baseHash: "", writtenMs: null, error: null, ...UNSENT, ...members });

function encodeError(error) {
  const { constructor, name, message, status, code, extras } = error ?? {};
  return error && { kind: constructor.name, name, message, status, code, extras };
}
function decodeError({ kind, ...members }) {
  return Object.assign(new (errorClasses[kind] ?? Error)(members.message), members);
}

class Draft {
  constructor(versions, edits) {
    const known = new Map(versions.filter(Boolean).map((each) => [each.key, each]));
    Object.assign(this, { versions: known, all: edits, writes: [], afterwards: [] });
  }
  edits(key, isRejected = false) {
    return this.all.filter((edit) => edit.key === key && (edit.error !== null) === isRejected);
  }
  edit(key) { return this.edits(key).find(({ kind }) => kind !== "append"); }
  put(store, record) { this.writes.push((stores) => stores(store).put(record)); }
  set(name, value) { this.put("setting", { name, value }); }
  remove(store, key) { this.writes.push((stores) => stores(store).delete(key)); }
  save(edit) {
    const saved = { ...edit, stamp: randomKey() };
    this.all = this.all.map((each) => (each.id === edit.id ? saved : each));
    this.put("edit", saved);
  }
  drop(edit) {
    this.all = this.all.filter(({ id }) => id !== edit.id);
    if (edit.id) this.remove("edit", edit.id);
  }
  store(version) {
    this.versions.set(version.key, version);
    this.put("document", version);
    if (!version.hash) this.empty(version.key);
  }
  empty(key) {
    this.remove("element", elementsOf(key));
    this.remove("file", key);
  }
  addElements(key, added) {
    for (const element of added) this.put("element", { key, ...element });
    this.writes.push(async (stores) => {
      const last = (await requested(stores("element").getAllKeys(elementsOf(key)))).at(-TAIL_ELEMENTS - 1);
      if (last) stores("element").delete(IDBKeyRange.bound([key], last));
    });
  }
}

class ReplicaDatabase {
  lost = null;
  #db;

  static async open(name, owner, onLost) {
    const opened = new ReplicaDatabase();
    const db = opened.#db = await openDatabase(replicaName(name), (created) => {
      const keyPaths = { setting: "name", feed: "id", file: "key", element: ["key", "tsMs"] };
      for (const [store, keyPath] of Object.entries(keyPaths)) created.createObjectStore(store, { keyPath });
      created.createObjectStore("document", { keyPath: "key" }).createIndex("removed", "removedMs");
      created.createObjectStore("edit", { keyPath: "id", autoIncrement: true }).createIndex("key", "key");
    });
    db.onclose = db.onversionchange = () => {
      opened.close(new StorageError(`the browser has deleted what the replica ${name} stored`, "evicted"));
      onLost();
    };
    const found = await opened.#transact("readwrite", {}, async (stores) => { // or two tabs get it
      const known = await requested(stores("setting").get("owner"));
      if (!known) stores("setting").put({ name: "owner", value: owner });
      return known?.value ?? owner;
    });
    if (found === owner) return opened;
    opened.close(new ReplicaError(`the replica ${name} is one of ${found}, not of ${owner}`));
    throw opened.lost;
  }
  close(reason) {
    this.lost ??= reason;
    this.#db.close();
  }

  read(requests) { return this.#transact("readonly", {}, (stores) => Promise.all(requests(stores).map(requested))); }
  async setting(name) { return (await this.read((stores) => [stores("setting").get(name)]))[0]?.value; }
  async all(store) { return (await this.read((stores) => [stores(store).getAll()]))[0]; }
  draft(keys, versions) {
    return this.#transact("readonly", {}, async (stores) => new Draft(
      versions ?? await Promise.all(keys.map((key) => requested(stores("document").get(key)))),
      await editsOf(stores, keys)));
  }
  async storedKeys(prefix) {
    const [keys, removed] = await this.read((stores) => [
      stores("document").getAllKeys(below(prefix)), stores("document").index("removed").getAllKeys()]);
    const gone = new Set(removed);
    return keys.filter((key) => !gone.has(key));
  }
  async elements(key, count) {
    const [found] = await this.read((stores) => [stores("element").getAll(elementsOf(key))]);
    return newest(found, count).map(({ key: _, ...element }) => element);
  }

  /** Calls `change` again if the edits are others by then. Returns null if another tab has moved the `feed`. */
  async update(keys, change, { durability = "relaxed", feed, versions } = {}) {
    for (;;) {
      const draft = await this.draft(keys, versions), read = stampsOf(draft.all), result = await change(draft);
      if (!draft.writes.length) return result;
      const outcome = await this.#transact("readwrite", { durability }, async (stores) => {
        if (feed && (await requested(stores("feed").get(feed.id)))?.cursor !== feed.cursor) return "moved";
        if (stampsOf(await editsOf(stores, keys)) !== read) return "edited";
        await Promise.all(draft.writes.map((write) => write(stores)));
        return "written";
      });
      if (outcome === "edited") continue;
      if (outcome === "written") for (const call of draft.afterwards) call();
      return outcome === "written" ? result : null;
    }
  }

  /** `work` may await requests alone, or the transaction ends. */
  async #transact(mode, options, work) {
    if (this.lost) throw this.lost;
    let transaction;
    try {
      transaction = this.#db.transaction(this.#db.objectStoreNames, mode, options);
      return (await Promise.all([work((name) => transaction.objectStore(name)), committed(transaction)]))[0];
    } catch (error) {
      const cause = transaction?.error ?? error;
      if (cause.name === "InvalidStateError") this.#db.onclose();
      throw this.lost ?? storageError(cause);
    }
  }
}

async function editsOf(stores, keys) {
  if (!keys.length) return [];
  const wanted = new Set(keys), sorted = [...wanted].sort(), range = IDBKeyRange.bound(sorted[0], sorted.at(-1));
  return (await requested(stores("edit").index("key").getAll(range))).filter(({ key }) => wanted.has(key));
}
const stampsOf = (edits) => edits.map(({ id, stamp }) => `${id} ${stamp}`).join();

// --- Replica: local copy and outbox ---

const CONCURRENT = 6; // as browsers allow for one server
const KEYS_TRUSTED_MS = 5 * 60_000; // servers know an idempotency key for 10 min
const UNKNOWN_HASH = "-"; // of a log that was not read
const isByCollection = (option) => isObject(option) && typeof option.seal !== "function";

async function inParallel(items, work) {
  const results = [], rest = items.entries(), failures = [];
  const next = async () => {
    for (const [at, item] of rest) if (!failures.length) results[at] = await work(item, at);
  };
  await Promise.all(Array.from({ length: CONCURRENT }, () => next().catch((error) => failures.push(error))));
  if (failures.length) throw failures[0];
  return results;
}

async function* elementsAfter(client, key, since) {
  for (let hasMore = true; hasMore;) {
    const pulled = await client.pull(key, { since }), added = elements(pulled).filter(({ tsMs }) => tsMs > since);
    ({ hasMore } = pulled);
    if (hasMore && !added.length) throw new errors.FullNotAllowed();
    yield* added;
    since = added.at(-1)?.tsMs;
  }
}

class LocalCopy {
  #options; #rules = new Map(); #listeners = new Set();

  constructor(client, db, options) {
    Object.assign(this, { dropped: [], _client: client, _db: db, _isClosed: false, _paths: {} });
    this.#options = options;
  }

  async get(key) {
    const at = documentKey(key);
    return this.#look(await this._db.draft([at]), at);
  }
  async entries(prefix = "") {
    const range = below(documentKey(prefix)), [versions, edits] = await this._db.read((stores) => [
      stores("document").getAll(range), stores("edit").index("key").getAll(range)]);
    const waiting = edits.filter(({ kind, error }) => kind !== "append" && error === null);
    const found = new Map([...versions, ...waiting].map((each) => [each.key, each]));
    const opened = await Promise.all([...found.keys()].sort().map(async (key) => {
      const { data, kind } = found.get(key);
      return [key, kind || data === null ? JSON.parse(data) : await this._open(key, data).catch(() => null)];
    }));
    return opened.filter(([, data]) => data !== null);
  }

  async keys(prefix = "") {
    const range = below(documentKey(prefix)), found = new Set(await this._db.storedKeys(range.lower));
    const [edits] = await this._db.read((stores) => [stores("edit").index("key").getAll(range)]);
    for (const { key, kind, error } of edits) if (error === null) found[kind === "delete" ? "delete" : "add"](key);
    return [...found].sort();
  }

  async tail(key, n) {
    const at = documentKey(key), draft = await this._db.draft([at]);
    const found = draft.edit(at)?.data === null ? [] : await this._db.elements(at, n);
    for (const each of found) each.data = await this._open(at, JSON.stringify(each.data)).catch(() => each.data);
    const appends = draft.edits(at).filter(({ kind }) => kind === "append");
    found.push(...appends.map(({ writtenMs, data }) => ({ tsMs: writtenMs, data: JSON.parse(data) })));
    return newest(found, n);
  }

  async put(key, data) {
    const kept = object(copy(data));
    await this.#edit(key, () => kept);
  }
  delete(key) { return this.#edit(key, () => null); }
  update(key, change) {
    return this.#edit(key, async (draft, at) => {
      const data = await change(await this.#look(draft, at));
      return data === null ? null : object(copy(data));
    });
  }
  async append(key, data) {
    const members = { data: JSON.stringify(object(copy(data))), writtenMs: this._client.nowMs() };
    await this.#change(key, (draft, at) => draft.save(newEdit(at, "append", members)), []);
  }
  retry(key) {
    return this.#change(key, async (draft, at) => {
      for (const edit of draft.edits(at, true)) {
        const waiting = edit.kind === "append" ? undefined : draft.edit(at);
        if (waiting) draft.drop(edit);
        else draft.save({ ...edit, error: null });
        if (!waiting?.data || !edit.data) continue;
        const sides = [await this._open(at, edit.base), JSON.parse(waiting.data), JSON.parse(edit.data)];
        draft.save({ ...waiting, data: JSON.stringify(this._merge(draft, at, ...sides)) });
      }
    });
  }
  discard(key) { return this.#change(key, (draft, at) => draft.edits(at, true).forEach((edit) => draft.drop(edit))); }

  #edit(key, make) {
    return this.#change(key, async (draft, at) => {
      const data = await make(draft, at), found = draft.edit(at), known = draft.versions.get(at);
      const edit = found ?? newEdit(at, "put", { base: known?.data ?? null, baseHash: known?.hash ?? "" });
      const isOnlyHere = (found || known) && !edit.baseHash && !edit.idempotencyKey;
      if (data === null && isOnlyHere) return draft.drop(edit);
      const [kind, text] = data === null ? ["delete", null] : ["put", JSON.stringify(data)];
      return draft.save({ ...edit, kind, data: text, writtenMs: null });
    });
  }
  async #change(key, change, keys = [documentKey(key)], at = documentKey(key)) {
    await this._db.update(keys, (draft) => change(draft, at), DURABLE);
    this._edited(at);
  }
  async #look(draft, key) {
    const edit = draft.edit(key), data = draft.versions.get(key)?.data ?? null;
    return edit || data === null ? JSON.parse(edit?.data ?? null) : this._open(key, data);
  }

  changes() {
    const listener = Object.assign(new Signal(), { keys: new Set() });
    this.#listeners.add(listener);
    return this.#changesOf(listener);
  }
  async *#changesOf(listener) {
    for (let isLast = false; !isLast;) {
      await listener.wait();
      [isLast, listener.isSet] = [this._isClosed, false];
      for (const key of listener.keys) {
        listener.keys.delete(key);
        yield key;
      }
    }
  }
  _edited(key) { this._notify([key]); }
  _notify(keys) {
    for (const listener of this.#listeners) {
      for (const key of keys) listener.keys.add(key);
      listener.set();
    }
  }

  _setPaths(paths) {
    const openness = ([, { names }]) => names.map(Boolean).join(); // as on the server, literals win
    const templates = Object.entries(paths).map(([name, path]) => [name, new KeyTemplate(path)]);
    templates.sort((one, other) => (openness(one) < openness(other) ? -1 : 1));
    this._paths = { __proto__: null, ...Object.fromEntries(templates) };
  }
  _collectionOf(key) { return Object.keys(this._paths).find((name) => this._paths[name].matches(key)); }
  _rulesOf(key, name = this._collectionOf(key)) {
    const { sealing } = this.#options;
    if (isByCollection(sealing) && !Object.hasOwn(sealing, name)) { // the server says which one it is
      throw new errors.UnknownCollection(`sealing does not say whether ${key} is sealed, of the collection ${name}`);
    }
    if (!this.#rules.has(name)) {
      const chosen = Object.entries(this.#options).map(([option, value]) => (
        [option, isByCollection(value) ? value[name] : value]));
      this.#rules.set(name, new DocumentRules(Object.fromEntries(chosen)));
    }
    return this.#rules.get(name);
  }

  _merge(draft, key, base, edited, theirs) {
    const [merged, dropped] = this._rulesOf(key).merge(base, edited, theirs);
    this._drop(draft, key, dropped);
    return copy(merged);
  }
  _drop(draft, key, dropped) {
    const all = dropped.map((each) => ({ key, dropped: each }));
    draft.afterwards.push(() => { this.dropped = [...this.dropped, ...all].slice(-MAX_DROPPED); });
  }
  async _open(key, stored) { return stored === null ? {} : this._rulesOf(key).open(JSON.parse(stored)); }
  async _seal(key, data) {
    await this._checkOptions();
    return copy(await this._rulesOf(key).seal(data));
  }
}

/** The bytes of an edit are on the disk before they are sent: two tabs, or one after a crash, send the same. */
class SendingCopy extends LocalCopy {
  async _send() {
    const met = [], waiting = (await this._db.all("edit")).filter(({ error }) => error === null);
    await inParallel([...new Set(waiting.map(({ key }) => key))], async (key) => {
      try {
        for (let edit; ([edit] = (await this._db.draft([key])).edits(key)) && edit;) await this.#step(edit);
      } catch (error) {
        const stopsAll = isAny(error, errors.Unauthorized, errors.Unavailable, errors.RateLimited);
        if (stopsAll || !isAny(error, PysyncError)) throw error;
        met.push(error);
      }
    });
    if (met.length) throw met[0];
  }

  async #step(edit) {
    const isPrepared = edit.idempotencyKey !== "";
    try {
      if (!isPrepared) await this.#prepare(edit);
      else await (edit.kind === "append" ? this.#append(edit) : this.#push(edit));
    } catch (error) {
      const isPassing = (isRetryable(error) && !isAny(error, errors.QuotaExceeded))
        || isAny(error, errors.Unauthorized, errors.Conflict) || !isAny(error, PysyncError, TypeError);
      if (isAny(error, StorageError, ReplicaError) || (isPrepared && isPassing)) throw error;
      await this.#reject(edit, error);
    }
  }

  #prepare(edit) {
    const { key, base } = edit, plain = JSON.parse(edit.data), idempotencyKey = randomKey();
    return this.#conclude(edit, async (draft) => {
      if (plain && base !== null && same(await this._open(key, base), plain)) return draft.drop(edit);
      const sealed = plain && await this._seal(key, plain), [last] = await this._db.elements(key, 1);
      const [sent, sentHash] = plain ? [JSON.stringify(sealed), await documentHash(sealed)] : [null, ""];
      const checkpointMs = Math.max(draft.versions.get(key)?.checkpointMs ?? 0, last?.tsMs ?? 0);
      return draft.save({ ...edit, idempotencyKey, sentMs: this._client.nowMs(), sent, sentHash, checkpointMs });
    }, DURABLE);
  }

  /** Has `change` decide about an edit as it is now, unless another tab or the feed has. */
  #conclude(edit, change, options) {
    const mark = ({ idempotencyKey, stamp }) => idempotencyKey || stamp;
    return this._db.update([edit.key], (draft) => {
      const now = draft.edits(edit.key).find(({ id }) => id === edit.id);
      return now && mark(now) === mark(edit) && change(draft, now);
    }, options);
  }

  async #push(edit) {
    const { key, sent, sentHash, baseHash, idempotencyKey, writtenMs } = edit;
    let hash = sentHash, timestampMs = this._client.nowMs();
    try {
      ({ hash, timestampMs } = sent === null ? await this._client.delete(key, baseHash, { idempotencyKey })
        : await this._client.push(key, JSON.parse(sent), baseHash || null, { idempotencyKey, writtenMs }));
    } catch (error) {
      if (!isAny(error, errors.Conflict)) throw error;
      if (error.currentHash !== sentHash) return this.#resolve(edit, error);
    }
    const version = remoteVersion(key, hash, { data: sent, writtenMs: timestampMs });
    return this.#conclude(edit, (draft, now) => (draft.store(version), this.#settle(draft, now, version)));
  }

  async #resolve(edit, conflict) {
    const { key, baseHash } = edit, { currentHash } = conflict, isKnown = !["", UNKNOWN_HASH].includes(baseHash);
    const mustMerge = await this.#conclude(edit, (draft, now) => {
      const isDeletion = now.data === null && now.sent === null;
      if (isDeletion && (!isKnown || currentHash.startsWith(baseHash))) {
        return draft.save({ ...now, ...UNSENT, baseHash: currentHash });
      }
      if (now.writtenMs !== null) return draft.drop(now); // a restored server has something newer
      if (isDeletion && now.base === null) return this.#dropDeletion(draft, now); // others go on with a log or a file
      return true;
    });
    if (!mustMerge) return;
    const pulled = await this._client.pull(key);
    if (pulled.hash === baseHash) throw conflict;
    await this.#conclude(edit, (draft) => this._applyRemote(draft, pulledVersion(key, pulled)));
    this._notify([key]);
  }

  async #append(edit) {
    const { key, idempotencyKey } = edit, data = JSON.parse(edit.sent), sentMs = this._client.nowMs();
    let element = null;
    if (sentMs < edit.sentMs || sentMs - edit.sentMs >= KEYS_TRUSTED_MS) {
      element = await this.#find(edit, data);
      // An attempt that has not arrived by now never does.
      if (!element) await this.#conclude(edit, (draft, now) => draft.save({ ...now, sentMs }), DURABLE);
    }
    if (!element) {
      const { timestampMs } = await this._client.append(key, data, { idempotencyKey });
      element = { tsMs: timestampMs, data, authorPubkey: this._client.author ?? undefined };
    }
    await this.#conclude(edit, (draft, now) => {
      draft.drop(now);
      if (!draft.versions.has(key)) draft.store(remoteVersion(key, UNKNOWN_HASH, { writtenMs: element.tsMs }));
      draft.addElements(key, [element]);
    });
    this._notify([key]);
  }

  /** Earlier appends are not after the checkpoint, and later ones wait, so no element is found twice. */
  async #find({ key, checkpointMs }, data) {
    const { author, identity } = this._client;
    try {
      for await (const each of elementsAfter(this._client, key, checkpointMs)) {
        if ((each.authorPubkey ?? null) === author && same(each.data, data)) return each;
      }
      return null;
    } catch (error) {
      const mayNot = identity ? errors.Forbidden : errors.Unauthorized;
      if (!isAny(error, errors.BadRequest, errors.Forbidden, errors.NotFound, mayNot)) throw error;
      throw new errors.OutcomeUnknown("it is not known whether an earlier attempt was applied");
    }
  }

  async #reject(edit, error) {
    await this.#conclude(edit, async (draft, now) => {
      const isMine = now.kind === "append" || now.writtenMs === null; // else sent back
      const isForOthers = isAny(error, errors.Erased, errors.Forbidden, errors.NotFound, errors.MethodNotAllowed);
      if (!isMine && isForOthers) return draft.drop(now);
      const isNewer = now.kind !== "append" && await this.#isNewer(now);
      return draft.save({ ...now, ...UNSENT, error: isNewer ? null : encodeError(error) });
    });
    this._notify([edit.key]);
  }

  async #isNewer({ key, idempotencyKey, sent, data }) {
    if (!idempotencyKey || sent === null || data === null) return idempotencyKey !== "" && sent !== data;
    return !same(await this._open(key, sent).catch(() => null), JSON.parse(data));
  }

  async _applyRemote(draft, version) {
    const { key, hash, data } = version, edit = draft.edit(key);
    const rebased = { ...edit, ...UNSENT, base: data, baseHash: hash };
    draft.store(version);
    if (!edit || edit.baseHash === hash) return undefined;
    if (edit.idempotencyKey && edit.sentHash === hash) return this.#settle(draft, edit, version);
    if (edit.data === null && !edit.baseHash && edit.sent === null) return draft.save(rebased);
    if (edit.data === null) return this.#dropDeletion(draft, edit); // an edit wins over a deletion
    await this._checkOptions();
    try {
      const base = await this._open(key, edit.base), theirs = await this._open(key, data);
      const merged = this._merge(draft, key, base, JSON.parse(edit.data), theirs);
      return hash && same(merged, theirs) ? draft.drop(edit) : draft.save({ ...rebased, data: JSON.stringify(merged) });
    } catch (error) {
      return draft.save({ ...edit, ...UNSENT, error: encodeError(error) });
    }
  }

  #dropDeletion(draft, edit) {
    draft.drop(edit);
    this._drop(draft, edit.key, [{ path: [], value: MISSING, local: true }]);
  }

  async #settle(draft, edit, { hash }) {
    if (await this.#isNewer(edit)) draft.save({ ...edit, ...UNSENT, base: edit.sent, baseHash: hash });
    else draft.drop(edit);
  }
}

// --- Replica: inbox ---

const MAX_COMPARED = 500; // documents
const MAX_BATCH_ENTRIES = 100;
const FEED_MOVED = new Error("another tab has moved the feed");
const isUnreadable = (error) => (
  isAny(error, errors.Forbidden, errors.BadRequest, errors.NotFound, errors.MethodNotAllowed));
const inChunks = (items, size) => Array.from(
  { length: Math.ceil(items.length / size) }, (_, at) => items.slice(at * size, (at + 1) * size));

/** The hash of an entry is "" for a removal, null if it is not known. */
const entriesOf = (page, path) => page.changes.map(({ params, hash, removed, timestampMs }) => (
  { key: path.fill(params), params, hash: hash || removed ? hash : null, writtenMs: timestampMs }));

/** After a reset all is compared. What the server does not name is pulled: the caller may just not see it any more. */
class ReceivingCopy extends SendingCopy {
  #feeds = []; #left = []; // ids of those not followed yet

  async _followOnly(collections) {
    this._setPaths(await this._db.setting("paths") ?? {});
    const wanted = new Map(Object.entries(collections).flatMap(([collection, sets]) => [sets].flat().map((set) => {
      const params = Object.fromEntries(Object.entries(set).map(([name, value]) => [name, String(value)]));
      const id = canonicalJson([collection, params]);
      return [id, { id, collection, params, cursor: "" }];
    })));
    const before = IDBKeyRange.upperBound(this._client.nowMs() - REMOVALS_MS);
    const [known, removed] = await this._db.read((stores) => [
      stores("feed").getAllKeys(), stores("document").index("removed").getAllKeys(before)]);
    const dropped = known.filter((id) => !wanted.has(id)), keys = dropped.length ? await this._db.storedKeys("") : [];
    const unwanted = keys.filter((key) => ![...wanted.values()].some((feed) => this.#covers(feed, key)));
    await this._db.update([], (draft) => {
      for (const id of dropped) draft.remove("feed", id);
      for (const [id, feed] of wanted) if (!known.includes(id)) draft.put("feed", feed);
      for (const key of [...unwanted, ...removed]) {
        draft.remove("document", key);
        draft.empty(key);
      }
    });
  }

  async _receive() {
    let denied = null;
    await this.#noteScope(this._client.certificate?.scope);
    this.#feeds = await this._db.all("feed");
    this.#left = this.#feeds.map(({ id }) => id);
    for (let id; (id = this.#left.shift());) {
      const [feed] = await this._db.read((stores) => [stores("feed").get(id)]);
      try {
        if (feed) await this.#follow(feed);
      } catch (error) {
        if (error !== FEED_MOVED && !isUnreadable(error)) throw error;
        if (error === FEED_MOVED) this.#left.push(id);
        else await this.#beginAnew([feed], denied = error);
      }
    }
    return denied;
  }

  #beginAnew(feeds) {
    return this._db.update([], (draft) => feeds.forEach((feed) => draft.put("feed", { ...feed, cursor: "" })));
  }

  async #noteScope(scope) {
    const value = scope && canonicalJson([[...scope.ops].sort(), scope.collections, scope.paths ?? []]);
    const known = await this._db.setting("scope");
    if (!scope || value === known) return;
    if (known) await this.#beginAnew(await this._db.all("feed"));
    await this._db.update([], (draft) => draft.set("scope", value));
  }

  async #follow(feed) {
    const { collection } = feed;
    if (!this._paths[collection]) {
      const { [collection]: path } = await this._client.keyTemplates([collection]);
      if (!path) throw new errors.UnknownCollection();
      // Other paths in the answer, or a changed one, could take keys from a collection that is sealed.
      const paths = { [collection]: path, ...await this._db.setting("paths") };
      await this._db.update([], (draft) => draft.set("paths", paths));
      this._setPaths(paths);
    }
    const isFirst = !feed.cursor, beginsAnew = isFirst && (await this.#storedKeys(feed)).length > 0;
    for await (const page of this.#pages(feed, feed.cursor || null)) {
      const { cursor, isReset } = page;
      if (isReset || beginsAnew) return this.#compare(feed, page);
      await this.#apply(feed, entriesOf(page, this._paths[collection]), { cursor, isFirst });
      feed = { ...feed, cursor };
    }
    return undefined;
  }
  #pages({ collection, params }, since) {
    return this._client.changePages(since, [collection], { [collection]: params });
  }

  async #compare(feed, { isReset, cursor, restoredMs }) {
    if (!isReset) ({ cursor } = await this._client.changes("now", [feed.collection]));
    const seen = new Set();
    for await (const entries of this.#survey(feed, isReset && restoredMs === undefined)) {
      for (const { key } of entries) seen.add(key);
      await this.#apply(feed, entries, { restoredMs });
    }
    const rest = (await this.#storedKeys(feed)).filter((key) => !seen.has(key));
    for (const keys of inChunks(rest, MAX_COMPARED)) {
      const path = this._paths[feed.collection], entry = { hash: null, writtenMs: 0 };
      await this.#apply(feed, keys.map((key) => ({ key, params: path.paramsOf(key), ...entry })), { restoredMs });
    }
    await this.#apply(feed, [], { cursor });
  }

  /** Only the feed has times. */
  async *#survey(feed, prefersList) {
    const ways = [() => this.#fromList(feed), () => this.#fromFeed(feed)];
    for (const way of prefersList ? ways : ways.reverse()) {
      try {
        return yield* way();
      } catch (error) {
        if (!isUnreadable(error)) throw error;
      }
    }
    return undefined;
  }
  async *#fromFeed(feed) {
    for await (const page of this.#pages(feed)) {
      if (page.isReset) throw new errors.NotFound();
      yield entriesOf(page, this._paths[feed.collection]);
    }
  }
  async *#fromList({ collection, params }) {
    const path = this._paths[collection], last = path.params.at(-1);
    const open = path.params.filter((name) => !(name in params));
    if (!path.endsInParam || open.join() !== last) throw new errors.NotFound();
    let entries = [];
    for await (const [name, hash] of this.#names(new KeyTemplate(path.segments.slice(0, -1).join("/")).fill(params))) {
      const all = { ...params, [last]: name };
      if (entries.push({ key: path.fill(all), params: all, hash, writtenMs: 0 }) < MAX_COMPARED) continue;
      yield entries;
      entries = [];
    }
    yield entries;
  }
  async *#names(prefix) {
    try {
      yield* this._client.listHashes(prefix);
    } catch (error) {
      if (!isAny(error, errors.HashesNotAvailable)) throw error;
      for await (const name of this._client.list(prefix)) yield [name, null];
    }
  }

  /** Without a cursor the entries are compared. */
  async #apply(feed, entries, { cursor, restoredMs, isFirst = false }) {
    const keys = entries.map(({ key }) => key), compares = cursor === undefined;
    const { versions } = await this._db.draft(isFirst ? [] : keys);
    const digits = (hash = "") => hash.slice(0, HASH_DIGITS), knows = (key) => digits(versions.get(key)?.hash);
    const news = entries.filter(({ key, hash }) => hash === null || digits(hash) !== knows(key));
    const batches = inChunks(news.filter(({ hash }) => hash !== ""), MAX_BATCH_ENTRIES);
    const fetched = (await inParallel(batches, (batch) => this.#fetch(feed, batch, versions, compares))).flat();
    const removals = news.filter(({ hash }) => hash === "");
    fetched.push(...removals.map(({ key, ...entry }) => ({ version: remoteVersion(key, "", entry) })));
    const isStored = await this._db.update(keys, async (draft) => {
      for (const { version, elements: added = [], isGap = false, isDated = true } of fetched) {
        const { key } = version, mine = versions.get(key);
        const isEarlier = restoredMs !== undefined && mine?.writtenMs > restoredMs
          && (!version.hash || !isDated || version.writtenMs <= restoredMs);
        if (!isEarlier || !await this.#sendBack(draft, mine, version, isDated)) await this._applyRemote(draft, version);
        if (isGap) draft.empty(key);
        if (added.length) draft.addElements(key, added);
      }
      if (!compares) draft.put("feed", { ...feed, cursor });
      for (const key of keys) this.#beginSpace(draft, key, compares ? versions.get(key)?.data : null);
      return true;
    }, { feed, versions: [...versions.values()] });
    if (!isStored) throw FEED_MOVED;
    this._notify(fetched.map(({ version }) => version.key));
  }

  /** With new elements of logs: all, if there `isGap`. The time of a pull is not `isDated`. */
  async #fetch(feed, entries, versions, compares) {
    const known = entries.map(({ key }) => versions.get(key)?.hash), params = entries.map((entry) => entry.params);
    const found = await this._client.batchPull(feed.collection, params, { known }).catch(async (error) => {
      if (!isAny(error, errors.BadRequest, errors.UriTooLong)) throw error;
      return entries.length > 1 ? null : [await this.#pull(entries[0])];
    });
    if (!found) { // too many, or one that no batch may have
      const halves = inChunks(entries, Math.ceil(entries.length / 2));
      return (await inParallel(halves, (half) => this.#fetch(feed, half, versions, compares))).flat();
    }
    return (await inParallel(found, (each, at) => (
      this.#received(entries[at], each, versions.get(entries[at].key), compares)))).flat();
  }
  async #received(entry, found, known, compares) {
    const { key, hash, writtenMs } = entry;
    if (isAny(found, errors.PullBoundRequired)) {
      return this.#fetchLog(entry, known, compares).catch((error) => {
        if (isUnreadable(error)) return [];
        throw error;
      });
    }
    if (isAny(found, errors.NotFound)) {
      const pulled = hash === null ? await this.#pull(entry) : { hash, timestampMs: writtenMs };
      if (!pulled || isAny(pulled, PysyncError)) return [];
      return [{ version: remoteVersion(key, pulled.hash, { writtenMs: pulled.timestampMs }) }];
    }
    if (isRetryable(found) && !isAny(found, errors.DocumentCorrupt)) throw found;
    if (!found || found.unchanged || isAny(found, PysyncError)) return [];
    return [{ version: pulledVersion(key, found, writtenMs || undefined), isDated: writtenMs > 0 }];
  }

  #pull({ key }) { // a TypeError says that a file is there
    return this._client.pull(key).catch((error) => {
      if (isAny(error, TypeError, PysyncError)) return isAny(error, TypeError) ? null : error;
      throw error;
    });
  }

  async #fetchLog({ key, hash, writtenMs }, known, compares) {
    const since = known?.checkpointMs ?? null, found = [];
    let isGap = compares || since === null;
    hash ??= (await this._client.pull(key, { last: 0 })).hash;
    if (!hash) return [{ version: remoteVersion(key, "", { writtenMs: this._client.nowMs() }) }];
    try {
      if (!isGap) for await (const each of elementsAfter(this._client, key, since)) {
        found.splice(0, found.push(each) - TAIL_ELEMENTS);
      }
    } catch (error) {
      if (!isAny(error, errors.CheckpointTooOld, errors.FullNotAllowed)) throw error;
      isGap = true;
    }
    if (isGap) found.splice(0, found.length, ...elements(await this._client.pull(key, { last: TAIL_ELEMENTS })));
    const checkpointMs = found.at(-1)?.tsMs ?? (isGap ? null : since);
    return [{ version: remoteVersion(key, hash, { writtenMs, checkpointMs }), elements: found, isGap }];
  }

  async #sendBack(draft, mine, theirs, isDated) {
    const { key, writtenMs } = mine, { hash } = theirs;
    const plain = mine.data === null ? null : await this._open(key, mine.data).catch(() => undefined);
    // Logs, files, and what no cipher opens stay here.
    if (plain === undefined || (mine.hash && !plain)) return false;
    const members = { data: plain && JSON.stringify(plain), writtenMs };
    const edit = draft.edit(key) ?? newEdit(key, plain ? "put" : "delete", members);
    const conflict = new errors.Conflict("", { extras: { currentHash: hash } });
    const error = hash && !isDated ? encodeError(conflict) : null;
    draft.store(theirs);
    if (edit.data !== null || hash) draft.save({ ...edit, ...UNSENT, base: theirs.data, baseHash: hash, error });
    return true;
  }

  #beginSpace(draft, key, earlier = null) {
    const collection = this._collectionOf(key), path = this._paths[collection];
    if (!path || path.endsInParam || !path.params.length) return;
    const had = this.#roles(earlier), has = this.#roles(draft.versions.get(key)?.data ?? null);
    if (has.every((role) => had.includes(role))) return;
    const space = Object.entries(path.paramsOf(key));
    const isOfSpace = (feed) => feed.collection !== collection && space.every(([name, value]) => (
      this._paths[feed.collection]?.params.includes(name) && (feed.params[name] ?? value) === value));
    for (const feed of this.#feeds.filter(isOfSpace)) {
      draft.put("feed", { ...feed, cursor: "" });
      this.#left = [...this.#left.filter((id) => id !== feed.id), feed.id];
    }
  }

  #roles(text) {
    const { owner, members } = text?.includes('"owner"') ? JSON.parse(text) : {}, { identity } = this._client;
    if (identity && owner === identity) return ["owner", "member"];
    return Array.isArray(members) && members.includes(identity) ? ["member"] : [];
  }

  #covers({ collection, params }, key) {
    if (this._collectionOf(key) !== collection) return false;
    const values = this._paths[collection].paramsOf(key);
    return Object.entries(params).every(([name, value]) => values[name] === value);
  }

  async #storedKeys(feed) {
    const path = this._paths[feed.collection], open = Object.fromEntries(path.params.map((name) => [name, "\0"]));
    const [prefix] = path.fill({ ...open, ...feed.params }).split("\0");
    return (await this._db.storedKeys(prefix)).filter((key) => this.#covers(feed, key));
  }
}

// --- Replica: synchronisation, tabs ---

/** All tabs edit the database. The one with the Web Lock leads, and syncs; without Web Locks every tab does. */
export class Replica extends ReceivingCopy {
  #name; #collections; #options; #channel;
  #closing = new AbortController();
  #leads = false; #isLive = false; #hasNews = true;
  #status = { online: false, behind: true, error: null };
  #changed = new Signal(); #asked = new Signal();
  #calls = new Map(); #asks = new Set(); // of `synced` here, and in all tabs

  constructor(name, client, collections, options, db) {
    super(client, db, options);
    const { sealing = null } = options, isOf = (collection) => sealing[collection] !== null;
    const sealed = isByCollection(sealing) ? Object.keys(sealing).filter(isOf) : sealing !== null;
    [this.#name, this.#collections] = [replicaName(name), collections];
    this.#options = canonicalJson([collections, sealed]);
    this.#channel = new BroadcastChannel(this.#name);
    this.#channel.onmessage = ({ data }) => this.#hear(data);
  }

  static async open(name, client, collections, options = {}) {
    let replica;
    const owner = `${client.address} ${client.identity}`.trimEnd();
    subtle();
    const db = await ReplicaDatabase.open(name, owner, () => replica?.#end());
    replica = new Replica(name, client, collections, options, db);
    await replica.#begin().catch((error) => { throw (replica.close(), error); });
    return replica;
  }
  static async destroy(name) {
    await requested(indexedDB.deleteDatabase(replicaName(name))).catch((error) => { throw storageError(error); });
  }
  async close() {
    this._db.close(new ReplicaError("the replica is closed"));
    this.#end();
  }

  async #begin() {
    await this._followOnly(this.#collections);
    const isNew = !await this._db.setting("options");
    await this._db.update([], (draft) => draft.set("options", this.#options));
    if (isNew) navigator.storage?.persist?.().catch(() => {});
    globalThis.addEventListener("online", this.#wake);
    this.#post({ ask: [] });
    this.#lead();
  }
  #end() {
    if (this._isClosed) return;
    this._isClosed = true;
    Object.assign(this.#status, { online: false, error: this._db.lost });
    this.#closing.abort();
    globalThis.removeEventListener("online", this.#wake);
    this.#channel.close();
    this.#wake();
    super._notify([]); // ends the iterators
    this.#answer([...this.#calls.keys()], this._db.lost);
  }

  async file(key) {
    const at = documentKey(key);
    const [version, kept] = await this._db.read((stores) => [stores("document").get(at), stores("file").get(at)]);
    if (kept && kept.hash === version?.hash) return kept.blob;
    const found = await this._client.pullBlob(at);
    if (!found) return null;
    const { hash, blob } = found, { writtenMs = 0 } = version ?? {};
    await this._db.update([at], (draft) => {
      if (draft.versions.get(at)?.hash !== version?.hash) return;
      draft.store(remoteVersion(at, hash, { writtenMs }));
      draft.put("file", { key: at, hash, blob });
    });
    return blob;
  }

  async status() {
    const edits = await this._db.all("edit").catch(() => []);
    const failure = await this._checkOptions().catch((error) => error);
    const rejected = edits.filter(({ error }) => error !== null).map(({ id, key, kind, error, data }) => (
      { id, key, kind, error: decodeError(error), data: JSON.parse(data) }));
    const unsent = edits.length - rejected.length, error = failure ?? this.#status.error;
    return { ...this.#status, error, unsent, rejected, leader: this.#leads };
  }

  synced() {
    return new Promise((resolve, reject) => {
      if (this._isClosed) reject(this._db.lost);
      this.#calls.set(randomKey(), (error) => (error ? reject(error) : resolve()));
      this.#ask();
    });
  }
  #ask() {
    const ask = [...this.#calls.keys()];
    if (!ask.length) return;
    this.#hear({ ask });
    this.#post({ ask });
    this.#wake();
  }
  #answer(ids, error) {
    for (const id of ids) {
      this.#calls.get(id)?.(error);
      this.#calls.delete(id);
      this.#asks.delete(id);
    }
  }
  #wake = () => (this.#changed.set(), this.#asked.set());

  _notify(keys) {
    super._notify(keys);
    if (keys.length) this.#post({ changed: keys });
  }
  _edited(key) {
    super._edited(key);
    this.#changed.set();
  }
  #post(message) {
    if (!this._isClosed) this.#channel.postMessage(message);
  }
  #tell(members) {
    Object.assign(this.#status, members);
    this.#post({ status: { ...this.#status, error: encodeError(this.#status.error) } });
  }
  #hear({ changed = [], ask, asked = [], error, leads, status }) {
    super._notify(changed);
    if (changed.length) this.#changed.set();
    for (const id of ask ?? []) this.#asks.add(id);
    if (ask && this.#leads) {
      this.#wake();
      this.#tell();
    }
    this.#answer(asked, error && decodeError(error));
    if (leads) this.#ask();
    if (status && !this.#leads) this.#status = { ...status, error: status.error && decodeError(status.error) };
  }

  async #lead() {
    const { signal } = this.#closing, closed = new Promise((resolve) => { signal.onabort = resolve; });
    const sync = () => Promise.race([this.#sync(), closed]), locks = navigator.locks;
    while (!this._isClosed) {
      const leading = locks ? locks.request(this.#name, { signal }, sync) : sync();
      const certificate = await leading.catch((error) => { if (!this._isClosed) throw error; });
      while (!this._isClosed && !this.#asked.isSet && certificate === this._client.certificate) {
        await this.#asked.wait(1000 * this._client.backoff.maxS);
      }
    }
  }

  async #sync() {
    const leaving = new AbortController();
    let failures = 0, listening = null, certificate;
    [this.#leads, this.#hasNews] = [true, true];
    this.#post({ leads: true });
    this.#ask();
    while (!this._isClosed) {
      const asked = [...this.#asks];
      ({ certificate } = this._client);
      this.#changed.isSet = this.#asked.isSet = false;
      const error = await this.#round(asked.length > 0);
      this.#answer(asked, error);
      if (isAny(error, ReplicaError)) break; // other tabs ask the next leader
      this.#post({ asked, error: encodeError(error) });
      if (isAny(error, errors.Unauthorized)) break;
      failures = error ? failures + 1 : 0;
      if (error) {
        await this.#asked.wait(1000 * waitS(this._client.backoff, failures, error.retryAfterS, false));
      } else {
        listening ??= this.#listen(leaving.signal).finally(() => { listening = null; });
        await this.#changed.wait(this.#isLive ? 0 : RESUBSCRIBE_MS);
        this.#hasNews ||= !this.#isLive;
      }
    }
    this.#leads = false;
    leaving.abort();
    return certificate;
  }

  async #round(mustReceive) {
    try {
      await this._checkOptions();
      if (this.#hasNews || mustReceive) {
        this.#hasNews = false;
        this.#tell({ behind: true });
        this.#status.error = await this._receive();
      }
      await this._send();
      this.#tell({ online: true, behind: this.#hasNews });
      return null;
    } catch (error) {
      this.#hasNews = true;
      if (isAny(error, PysyncError, Unreachable)) this.#status.online = isAny(error, PysyncError);
      this.#tell({ behind: true, error });
      return error;
    }
  }

  /** An older page may not know what is to be sealed. */
  async _checkOptions() {
    if (await this._db.setting("options") === this.#options) return;
    throw new ReplicaError("another tab follows other collections, or seals others: load this page again");
  }

  async #listen(signal) {
    const names = Object.keys(this.#collections), narrow = {};
    for (const name of names) {
      const [set, ...more] = [this.#collections[name]].flat();
      if (set && !more.length) narrow[name] = set;
    }
    const fallBehind = (isLive) => {
      [this.#hasNews, this.#isLive, this.#status.behind] = [true, isLive, true];
      this.#changed.set();
    };
    const options = { signal, onConnect: () => fallBehind(true), onDisconnect: () => fallBehind(false) };
    try {
      for await (const { reset, collection, params, hash } of this._client.watch(names, narrow, options)) {
        const key = this._paths[collection]?.fill(params) ?? "", { versions } = await this._db.draft([key]);
        if (reset || versions.get(key)?.hash !== hash) fallBehind(true);
      }
    } catch (error) {
      if (!isAny(error, PysyncError, Unreachable, StorageError, ReplicaError)) throw error;
    } finally {
      this.#isLive = false;
    }
  }
}
