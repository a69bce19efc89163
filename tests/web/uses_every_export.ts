// Uses every export of pysync.d.ts. tests/web/test_types.py compiles it and runs nothing of it.
import {
  canonicalJson,
  type Certificate,
  type ChangeEvent,
  type ChangesPage,
  type Cipher,
  Client,
  type ClientOptions,
  documentHash,
  type DocumentRules,
  type DocumentVersion,
  type Dropped,
  elements,
  errors,
  type FileContent,
  type Grant,
  IdentityKeys,
  issueAudienceCertificate,
  issueDeviceCertificate,
  issueMemberCertificate,
  type IssueOptions,
  issueRevocationList,
  type Json,
  type JsonObject,
  Keyring,
  localWins,
  type LogElement,
  type MergeConflict,
  type MergePath,
  mergeRemoteWins,
  MISSING,
  type OnConflict,
  openEnvelope,
  type ParamSet,
  parseCertificate,
  parsePublicLink,
  publicLink,
  pullAndOpenBlob,
  type PullOptions,
  type PullResult,
  type PushResult,
  PysyncError,
  type RejectedEdit,
  RemoteKeyring,
  Replica,
  ReplicaError,
  type ReplicaOptions,
  type Reset,
  type RetryPolicy,
  sealAndPushBlob,
  SealedError,
  sealEnvelope,
  type Signer,
  type Status,
  StorageError,
  SyncDocument,
  ThreeWayMerge,
  UnknownBase,
  UnlockedKeyring,
  Unreachable,
  UnsupportedBrowser,
  userId,
  VERSION,
  type WatchOptions,
  type WriteOptions,
} from "../../pysync/web/pysync.js";

/** Keys, certificates and links. */
export async function people(owner: IdentityKeys, friend: Signer): Promise<string> {
  const grant: Grant = { ops: ["read", "write"], paths: [`notebooks/${owner.userId}/list`] };
  const until: IssueOptions = { grant, expiresAtS: Date.now() / 1000 + 3600 };
  const device = await issueDeviceCertificate(owner, friend, { ...until, collections: ["*"] });
  const member: Certificate = await issueMemberCertificate(owner, friend, "notebooks", until);
  const link = await issueAudienceCertificate(owner, "notebooks", { ...until, aud: [friend.edPub] });
  const list: JsonObject = await issueRevocationList(owner, 1, {
    certificates: [device, await parseCertificate(JSON.stringify(member))],
    subjects: [{ sub: friend.edPub, exp: 0 }],
  });
  const opened = await parsePublicLink(publicLink(link));
  return `${await userId(opened.iss)} ${list["generation"]} ${await friend.sign(new Uint8Array(1))}`;
}

/** Reads, writes, changes. */
export async function documents(base: URL, keys: IdentityKeys, signal: AbortSignal): Promise<Json> {
  const backoff: Partial<RetryPolicy> = { attempts: 3 };
  const options: ClientOptions = { keys, timeoutS: 10, backoff };
  const client = new Client(base, options);
  const written: WriteOptions = { idempotencyKey: crypto.randomUUID() };
  const pushed: PushResult = await client.push("notes/a", { text: "hello" }, null, written);
  await client.append("journal/a", { text: "one" });
  const bounds: PullOptions = { last: 1 };
  const log: PullResult = await client.pull("journal/a", bounds);
  const newest: LogElement | undefined = elements(log)[0];
  const versions: DocumentVersion[] = await client.history("notes/a");
  const sets: ParamSet[] = [{ id: "a" }];
  const found = await client.batchPull("notes", sets, { known: [pushed.hash] });
  const refused = found.filter((entry) => entry instanceof PysyncError);
  for await (const [name, hash] of client.listHashes("notes")) console.log(name, hash);
  await client.pushBlob("photos/a", new Blob(["…"]), "image/png");
  const photo: FileContent | null = await client.pullBlob("photos/a");
  const page: ChangesPage = await client.changes("now");
  await client.request("POST", "/push/notes/b", { data: await client.request("GET", "/config"), baseHash: null });
  const resumed: WatchOptions = { after: page.cursor, signal };
  for await (const change of client.watch(["notes"], { notes: { id: "a" } }, resumed)) {
    const event: ChangeEvent | Reset = change;
    if (!("reset" in event)) return [event.hash, event.timestampMs];
  }
  return [canonicalJson({ b: 1, a: photo?.hash ?? null }), await documentHash({}), newest?.tsMs ?? 0, versions.length,
    refused.length];
}

/** What each error means. */
export function explain(error: unknown): string {
  if (error instanceof errors.Conflict) return error.currentHash;
  if (error instanceof errors["Forbidden"]!) return error.code;
  if (error instanceof PysyncError) return `${error.status} ${error.retryAfterS} ${error.extras}`;
  if (error instanceof StorageError) return error.code;
  if (error instanceof UnknownBase) return error.currentHash;
  const kinds = [Unreachable, UnsupportedBrowser, ReplicaError, SealedError];
  return kinds.find((kind) => error instanceof kind)?.name ?? VERSION;
}

/** Merges, and one document that is live. */
export async function merged(client: Client, sealing: Cipher): Promise<JsonObject> {
  const path: MergePath = ["lines", 0];
  const onConflict: OnConflict = (conflict: MergeConflict) =>
    conflict.remote === MISSING ? localWins(conflict) : conflict.remote;
  const merge = new ThreeWayMerge(onConflict, "id");
  const result = merge.merge({}, { n: 1 }, { n: 2 });
  const dropped: Dropped[] = merge.dropped({}, { n: 1 }, { n: 2 }, result);
  const rules: DocumentRules = { onConflict, sealing, resolve: mergeRemoteWins };
  const document = new SyncDocument(client, "notes/a", { ...rules, retries: 3 });
  await document.update((data) => ({ ...data, dropped: dropped.length, depth: path.length }));
  document.restore(document.dump());
  for await (const data of document.follow()) return data;
  return document.data;
}

/** Data that the server cannot read. */
export async function sealed(client: Client, keys: IdentityKeys, friend: string): Promise<Uint8Array | null> {
  const local = await (await Keyring.create(keys, [friend])).open(keys, [keys.edPub]);
  const ring = new RemoteKeyring(client, "vault", keys, [keys.edPub]);
  const unlocked: UnlockedKeyring = await ring.add(friend);
  await sealAndPushBlob(client, unlocked, "photos/a", await local.sealBytes(new Uint8Array(8)));
  const envelope = await sealEnvelope(new Uint8Array(8), friend, keys);
  const { plaintext, sealedBy } = await openEnvelope(envelope, keys, { sealer: keys.edPub });
  return sealedBy === "" ? plaintext : pullAndOpenBlob(client, unlocked, "photos/a");
}

/** A copy that works offline. */
export async function offline(client: Client): Promise<RejectedEdit[]> {
  const options: ReplicaOptions = { onConflict: { notes: localWins }, idMember: "id" };
  const replica = await Replica.open("app", client, { notes: {}, journal: [{ id: "a" }] }, options);
  await replica.put("notes/a", { text: "offline" });
  await replica.append("journal/a", { text: "two" });
  for await (const key of replica.changes()) {
    if ((await replica.get(key)) !== null) break;
  }
  const status: Status = await replica.status();
  await replica.synced();
  await replica.close();
  await Replica.destroy("app");
  return status.rejected;
}
