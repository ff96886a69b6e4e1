// SPDX-License-Identifier: Apache-2.0
// One-scale int8 and fp8 of a tensor, sorted profiles, cluster outliers and the cluster bank, after mixle 0.8.2 (generation
// 2; `compat: 'gen1'` for the numbers of its first), and measures. Methods of KvPages, in a class of their own.
import { viewName } from './binding.js';
import { KvPagesError } from './errors.js';
import { Owned } from './owned.js';
import type { Session } from './owned.js';
import { QuantizedTensor, readContiguous } from './quantized-tensor.js';
import { bytesOf, denseArray, int64Array, requireGiven, requireNumber, requireObject, requireString, wrongType } from './tensor.js';
import type { DenseTensor, TensorLike } from './tensor.js';

/** A tensor of any rank that these functions read: values as they are, f64 too. */
export type ValueTensor = TensorLike | ArrayBufferView | QuantizedTensor;

/** A dense tensor of any rank that these functions return. `data` is a `Float64Array`, a `Float32Array`, or for f16 a
 * `Float16Array` (a `Uint16Array` of bit patterns where there is none). */
export interface FloatTensor {
  readonly type: 'f64' | 'f32' | 'f16';
  readonly dims: readonly number[];
  readonly data: Float64Array | DenseTensor['data'];
}

export interface KvCacheOptions {
  /** `int8` (the default): scale max|x| / 127, or 1 where that is 0; `fp8`: e4m3, scale max(max|x| / 448, 1). */
  readonly mode?: 'int8' | 'fp8';
  /** `gen1`: fp8 has scale 1 and NaN codes beyond 464. int8 is the same in both. */
  readonly compat?: 'gen1' | 'gen2';
}

/** A tensor with one scale, made by `kv.quantizeKvCache`: plain data, to be copied and stored as one likes. */
export interface QuantizedKv {
  readonly mode: 'int8' | 'fp8';
  /** int8: an f32 value; fp8: a float64, used as f32. */
  readonly scale: number;
  /** One per element, in tensor order: `Int8Array`, or for fp8 a `Uint8Array` of e4m3 codes. */
  readonly codes: Int8Array | Uint8Array;
  readonly dims: readonly number[];
}

export interface ProfileOptions {
  /** Largest magnitudes to keep exactly, 0 by default. */
  readonly topK?: number;
  /** Distribution of all other values, `gaussian` by default; `gamma` needs them > 0. */
  readonly family?: 'gaussian' | 'gamma';
  /** A fit with D over it is not taken: the profile then holds the dense values. 0 to 1, 0.05 by default. */
  readonly threshold?: number;
  /** `gen1`: raw moments, absolute floors of the variance, values stored as f32, estimated byteLength, no serialized form. */
  readonly compat?: 'gen1' | 'gen2';
}

/** What the core says of a profile. */
export interface ProfileInfo {
  readonly dims: readonly number[];
  /** Type of the stored and of the restored values. */
  readonly type: 'f64' | 'f32' | 'f16';
  /** Kolmogorov-Smirnov distance between the fit and the values that were fitted, 0 to 1; 1 where fewer than 2 were left. */
  readonly d: number;
  /** Whether the dense values are held in place of a fit. */
  readonly fallback: boolean;
  readonly headCount: number;
  readonly tailCount: number;
  /** Bytes of an index. */
  readonly indexBytes: 1 | 2 | 4;
  readonly family?: 'gaussian' | 'gamma';
  /** Gaussian: mean. */
  readonly mu?: number;
  /** Gaussian: variance. */
  readonly sigma2?: number;
  /** Gamma: shape. */
  readonly k?: number;
  /** Gamma: scale. */
  readonly theta?: number;
  /** Bytes of the serialized form; of generation 1 its estimate. */
  readonly byteLength: number;
  readonly generation: 1 | 2;
}

/** A sorted-profile encoding in the core's memory, made by `kv.fitSortedProfile`. Holds memory until `dispose`. */
export class SortedProfile extends Owned {
  #info: ProfileInfo | undefined;

  /** @internal */
  constructor(session: Session, handle: number) {
    super(session, handle);
  }

  /** Everything the core knows about this profile. */
  get info(): ProfileInfo {
    return (this.#info ??= this.session.core.json<ProfileInfo>('kvp_profile_info', this.handle));
  }
  get dims(): readonly number[] {
    return this.info.dims;
  }
  /** The receipt of the fit: its Kolmogorov-Smirnov distance. */
  get d(): number {
    return this.info.d;
  }
  get fallback(): boolean {
    return this.info.fallback;
  }
  get byteLength(): number {
    return this.info.byteLength;
  }
  /** Copy of the head's values by descending magnitude; of all values, in tensor order, where `fallback` is set. */
  get values(): FloatTensor['data'] {
    const { fallback, headCount, type } = this.info;
    const count = fallback ? elementsOf(this.dims) : headCount;
    return floatArray(type, this.#array('values', count * valueBytes[type]));
  }
  /** Copy of the flat index of each head value. */
  get headIndices(): Uint8Array | Uint16Array | Uint32Array {
    return this.#indices('head', this.info.headCount);
  }
  /** Copy of the permutation: element r is the flat index of the r-th smallest tail value. */
  get permutation(): Uint8Array | Uint16Array | Uint32Array {
    return this.#indices('permutation', this.info.tailCount);
  }

  /**
   * The tensor again: the head exactly, every other value replaced by the fitted quantile of its rank; all exactly where
   * `fallback` is set. Quantiles of `gamma` may differ in the last bits of a float64 between the addon and WebAssembly.
   * @throws KvPagesError `ERR_NON_FINITE` where a quantile is not finite, `ERR_DISPOSED`
   */
  reconstruct(): FloatTensor {
    const { type, dims } = this.info;
    const bytes = new Uint8Array(elementsOf(dims) * valueBytes[type]);
    this.session.core.call('kvp_profile_reconstruct', this.handle, bytes);
    return { type, dims, data: floatArray(type, bytes) };
  }

  /** mixle's bytes of it (they begin with MSPQ). @throws KvPagesError `ERR_UNSUPPORTED` for `gen1` */
  serialize(): Uint8Array {
    const bytes = new Uint8Array(this.byteLength);
    this.session.core.call('kvp_profile_serialize', this.handle, bytes);
    return bytes;
  }

  #array(name: string, length: number): Uint8Array<ArrayBuffer> {
    const bytes = new Uint8Array(length);
    this.session.core.call('kvp_profile_array', this.handle, name, bytes);
    return bytes;
  }
  #indices(name: string, count: number): Uint8Array | Uint16Array | Uint32Array {
    const { indexBytes } = this.info;
    const { buffer } = this.#array(name, count * indexBytes);
    return indexBytes === 1 ? new Uint8Array(buffer) : indexBytes === 2 ? new Uint16Array(buffer) : new Uint32Array(buffer);
  }
}

/** What `kv.detectAnomaly` found. */
export interface AnomalyReport {
  /** Kolmogorov-Smirnov distance of the tensor's values to the reference's fit. */
  readonly d: number;
  readonly referenceD: number;
  /** max(ratio * referenceD, referenceD + margin). */
  readonly limit: number;
  /** Whether d > limit. */
  readonly isAnomaly: boolean;
}

/** Tokens of one cluster of a chunk, as a bank's receipts name them. */
export interface ClusterTokens {
  readonly id: number;
  /** Indices of the cluster's tokens in the chunk, each once. */
  readonly members: Iterable<number>;
  /** Those members that are stored one by one. */
  readonly outliers: Iterable<number>;
  /** The outliers' rows of the keys, in order, if they are to be checked against the chunk. Given for all clusters or none. */
  readonly keys?: TensorLike | ArrayBufferView;
  /** The outliers' rows of the values, likewise. */
  readonly values?: TensorLike | ArrayBufferView;
}

export interface ClusterOptions extends KvCacheOptions {
  /** Distribution for the tails, `gaussian` by default. */
  readonly family?: 'gaussian' | 'gamma';
  /** Largest magnitudes that a tail's profile keeps exactly, 0 by default. */
  readonly tailTopK?: number;
}

/** One cluster of a chunk as it is stored: plain data but for the two profiles, which `dispose` gives back. */
export interface QuantizedCluster {
  readonly id: number;
  readonly members: Int32Array;
  readonly outliers: Int32Array;
  /** The members that are no outliers, ascending. */
  readonly tail: Int32Array;
  /** `null` where there are no outliers. */
  readonly outlierKeys: QuantizedKv | null;
  readonly outlierValues: QuantizedKv | null;
  /** `null` where there is no tail. */
  readonly tailKeys: SortedProfile | null;
  readonly tailValues: SortedProfile | null;
  dispose(): void;
}

/** One cluster decoded, with the indices that say where its rows belong. */
export interface RestoredCluster {
  readonly members: Int32Array;
  readonly outliers: Int32Array;
  readonly tail: Int32Array;
  readonly outlierKeys: FloatTensor | null;
  readonly outlierValues: FloatTensor | null;
  readonly tailKeys: FloatTensor | null;
  readonly tailValues: FloatTensor | null;
}

/** Counts of tokens that agree: input = member = outlier + tail. */
export interface ClusterTokenConservation {
  readonly input: number;
  readonly member: number;
  readonly outlier: number;
  readonly tail: number;
}

export interface BankOptions {
  /** A chunk whose mean key every head scores below this in all clusters makes a cluster of its own; -2 by default. */
  readonly birthThreshold?: number;
  /** Clusters whose key means are nearer are merged; 2.65 + 6 / sqrt(smaller count) by default. */
  readonly mergeThreshold?: number;
  /** Most outliers that a receipt names per cluster, 4 by default. */
  readonly outlierTopK?: number;
}

/** What a bank did with a chunk. */
export interface BankReceipt {
  /** Whether the chunk made a new cluster, which counts all its tokens. */
  readonly birthed: boolean;
  /** Whether it was counted by a soft update instead. */
  readonly updated: boolean;
  /** Pairs [into, from] in order; the last cluster takes the place of `from`. */
  readonly merged: ReadonlyArray<readonly [into: number, from: number]>;
  readonly mergeDistances: readonly number[];
  /** Clusters after birth and merge. */
  readonly clusters: number;
  /** Mean of the misfits, weighted by count. */
  readonly misfitScalar: number;
  /** Each cluster's tokens of this chunk; those with members are what `kv.quantizeClusterOutliers` takes. */
  readonly perCluster: ReadonlyArray<{
    readonly id: number;
    /** Mean over members of the head-mean residual, 0 without members. */
    readonly misfit: number;
    readonly members: Int32Array;
    /** The members with the largest residuals, largest first. */
    readonly outliers: Int32Array;
  }>;
}

type BankArray = 'count' | 'meanKeys' | 'meanValues' | 'keyVariances' | 'covariances';

/** Clusters of the tokens of one layer, per head: count, means, key variances and value-key covariances. Float64 throughout. */
export class ClusterBank extends Owned {
  /** @internal */
  constructor(session: Session, handle: number) {
    super(session, handle);
  }

  /** Shape of the bank and the number of clusters that are alive. */
  get info(): { readonly kvHeads: number; readonly headDim: number; readonly maxClusters: number; readonly clusters: number } {
    return this.session.core.json('kvp_bank_info', this.handle);
  }
  /** Clusters that are alive. */
  get clusters(): number {
    return this.info.clusters;
  }

  /**
   * Takes in a chunk and counts each of its tokens once: a birth where nothing fits, merges, then a soft update unless the
   * birth has counted the chunk. A call that throws leaves the bank as it was.
   * @param keys `[batch, tokens, kv_heads, head_dim]`: tokens before heads, unlike the rest of the library
   * @param values of the same dims
   * @throws KvPagesError `ERR_SHAPE`, `ERR_NON_FINITE`, `ERR_ARGUMENT`, `ERR_LIMIT`
   */
  ingest(keys: ValueTensor, values: ValueTensor, options: BankOptions = {}): BankReceipt {
    return this.#take(keys, values, options, 1);
  }

  /** `ingest` without the soft update: a chunk that makes no cluster is not counted. */
  birthAndMerge(keys: ValueTensor, values: ValueTensor, options: BankOptions = {}): BankReceipt {
    return this.#take(keys, values, options, 0);
  }

  /** A bank of its own with the same state. */
  clone(): ClusterBank {
    return new ClusterBank(this.session, this.session.core.handle('kvp_bank_clone', this.handle));
  }

  /** Copy of one array of the clusters that are alive: `count` `[kv_heads, clusters]`; `meanKeys`, `meanValues`, `keyVariances`
   * with head_dim values each; `covariances` with head_dim x head_dim (value x key). */
  array(name: BankArray): Float64Array {
    const { kvHeads, headDim, clusters } = this.info;
    const width = name === 'count' ? 1 : name === 'covariances' ? headDim * headDim : headDim;
    const out = new Float64Array(kvHeads * clusters * width);
    this.session.core.call('kvp_bank_array', this.handle, requireString(name, 'name'), out);
    return out;
  }

  #take(keys: unknown, values: unknown, options: BankOptions, update: number): BankReceipt {
    checkOptions(options, ['birthThreshold', 'mergeThreshold', 'outlierTopK']);
    const { birthThreshold = -2, mergeThreshold, outlierTopK = 4 } = options;
    const { perCluster, ...receipt } = this.session.core.json<BankReceipt>(
      'kvp_bank_ingest',
      this.handle,
      ...readValues(keys, 'keys'),
      ...readValues(values, 'values'),
      requireNumber(birthThreshold, 'birthThreshold'),
      mergeThreshold === undefined ? Number.NaN : requireGiven(mergeThreshold, 'mergeThreshold'),
      requireNumber(outlierTopK, 'outlierTopK'),
      update,
    );
    return {
      ...receipt,
      perCluster: perCluster.map(({ misfit, members, outliers }, id) => ({
        id,
        misfit,
        members: Int32Array.from(members),
        outliers: Int32Array.from(outliers),
      })),
    };
  }
}

/** How far logits are from reference logits. */
export interface Fidelity {
  /** Share of positions with the same largest logit (the first of equals). */
  readonly top1: number;
  /** Mean over positions of sum p (log p - log q) in nats, p from the reference. */
  readonly meanKl: number;
  readonly maxKl: number;
  readonly positions: number;
}

/** Methods of KvPages on profiles, clusters and measures. */
export abstract class ProfileMethods {
  /** @internal */
  protected abstract get session(): Session;

  /**
   * Encodes a K or V tensor with one scale for all of it.
   * @param tensor of any rank; f64 is rounded to f32 first
   * @throws KvPagesError `ERR_NON_FINITE` (names the first index), `ERR_SHAPE` (empty), `ERR_ARGUMENT`
   */
  quantizeKvCache(tensor: ValueTensor, options: KvCacheOptions = {}): QuantizedKv {
    checkOptions(options, ['mode', 'compat']);
    const [mode, compat] = readMode(options);
    const values = readValues(tensor, 'tensor');
    const dims = dimsOf(values);
    const codes = new Uint8Array(elementsOf(dims));
    const scale = new Float64Array(1);
    this.session.core.call('kvp_kv_quantize', ...values, mode, compat, codes, scale);
    return quantizedKv(mode, scale[0]!, codes, dims);
  }

  /** Decodes what `quantizeKvCache` made: code * scale in f32. @throws KvPagesError `ERR_ARGUMENT` (scale), `ERR_SHAPE` */
  dequantizeKvCache(quantized: QuantizedKv): FloatTensor {
    const { mode, scale, codes, dims } = readQuantizedKv(quantized, 'quantized');
    const data = new Float32Array(codes.length);
    this.session.core.call('kvp_kv_dequantize', codes, scale, mode, data);
    return { type: 'f32', dims, data };
  }

  /**
   * Mean absolute error per index of the leading dim, in float64: of `quantizeKvCache` with the given options, or of a restored
   * tensor of the same dims. Of a tensor with one dim, each element's.
   * @throws KvPagesError `ERR_NON_FINITE`, `ERR_SHAPE`, `ERR_ARGUMENT`
   */
  errorPerToken(tensor: ValueTensor, restored: ValueTensor | KvCacheOptions = {}): Float64Array {
    const { core, instance } = this.session;
    const values = readValues(tensor, 'tensor');
    const errors = new Float64Array(dimsOf(values)[0] ?? 1);
    if (ArrayBuffer.isView(restored) || restored instanceof QuantizedTensor || (typeof restored === 'object' && restored !== null && 'data' in restored)) {
      core.call('kvp_metrics_error_per_token', ...values, ...readValues(restored, 'restored'), errors);
    } else {
      checkOptions(restored, ['mode', 'compat']);
      core.call('kvp_kv_error_per_token', instance, ...values, ...readMode(restored), errors);
    }
    return errors;
  }

  /**
   * Encodes a tensor as its largest magnitudes, a distribution fitted to all other values, and the rank of each. The profile's
   * `d` is the receipt of the fit; where it is over the threshold, or fewer than 2 values are left to fit, the dense values are
   * held instead. A receipt and a detector of anomalies, not a small format: 2 bytes per element from 257 to 65536 elements.
   * @param tensor of any rank; f64, f32 and f16 keep their type, bf16 becomes f32
   * @throws KvPagesError `ERR_NON_FINITE` (names the first index), `ERR_ARGUMENT` (topK, threshold, values outside the family), `ERR_SHAPE`
   */
  fitSortedProfile(tensor: ValueTensor, options: ProfileOptions = {}): SortedProfile {
    checkOptions(options, ['topK', 'family', 'threshold', 'compat']);
    const { topK = 0, family = 'gaussian', threshold = 0.05, compat = '' } = options;
    const { core, instance } = this.session;
    const handle = core.handle(
      'kvp_profile_fit',
      instance,
      ...readValues(tensor, 'tensor'),
      requireNumber(topK, 'topK'),
      requireString(family, 'family'),
      requireNumber(threshold, 'threshold'),
      requireString(compat, 'compat'),
    );
    return new SortedProfile(this.session, handle);
  }

  /** The same as `profile.reconstruct()`. */
  reconstruct(profile: SortedProfile): FloatTensor {
    Owned.handleOf(profile, SortedProfile, this.session, 'profile');
    return profile.reconstruct();
  }

  /** Reads the bytes of `profile.serialize()` or of mixle. All or nothing. @throws KvPagesError `ERR_CORRUPT`, `ERR_UNSUPPORTED` with `byteOffset` */
  parseSortedProfile(bytes: ArrayBufferLike | ArrayBufferView): SortedProfile {
    const { core, instance } = this.session;
    return new SortedProfile(this.session, core.handle('kvp_profile_parse', instance, bytesOf(bytes, 'bytes')));
  }

  /**
   * Whether a tensor, less as many of its largest magnitudes as the reference keeps exactly, no longer looks like the reference.
   * @param options.ratio 2 by default
   * @param options.margin 0.02 by default
   * @throws KvPagesError `ERR_ARGUMENT` where the reference holds dense values, `ERR_NON_FINITE`
   */
  detectAnomaly(tensor: ValueTensor, reference: SortedProfile, options: { readonly ratio?: number; readonly margin?: number } = {}): AnomalyReport {
    checkOptions(options, ['ratio', 'margin']);
    const { ratio = 2, margin = 0.02 } = options;
    const handle = Owned.handleOf(reference, SortedProfile, this.session, 'reference');
    const figures = new Float64Array(3);
    const values = readValues(tensor, 'tensor');
    this.session.core.call('kvp_profile_anomaly', handle, ...values, requireNumber(ratio, 'ratio'), requireNumber(margin, 'margin'), figures);
    return { d: figures[0]!, referenceD: reference.d, limit: figures[1]!, isAnomaly: figures[2] !== 0 };
  }

  /**
   * Stores a clustered chunk: each cluster's outliers as `quantizeKvCache` does, its other members as sorted profiles. Every token
   * must be a member of exactly one cluster.
   * @param clusters for example `receipt.perCluster.filter(({ members }) => members.length > 0)` of a bank
   * @param keys `[tokens, ...]`
   * @param values of the same dims
   * @throws KvPagesError `ERR_MISMATCH` (no exact partition, rows that differ), `ERR_ARGUMENT`, `ERR_SHAPE`, `ERR_NON_FINITE`
   */
  quantizeClusterOutliers(clusters: Iterable<ClusterTokens>, keys: ValueTensor, values: ValueTensor, options: ClusterOptions = {}): QuantizedCluster[] {
    checkOptions(options, ['mode', 'compat', 'family', 'tailTopK']);
    const { family = 'gaussian', tailTopK = 0 } = options;
    const { core, instance } = this.session;
    const [mode, compat] = readMode(options);
    const rawKeys = readValues(keys, 'keys');
    const rawValues = readValues(values, 'values');
    const { ids, counts, indices, rowKeys, rowValues } = readClusters(clusters, rawKeys[1], rawValues[1]);
    const handle = core.handle(
      'kvp_clusters_quantize',
      instance,
      ...rawKeys,
      ...rawValues,
      ids,
      counts,
      indices,
      rowKeys,
      rowValues,
      mode,
      compat,
      requireString(family, 'family'),
      requireNumber(tailTopK, 'tailTopK'),
    );
    const made: QuantizedCluster[] = [];
    try {
      const info = core.json<{ clusters: ReadonlyArray<{ id: number; memberCount: number; outlierCount: number; tailCount: number }> }>('kvp_clusters_info', handle);
      info.clusters.forEach((cluster, index) => made.push(readCluster(this.session, handle, index, cluster, mode, dimsOf(rawKeys).slice(1))));
    } catch (error) {
      for (const cluster of made) cluster.dispose();
      throw error;
    } finally {
      core.call('kvp_release', handle);
    }
    return made;
  }

  /** Decodes one cluster; parts that it does not have are `null`. */
  dequantizeClusterOutliers(cluster: QuantizedCluster): RestoredCluster {
    requireObject(cluster, 'cluster');
    const kv = (part: QuantizedKv | null) => (part === null ? null : this.dequantizeKvCache(part));
    const profile = (part: SortedProfile | null) => (part === null ? null : this.reconstruct(part));
    const indices = (name: 'members' | 'outliers' | 'tail') => Int32Array.from(readIndices(cluster[name], `cluster.${name}`));
    return {
      members: indices('members'),
      outliers: indices('outliers'),
      tail: indices('tail'),
      outlierKeys: kv(cluster.outlierKeys),
      outlierValues: kv(cluster.outlierValues),
      tailKeys: profile(cluster.tailKeys),
      tailValues: profile(cluster.tailValues),
    };
  }

  /**
   * Checks that clusters store every token of a chunk exactly once, and as many rows as they have indices.
   * @param tokens tokens of the chunk
   * @throws KvPagesError `ERR_MISMATCH`, `ERR_ARGUMENT` naming the cluster
   */
  verifyClusterTokenConservation(clusters: Iterable<QuantizedCluster>, tokens: number): ClusterTokenConservation {
    const all = listOf<QuantizedCluster>(clusters, 'clusters');
    const counts: number[] = [];
    const indices: number[] = [];
    all.forEach((cluster, i) => {
      requireObject(cluster, `clusters[${i}]`);
      for (const name of ['members', 'outliers', 'tail'] as const) {
        const list = readIndices(cluster[name], `clusters[${i}].${name}`);
        counts.push(list.length);
        for (const index of list) indices.push(index);
      }
      for (const name of ['outlierKeys', 'outlierValues', 'tailKeys', 'tailValues'] as const) {
        const part = cluster[name];
        counts.push(part === null ? 0 : rowsOf(part, `clusters[${i}].${name}`));
      }
    });
    const receipt = new Float64Array(4);
    const ids = int64Array(all.map(({ id }) => id), 'id');
    this.session.core.call('kvp_clusters_verify', requireNumber(tokens, 'tokens'), ids, int64Array(counts, 'counts'), Int32Array.from(indices), receipt);
    const [input, member, outlier, tail] = receipt;
    return { input: input!, member: member!, outlier: outlier!, tail: tail! };
  }

  /** An empty bank of clusters. @throws KvPagesError `ERR_ARGUMENT`, `ERR_LIMIT` */
  createClusterBank(options: { readonly kvHeads: number; readonly headDim: number; readonly maxClusters: number }): ClusterBank {
    checkOptions(options, ['kvHeads', 'headDim', 'maxClusters']);
    const sizes = (['kvHeads', 'headDim', 'maxClusters'] as const).map((name) => requireNumber(options[name], name));
    return new ClusterBank(this.session, this.session.core.handle('kvp_bank_create', this.session.instance, ...sizes));
  }

  /** Root of the mean squared difference of two tensors of equal dims, in float64. @throws KvPagesError `ERR_SHAPE`, `ERR_NON_FINITE` */
  rmse(a: ValueTensor, b: ValueTensor): number {
    return this.session.core.number('kvp_metrics_rmse', ...readValues(a, 'a'), ...readValues(b, 'b'));
  }

  /**
   * Top-1 agreement and Kullback-Leibler divergence of logits `[positions, vocabulary]` to reference logits, with a log-softmax
   * in float64. -Infinity is a masked entry.
   * @throws KvPagesError `ERR_SHAPE`, `ERR_NON_FINITE` (names the first index)
   */
  fidelity(reference: ValueTensor, logits: ValueTensor): Fidelity {
    const figures = new Float64Array(4);
    this.session.core.call('kvp_metrics_fidelity', ...readValues(reference, 'reference'), ...readValues(logits, 'logits'), figures);
    const [top1, meanKl, maxKl, positions] = figures;
    return { top1: top1!, meanKl: meanKl!, maxKl: maxKl!, positions: positions! };
  }

  /** Largest gap between the distribution functions of two tensors' values, or of a tensor's values and a profile's fit. */
  ksDistance(a: ValueTensor, b: ValueTensor | SortedProfile): number {
    const { core, instance } = this.session;
    const values = readValues(a, 'a');
    if (b instanceof SortedProfile) return core.number('kvp_profile_ks', Owned.handleOf(b, SortedProfile, this.session, 'b'), ...values);
    return core.number('kvp_metrics_ks_distance', instance, ...values, ...readValues(b, 'b'));
  }

  /**
   * How many times smaller than 16-bit elements something is. A number of bits, or `{ bits, block, scaleBits }` (16 and 8 by
   * default), gives the INT4/INT3 study's figure 2 / (bits / 8 + 1 / 16); a tensor, profile or cluster part its exact one.
   */
  memoryRatio(of: number | { readonly bits: number; readonly block?: number; readonly scaleBits?: number } | QuantizedTensor | SortedProfile | QuantizedKv): number {
    const { core } = this.session;
    if (of instanceof QuantizedTensor) return (elementsOf(of.dims) * 2) / of.byteLength;
    if (of instanceof SortedProfile) return (elementsOf(of.dims) * 2) / of.byteLength;
    if (typeof of === 'object' && of !== null && 'codes' in of) {
      const { codes, mode } = readQuantizedKv(of, 'of');
      return (codes.length * 2) / (codes.length + (mode === 'int8' ? 4 : 8));
    }
    const options = typeof of === 'number' ? { bits: of } : of;
    checkOptions(options, ['bits', 'block', 'scaleBits'], 'of');
    const { bits, block = 16, scaleBits = 8 } = options;
    return core.number('kvp_metrics_memory_ratio', requireNumber(bits, 'bits'), requireNumber(block, 'block'), requireNumber(scaleBits, 'scaleBits'));
  }
}

const valueBytes = { f64: 8, f32: 4, f16: 2 } as const;

function elementsOf(dims: readonly number[]): number {
  return dims.reduce((product, dim) => product * dim, 1);
}

function floatArray(type: FloatTensor['type'], bytes: Uint8Array<ArrayBuffer>): FloatTensor['data'] {
  return type === 'f64' ? new Float64Array(bytes.buffer) : denseArray(type, bytes);
}

type RawValues = [bytes: Uint8Array, type: string, dims: BigInt64Array];

/** A tensor in the three arguments that the core takes. Float64 stays float64. */
function readValues(tensor: unknown, argument: string): RawValues {
  if (tensor instanceof QuantizedTensor) return readValues(tensor.dequantize(), argument);
  const source: Partial<TensorLike> | undefined = ArrayBuffer.isView(tensor)
    ? { data: tensor }
    : typeof tensor === 'object' && tensor !== null
      ? (tensor as Partial<TensorLike>)
      : undefined;
  const data = source?.data;
  const word = source?.type ?? source?.dtype;
  if (ArrayBuffer.isView(data) && viewName(data) === 'Float64Array' && (word === undefined || word === 'float64' || word === 'f64')) {
    if (source?.strides !== undefined || (source?.byteOffset ?? 0) !== 0) {
      throw new KvPagesError('ERR_UNSUPPORTED', `${argument}: float64 tensors with strides or a byteOffset are not read; copy it first`, { argument });
    }
    const dims = ArrayBuffer.isView(tensor) ? [(data as Float64Array).length] : (source?.dims ?? source?.shape);
    return [bytesOf(data, argument), 'f64', int64Array(dims, `${argument}.dims`)];
  }
  const raw = readContiguous(tensor, argument);
  return [raw.bytes, raw.type, int64Array(raw.dims, `${argument}.dims`)];
}

/** Dims that the core may yet refuse: a negative one counts as 0 here. */
function dimsOf(values: RawValues): number[] {
  return Array.from(values[2], (dim) => Math.max(0, Number(dim)));
}

function checkOptions(options: unknown, names: readonly string[], argument = 'options'): asserts options is object {
  requireObject(options, argument);
  for (const key of Object.keys(options)) {
    if (!names.includes(key)) throw new TypeError(`${argument}.${key}: is no option; there are ${names.join(', ')}`);
  }
}

function readMode(options: KvCacheOptions): [mode: 'int8' | 'fp8', compat: string] {
  const { mode = 'int8', compat = '' } = options;
  return [requireString(mode, 'mode') as 'int8' | 'fp8', requireString(compat, 'compat')];
}

function quantizedKv(mode: 'int8' | 'fp8', scale: number, codes: Uint8Array<ArrayBuffer>, dims: readonly number[]): QuantizedKv {
  return { mode, scale, codes: mode === 'int8' ? new Int8Array(codes.buffer) : codes, dims };
}

function readQuantizedKv(quantized: QuantizedKv, argument: string): { mode: 'int8' | 'fp8'; scale: number; codes: Uint8Array; dims: readonly number[] } {
  requireObject(quantized, argument);
  const mode = requireString(quantized.mode, `${argument}.mode`) as 'int8' | 'fp8';
  const view = mode === 'fp8' ? 'a Uint8Array' : 'an Int8Array';
  if (!ArrayBuffer.isView(quantized.codes) || !view.endsWith(` ${viewName(quantized.codes)}`)) {
    throw wrongType(`${argument}.codes`, `must be ${view} for mode ${mode}`, quantized.codes);
  }
  const dims = Array.from(int64Array(quantized.dims, `${argument}.dims`), Number);
  const codes = bytesOf(quantized.codes, `${argument}.codes`);
  if (dims.some((dim) => dim < 0) || elementsOf(dims) !== codes.length) {
    throw new KvPagesError('ERR_SHAPE', `${argument}: dims [${dims.join(', ')}] must have as many elements as there are codes, got ${codes.length}`, { argument });
  }
  return { mode, scale: requireNumber(quantized.scale, `${argument}.scale`), codes, dims };
}

function listOf<T>(values: unknown, argument: string): T[] {
  if (typeof values !== 'object' || values === null || !(Symbol.iterator in values)) throw wrongType(argument, 'must be an array', values);
  return Array.from(values as Iterable<T>);
}

/** Indices that fit the core's int32; whether they are in range there is the core's question. */
function readIndices(values: unknown, argument: string): number[] {
  return listOf<unknown>(values, argument).map((value, i) => {
    if (typeof value !== 'number' || (value | 0) !== value) throw wrongType(`${argument}[${i}]`, 'must be an integer of 32 bits', value);
    return value;
  });
}

/** Rows of a stored part of a cluster. */
function rowsOf(part: unknown, argument: string): number {
  requireObject(part, argument);
  return Number(int64Array((part as { readonly dims?: unknown }).dims, `${argument}.dims`)[0] ?? 0);
}

function readClusters(clusters: unknown, keyType: string, valueType: string) {
  const ids: unknown[] = [];
  const counts: number[] = [];
  const indices: number[] = [];
  const rows: Record<'keys' | 'values', Uint8Array[]> = { keys: [], values: [] };
  listOf<ClusterTokens>(clusters, 'clusters').forEach((cluster, i) => {
    const at = `clusters[${i}]`;
    requireObject(cluster, at);
    ids.push(cluster.id);
    for (const name of ['members', 'outliers'] as const) {
      const list = readIndices(cluster[name], `${at}.${name}`);
      counts.push(list.length);
      for (const index of list) indices.push(index);
    }
    for (const [name, type] of [['keys', keyType], ['values', valueType]] as const) {
      if (cluster[name] === undefined) continue;
      const [bytes, word] = readValues(cluster[name], `${at}.${name}`);
      if (word !== type) throw wrongType(`${at}.${name}`, `must have the type of ${name}, ${type}`, word);
      rows[name].push(bytes);
    }
  });
  return { ids: int64Array(ids, 'id'), counts: int64Array(counts, 'counts'), indices: Int32Array.from(indices), rowKeys: joined(rows.keys), rowValues: joined(rows.values) };
}

function joined(parts: readonly Uint8Array[]): Uint8Array {
  const out = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    out.set(part, at);
    at += part.length;
  }
  return out;
}

function readCluster(
  session: Session,
  handle: number,
  index: number,
  counts: { id: number; memberCount: number; outlierCount: number; tailCount: number },
  mode: 'int8' | 'fp8',
  rowDims: readonly number[],
): QuantizedCluster {
  const { core } = session;
  const list = (name: string, count: number): Int32Array => {
    const out = new Int32Array(count);
    core.call('kvp_clusters_indices', handle, index, name, out);
    return out;
  };
  const outliers = (side: string): QuantizedKv | null => {
    if (counts.outlierCount === 0) return null;
    const dims = [counts.outlierCount, ...rowDims];
    const codes = new Uint8Array(elementsOf(dims));
    const scale = new Float64Array(1);
    core.call('kvp_clusters_outliers', handle, index, side, codes, scale);
    return quantizedKv(mode, scale[0]!, codes, dims);
  };
  const tail = (side: string): SortedProfile | null =>
    counts.tailCount === 0 ? null : new SortedProfile(session, core.handle('kvp_clusters_tail', handle, index, side));
  const tailKeys = tail('key');
  const tailValues = tail('value');
  return {
    id: counts.id,
    members: list('members', counts.memberCount),
    outliers: list('outliers', counts.outlierCount),
    tail: list('tail', counts.tailCount),
    outlierKeys: outliers('key'),
    outlierValues: outliers('value'),
    tailKeys,
    tailValues,
    dispose: () => {
      tailKeys?.dispose();
      tailValues?.dispose();
    },
  };
}
