/** Browser client of pysync: one ES module without dependencies (docs/reference/browser-client.md). */

// --- Errors ---------------------------------------------------------------------------------------------------------


// --- Keys and certificates ------------------------------------------------------------------------------------------


// --- Values ---------------------------------------------------------------------------------------------------------


// --- Client ---------------------------------------------------------------------------------------------------------


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
export class ThreeWayMerge {
  constructor(onConflict?: OnConflict, idMember?: string);
  merge(base: JsonObject, local: JsonObject, remote: JsonObject): JsonObject;
  dropped(base: JsonObject, local: JsonObject, remote: JsonObject, merged: JsonObject): Dropped[];
}

// --- Sealed data ----------------------------------------------------------------------------------------------------


// --- Replica --------------------------------------------------------------------------------------------------------

