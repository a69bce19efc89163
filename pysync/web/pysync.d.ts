/** Browser client of pysync: one ES module without dependencies (docs/reference/browser-client.md). */

export type Json = null | boolean | number | string | Json[] | JsonObject;
export type JsonObject = { [name: string]: any };
/** Values of path parameters. */
export type ParamSet = { [name: string]: string | number };

/** The version of pysync that this module belongs to. */
export const VERSION: string;

// --- Errors ---------------------------------------------------------------------------------------------------------

/** An error that the server answered with. `name` is its class in `pysync.errors`, such as `Conflict`; `code` and
 * `status` are those of docs/reference/errors.md. `extras` are further members of the answer. */
export class PysyncError extends Error {
  static readonly status: number;
  static readonly code: string;
  readonly status: number;
  readonly code: string;
  readonly extras: JsonObject;
  /** Seconds to wait that the server asks for; 0 if it does not say. */
  readonly retryAfterS: number;
}
/** The classes of `pysync.errors` by their names: `error instanceof errors.Conflict`. Each code of the server has one.
 * `errors.Conflict` has `currentHash`. */
export const errors: { readonly [name: string]: typeof PysyncError } & { readonly Conflict: typeof Conflict };
declare class Conflict extends PysyncError { readonly currentHash: string; }
/** There was no answer, or none of this protocol. A push that ends so may have been applied. */
export class Unreachable extends Error {}
/** This browser lacks something that the module needs (Ed25519 in WebCrypto, IndexedDB, a secure context). */
export class UnsupportedBrowser extends Error {}
/** The storage of this browser is full, or it has deleted what was stored: `code` is `full`, `evicted` or `failed`. */
export class StorageError extends Error { readonly code: "full" | "evicted" | "failed"; }
/** A replica that belongs to another caller or server, or that a newer page has opened otherwise. */
export class ReplicaError extends Error {}
/** The document changed on the server, and the version from which the local edit began is unknown. */
export class UnknownBase extends Error { readonly currentHash: string; }
/** Something sealed cannot be opened, or not be sealed. `name` is the class of `pysync.client.sealed`: `NotSealed`,
 * `DecryptionFailed`, `Truncated`, `UnknownEpoch`, `AadRequired`, `UntrustedAdder`, `ForgedEntry`, `KeyringMissing`,
 * `MalformedKeyring`, `KeyringRolledBack`, `NotARecipient`, `AmbiguousEntry`, `AlreadyPresent`, `LastRecipient`. */
export class SealedError extends Error {}

// --- Keys and certificates ------------------------------------------------------------------------------------------

/** A source of signatures. */
export interface Signer {
  /** Ed25519 public key, 64 hex digits. */
  readonly edPub: string;
  /** X25519 public key, 64 hex digits. */
  readonly kemPub: string;
  readonly userId: string;
  /** Returns the Ed25519 signature over the bytes, in base64. */
  sign(message: Uint8Array): Promise<string>;
}
/** An Ed25519 pair, which signs, and an X25519 pair, to which others seal. The private keys cannot be extracted. */
export class IdentityKeys implements Signer {
  private constructor();
  /** The keys that this browser keeps under a name in IndexedDB; made when they are first asked for. */
  static open(name?: string): Promise<IdentityKeys>;
  /** Deletes the keys that this browser keeps under a name. Nothing brings them back. */
  static forget(name?: string): Promise<void>;
  /** New keys, which nobody keeps. */
  static generate(): Promise<IdentityKeys>;
  /** Keys from private halves, each 64 hex digits. */
  static fromPrivate(edPriv: string, kemPriv: string): Promise<IdentityKeys>;
  readonly edPub: string;
  readonly kemPub: string;
  readonly userId: string;
  sign(message: Uint8Array): Promise<string>;
}
/** The user id of a public key. */
export function userId(edPub: string): Promise<string>;

/** A certificate as the protocol has it. */
export interface Certificate {
  readonly kind: "device" | "member" | "audience";
  readonly iss: string; readonly issUserId: string;
  readonly sub?: string; readonly subKem?: string; readonly subUserId?: string; readonly aud?: string[];
  readonly scope: { ops: string[]; collections: string[]; paths?: string[] };
  readonly nbf: number; readonly exp: number; readonly nonce: string; readonly sig: string;
}
export interface Grant { ops: ("read" | "list" | "write")[]; paths: string[]; }
export interface IssueOptions {
  /** Default: read and list the collection (member and audience), or everything (device). */
  grant?: Grant;
  /** Seconds since 1970; default: in 30 days. */
  expiresAtS?: number;
  /** Seconds since 1970; default: the clock of this machine. Pass `client.nowMs() / 1000` where that may be wrong. */
  nowS?: number;
}
/** Lets another key act as the issuer: a further device of the same person. */
export function issueDeviceCertificate(issuer: Signer, to: { edPub: string; kemPub: string },
  options?: IssueOptions & { collections?: string[] }): Promise<Certificate>;
/** Lets another person into a collection. */
export function issueMemberCertificate(issuer: Signer, to: { edPub: string; kemPub: string }, collection: string,
  options?: IssueOptions): Promise<Certificate>;
/** Lets the keys of `aud`, or anybody who has the certificate, into a collection. */
export function issueAudienceCertificate(issuer: Signer, collection: string,
  options?: IssueOptions & { aud?: string[] }): Promise<Certificate>;
/** The certificate in a text that its issuer has signed. Throws TypeError for anything else. It may have expired, or be
 * revoked, and anybody can be its issuer: compare `issUserId`. */
export function parseCertificate(text: string): Promise<Certificate>;
/** The URL fragment that shares an audience certificate; and what `parsePublicLink` makes of it again. */
export function publicLink(certificate: Certificate): string;
export function parsePublicLink(fragment: string): Promise<Certificate>;
/** A list that revokes certificates and whole keys (`subjects`) of the issuer; `client.revoke` publishes it. */
export function issueRevocationList(issuer: Signer, generation: number, revoked: {
  certificates?: Certificate[]; subjects?: { sub: string; exp: number }[]; earlier?: JsonObject }): Promise<JsonObject>;

// --- Values ---------------------------------------------------------------------------------------------------------

/** JSON with sorted members and no white space, over which hashes and signatures are made. */
export function canonicalJson(value: Json): string;
/** The hash that the server gives a document. */
export function documentHash(data: JsonObject): Promise<string>;

export interface LogElement {
  /** Time in ms; greater than those of all elements before it. */
  tsMs: number;
  data: JsonObject;
  authorPubkey?: string;
  authorSignature?: string;
}
/** A document as the server stores it: `hash` is `""` and `data` empty if nothing is stored. */
export interface PullResult {
  data: JsonObject; hash: string; timestampMs: number;
  authorPubkey?: string; authorSignature?: string;
  keyring?: PullResult;
  /** True if the server left out elements of a log. */
  hasMore: boolean;
  /** True for an entry of a batch that is still the `known` version, and has no data. */
  unchanged: boolean;
}
export interface PushResult { hash: string; timestampMs: number; }
export interface DocumentVersion {
  hash: string; timestampMs: number; size: number; replacedMs?: number; identity?: string; authorPubkey?: string;
}
/** The elements of a pulled log. `field` is the name of the array that holds them; default: the only one. */
export function elements(pulled: PullResult, field?: string): LogElement[];
export interface ChangeEvent {
  collection: string; params: ParamSet; hash: string; timestampMs: number; namespace?: string; removed: boolean;
  /** Its position in the stream; `""` in a page of changes. */
  id: string;
}
/** Changes are left out: compare everything with the server. */
export interface Reset { reset: true; id: string; }
export interface ChangesPage {
  changes: ChangeEvent[]; cursor: string; hasMore: boolean; isReset: boolean;
  /** The time of the backup, if the server was restored from one with `--accept-newer`. */
  restoredMs?: number;
}
export interface FileContent { blob: Blob; contentType: string; hash: string; }

// --- Client ---------------------------------------------------------------------------------------------------------

export interface RetryPolicy {
  /** Number of attempts, and the waits between them in seconds, doubling up to `maxS`. */
  attempts: number; initialS: number; maxS: number;
}
export interface ClientOptions {
  /** Keys that sign every request; without them the client is anonymous. */
  keys?: Signer;
  /** A certificate that somebody issued; default: the keys issue one for themselves, and renew it. */
  certificate?: Certificate;
  namespace?: string;
  /** Limit of one attempt; for files and streams the limit between two chunks. Default 30. */
  timeoutS?: number;
  backoff?: Partial<RetryPolicy>;
  /** Default: `globalThis.fetch`. */
  fetch?: typeof fetch;
}
export interface PullOptions {
  withKeyring?: boolean; version?: string;
  /** Bounds of a log: elements after this time, the newest of them, all of them. */
  since?: number; last?: number; full?: boolean;
}
export interface WriteOptions { idempotencyKey?: string; signAuthor?: boolean; }
export interface WatchOptions {
  /** The id after which to resume. */
  after?: string;
  /** Seconds of silence after which the connection is made anew. Default 15. */
  idleS?: number;
  signal?: AbortSignal;
  onConnect?: () => void;
  onDisconnect?: (error: Error) => void;
}
/** The calls of the protocol, for one caller of one server. Each attempt is signed afresh; reads, pushes and appends are
 * repeated when the connection fails and after 429 and 503. */
export class Client {
  /** `baseUrl` is the URL at which `/pull` and `/push` begin, also relative to the page. */
  constructor(baseUrl: string | URL, options?: ClientOptions);
  /** The URL with the namespace. */
  readonly address: string;
  /** The user id as which the server knows the caller; `""` for an anonymous one. */
  readonly identity: string;
  /** The public key that signs; null without keys. */
  readonly author: string | null;
  readonly backoff: RetryPolicy;
  /** The certificate of the next request. Set another one when it has expired. Null until a client makes its own. */
  get certificate(): Certificate | null;
  set certificate(certificate: Certificate);
  /** The time of the server in ms, as far as its answers have told. */
  nowMs(): number;

  pull(key: string, options?: PullOptions): Promise<PullResult>;
  /** Replaces the document if its hash is still `baseHash`; creates it for null. Throws `Conflict`. `writtenMs` is the
   * time at which this version was first written: throws `Erased` if it was erased later. */
  push(key: string, data: JsonObject, baseHash?: string | null,
    options?: WriteOptions & { writtenMs?: number }): Promise<PushResult>;
  delete(key: string, baseHash: string, options?: { idempotencyKey?: string }): Promise<PushResult>;
  /** Appends to a log. `signAuthor` defaults to true with keys. */
  append(key: string, data: JsonObject, options?: WriteOptions & { tsMs?: number }): Promise<PushResult>;
  /** The versions of a document that the server keeps, the newest first. */
  history(key: string): Promise<DocumentVersion[]>;
  /** Documents of one collection with one request: for each of `params` the document, or the error that a pull would
   * throw. Those whose hash is the one in `known` are `unchanged`. */
  batchPull(collection: string, params: ParamSet[], options?: {
    known?: (string | null | undefined)[]; append?: ({ since?: number; last?: number } | null)[];
  }): Promise<(PullResult | PysyncError)[]>;
  /** The values of the last path parameter below `prefix`, page by page. */
  list(prefix?: string, options?: { after?: string; pageSize?: number }): AsyncGenerator<string>;
  /** The same with the first 16 digits of the hash of each; null where the server does not know it. */
  listHashes(prefix?: string, options?: { after?: string; pageSize?: number }): AsyncGenerator<[string, string | null]>;
  pushBlob(key: string, source: Blob | BufferSource, contentType: string,
    options?: { idempotencyKey?: string }): Promise<PushResult>;
  /** The file; null if nothing is stored. Its bytes are compared with its hash, if the answer has one. The type of the
   * Blob is what the uploader says, also `text/html`. */
  pullBlob(key: string): Promise<FileContent | null>;
  /** What changed after a cursor, each document with its latest change. `"now"` returns the newest cursor alone. */
  changes(since?: string | null, collections?: string[] | null, params?: { [collection: string]: ParamSet },
    limit?: number): Promise<ChangesPage>;
  /** All pages of `changes`, up to the last, which may be a reset. */
  changePages(since?: string | null, collections?: string[] | null, params?: { [collection: string]: ParamSet },
    limit?: number): AsyncGenerator<ChangesPage>;
  /** Writes as they happen, without an end or a gap, over connections that are made anew when they fail. Ends when the
   * `signal` is aborted or the iteration is left. Throws what the server rejects the stream with. */
  watch(collections?: string[] | null, params?: { [collection: string]: ParamSet },
    options?: WatchOptions): AsyncGenerator<ChangeEvent | Reset>;
  /** The storage path of each collection, such as `notes/{identity}/{id}`. */
  keyTemplates(collections: string[]): Promise<{ [collection: string]: string }>;
  /** Publishes a list of `issueRevocationList` and returns its generation. Throws `StaleGeneration` for an old one. */
  revoke(list: JsonObject): Promise<number>;
  /** The list that an issuer (user id) has published; null if there is none. Throws `BadSignature` for a false one. */
  revocations(issuer: string): Promise<JsonObject | null>;
  /** The JSON of any other route, signed and repeated as the calls above: `request("GET", "/config")`. `target` follows
   * `address`, with its query; `body` is sent as JSON. All but a GET have an Idempotency-Key of their own. */
  request(method: string, target: string, body?: JsonObject): Promise<JsonObject>;
}

// --- Merge, SyncDocument --------------------------------------------------------------------------------------------

/** Stands for a member or entry that does not exist. */
export const MISSING: unique symbol;
export type MergePath = (string | number)[];
export interface MergeConflict { path: MergePath; base: any; local: any; remote: any; }
/** An edit that left nothing in a merge. `value` is MISSING for a removal. */
export interface Dropped { path: MergePath; value: any; local: boolean; }
export type OnConflict = (conflict: MergeConflict) => any;
/** An edit wins over a removal, else the local side wins. */
export function localWins(conflict: MergeConflict): any;
/** The merge of other clients of the protocol, which needs no base. */
export function mergeRemoteWins(local: JsonObject, remote: JsonObject): JsonObject;
/** Merges two sides over a common base: objects by members, lists by the ids of their entries. `onConflict` decides what
 * both sides have changed; default: `localWins`. */
export class ThreeWayMerge {
  constructor(onConflict?: OnConflict, idMember?: string);
  merge(base: JsonObject, local: JsonObject, remote: JsonObject): JsonObject;
  dropped(base: JsonObject, local: JsonObject, remote: JsonObject, merged: JsonObject): Dropped[];
}
/** Seals data before it is stored, and opens it: an `UnlockedKeyring`. */
export interface Cipher {
  seal(data: JsonObject): JsonObject | Promise<JsonObject>;
  open(sealed: JsonObject): JsonObject | Promise<JsonObject>;
}
export interface DocumentRules {
  onConflict?: OnConflict; idMember?: string;
  resolve?: (local: JsonObject, remote: JsonObject) => JsonObject;
  sealing?: Cipher;
}
/** A local copy of one document, which you may edit; docs/reference/client.md#syncdocument has the rules. */
export class SyncDocument {
  constructor(client: Client, key: string, options?: DocumentRules & { retries?: number; signAuthor?: boolean });
  readonly key: string;
  data: JsonObject;
  hash: string;
  dropped: Dropped[];
  readonly isEdited: boolean;
  /** Fetches the newest version and merges edits into it. Throws `UnknownBase`. */
  pull(): Promise<JsonObject>;
  /** Stores `data`, merged with what others have stored. */
  push(data?: JsonObject): Promise<PushResult>;
  /** Stores what `change` makes of a copy; called again after a conflict. */
  update(change: (data: JsonObject) => JsonObject | Promise<JsonObject>): Promise<PushResult>;
  /** `data` now and whenever it has changed, without an end. */
  follow(options?: { collection?: string; params?: ParamSet; signal?: AbortSignal;
    onDisconnect?: (error: Error) => void }): AsyncGenerator<JsonObject>;
  /** The state in JSON, with edits, and how to go on from it. */
  dump(): JsonObject;
  restore(state: JsonObject): void;
}

// --- Sealed data ----------------------------------------------------------------------------------------------------

/** A keyring document, without a server. It is immutable: `add` and `remove` return another one. `trusted` are the
 * Ed25519 keys that may add recipients. */
export class Keyring {
  constructor(data: JsonObject);
  static create(adder: IdentityKeys, recipients?: string[], nowS?: number): Promise<Keyring>;
  readonly data: JsonObject;
  readonly epoch: number;
  readonly recipients: string[];
  open(keys: IdentityKeys, trusted: string[], minEpoch?: number): Promise<UnlockedKeyring>;
  add(keys: IdentityKeys, recipient: string, trusted: string[],
    options?: { minEpoch?: number; nowS?: number }): Promise<Keyring>;
  remove(keys: IdentityKeys, recipient: string, trusted: string[],
    options?: { minEpoch?: number; nowS?: number }): Promise<Keyring>;
}
/** The content keys of a keyring. */
export class UnlockedKeyring implements Cipher {
  private constructor();
  readonly epoch: number;
  seal(data: JsonObject): Promise<JsonObject>;
  open(sealed: JsonObject): Promise<JsonObject>;
  sealBytes(plaintext: BufferSource, aad?: string): Promise<Uint8Array<ArrayBuffer>>;
  openBytes(sealed: BufferSource, aad?: string): Promise<Uint8Array<ArrayBuffer>>;
}
/** The keyring `<name>/_keyring` of a server. `trusted` are the Ed25519 keys that may add recipients. */
export class RemoteKeyring {
  constructor(client: Client, name: string, keys: IdentityKeys, trusted: string[], minEpoch?: number);
  minEpoch: number;
  create(recipients?: string[]): Promise<UnlockedKeyring>;
  open(): Promise<UnlockedKeyring>;
  read(): Promise<Keyring>;
  add(recipient: string): Promise<UnlockedKeyring>;
  remove(recipient: string): Promise<UnlockedKeyring>;
}
/** Seals a file and stores it. `aad`, by default the key, is the context without which it does not open. */
export function sealAndPushBlob(client: Client, keyring: UnlockedKeyring, key: string, plaintext: BufferSource,
  aad?: string): Promise<PushResult>;
/** The plaintext of such a file; null if nothing is stored. */
export function pullAndOpenBlob(client: Client, keyring: UnlockedKeyring, key: string,
  aad?: string): Promise<Uint8Array<ArrayBuffer> | null>;
/** Seals for the holder of an X25519 key, without a keyring. */
export function sealEnvelope(plaintext: BufferSource, recipientKem: string, sealer: IdentityKeys,
  aad?: string): Promise<JsonObject>;
/** Opens an envelope, of anybody if no `sealer` is given. `sealedBy` is the Ed25519 key that has sealed it. */
export function openEnvelope(envelope: JsonObject, keys: IdentityKeys, options?: { aad?: string; sealer?: string }):
  Promise<{ plaintext: Uint8Array<ArrayBuffer>; sealedBy: string }>;

// --- Replica --------------------------------------------------------------------------------------------------------

export interface RejectedEdit {
  id: number; key: string; kind: "put" | "delete" | "append"; error: Error; data: JsonObject | null;
}
export interface Status {
  /** The server has answered the last request. */
  online: boolean;
  /** True until everything is received that the server is known to have. */
  behind: boolean;
  /** Number of edits that wait. */
  unsent: number;
  /** Edits that the server rejects for good: `retry` or `discard` them. */
  rejected: RejectedEdit[];
  /** What keeps the replica, or one of its collections, from being in sync; null if nothing does. */
  error: Error | null;
  /** True in the tab that syncs. Without Web Locks every tab does. */
  leader: boolean;
}
type PerCollection<T> = T | { [collection: string]: T };
export interface ReplicaOptions {
  onConflict?: PerCollection<OnConflict>; idMember?: PerCollection<string>;
  resolve?: PerCollection<(local: JsonObject, remote: JsonObject) => JsonObject>;
  /** By collection, it names all of them, with null for those that are not sealed: no edit of another one is sent. */
  sealing?: Cipher | { [collection: string]: Cipher | null };
}
/** A local copy of collections in IndexedDB, in sync with the server whenever that can be reached, in any number of
 * tabs. The rules are those of `pysync.client.Replica` (docs/reference/client.md#replica). */
export class Replica {
  /** Opens the replica with this name, or creates it, also with the server away. Throws ReplicaError if it belongs to
   * another caller or server, and StorageError. `collections` have values of path parameters that narrow each of them. */
  static open(name: string, client: Client, collections: { [collection: string]: ParamSet | ParamSet[] },
    options?: ReplicaOptions): Promise<Replica>;
  /** Deletes the replica with this name, with all edits that wait. */
  static destroy(name: string): Promise<void>;
  /** The newest 1000 edits of which a merge in this tab kept nothing. */
  readonly dropped: { key: string; dropped: Dropped }[];
  get(key: string): Promise<JsonObject | null>;
  /** All documents whose keys begin with `prefix`, in the order of their keys. */
  entries(prefix?: string): Promise<[string, JsonObject][]>;
  keys(prefix?: string): Promise<string[]>;
  tail(key: string, n: number): Promise<LogElement[]>;
  /** The edit is on the disk when the promise is fulfilled. Throws StorageError; then nothing has changed. */
  put(key: string, data: JsonObject): Promise<void>;
  /** Puts what `change` makes of the document, so that no edit of another tab and nothing received comes between; null
   * deletes it. `change` is called with a copy, null if there is none, and again if something came between. */
  update(key: string, change: (data: JsonObject | null) => JsonObject | null | Promise<JsonObject | null>): Promise<void>;
  delete(key: string): Promise<void>;
  append(key: string, data: JsonObject): Promise<void>;
  /** The keys of what changes from now on, in this tab, in others, or on the server, until the replica closes. */
  changes(): AsyncIterableIterator<string>;
  retry(key: string): Promise<void>;
  discard(key: string): Promise<void>;
  /** A copy of the file, which is fetched when it is asked for and kept until it has changed; null if there is none. */
  file(key: string): Promise<Blob | null>;
  status(): Promise<Status>;
  /** Fulfilled when all edits that were made before are sent or rejected, and all that the server had is received.
   * Throws what stops that; the replica goes on trying. */
  synced(): Promise<void>;
  close(): Promise<void>;
}

export {}; // and nothing else of the above
