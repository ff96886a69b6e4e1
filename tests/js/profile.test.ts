// SPDX-License-Identifier: Apache-2.0
// One-scale int8 and fp8, sorted profiles, clusters, the cluster bank and measures, against vectors made by mixle 0.8.2.
import { beforeAll, describe, expect, it } from 'vitest';
import { ClusterBank, SortedProfile } from '../../js/index.js';
import type { ClusterTokens, FloatTensor, KvPages, ProfileOptions } from '../../js/index.js';
import { readSafetensors } from '../../js/safetensors.js';
import { errorOf, hex, loadHere, noise, readRepositoryFile } from './support.js';

interface Parameters {
  kind: 'int8' | 'fp8' | 'profile' | 'clusters' | 'bank';
  top_k: number;
  threshold: number;
  family: 'gaussian' | 'gamma';
  index_bytes: number;
  mode: 'int8' | 'fp8';
  tail_top_k: number;
  clusters: number;
  receipt: { input: number; member: number; outlier: number; tail: number };
  max_clusters: number;
  birth_threshold: number;
  merge_threshold: number | null;
  outlier_top_k: number;
  chunks: number;
  receipts: Array<{ birthed: boolean; soft_update_applied: boolean; merged: number[][]; n_clusters: number; misfit: Record<string, number>; misfit_scalar: number }>;
}

const { metadata, tensors } = readSafetensors(await readRepositoryFile('tests/vectors/mixle.safetensors'));
const cases = Object.entries(metadata)
  .filter(([key]) => key.startsWith('case/'))
  .map(([key, text]) => ({ key, name: key.slice(5), ...(JSON.parse(text) as Parameters) }));
const casesOf = (...kinds: string[]) => cases.filter(({ kind }) => kinds.includes(kind));

/** Field of a case as plain numbers. */
const list = (key: string, field: string): number[] => Array.from(tensors.get(`${key}/${field}`)!.data as unknown as ArrayLike<number>, Number);
const one = (key: string, field: string): number => list(key, field)[0]!;
const has = (key: string, field: string): boolean => tensors.has(`${key}/${field}`);
const tensor = (key: string, field: string) => {
  const { data, dims } = tensors.get(`${key}/${field}`)!;
  return { data, dims };
};
const bytes = (key: string, field: string): string => hex(tensors.get(`${key}/${field}`)!.data);

function expectNear(actual: ArrayLike<number>, wanted: ArrayLike<number>, relative: number, absolute = 0): void {
  expect(actual.length).toBe(wanted.length);
  for (let i = 0; i < wanted.length; ++i) {
    const limit = absolute + relative * Math.abs(wanted[i]!);
    if (!(Math.abs(actual[i]! - wanted[i]!) <= limit)) expect([i, actual[i]]).toEqual([i, wanted[i]]);
  }
}

let kv: KvPages;
beforeAll(async () => {
  kv = await loadHere();
});

describe('quantizeKvCache', () => {
  for (const { key, name, kind } of casesOf('int8', 'fp8')) {
    it(`gives the vectors of ${name}`, () => {
      const mode = kind as 'int8' | 'fp8';
      const x = tensor(key, 'x');
      const quantized = kv.quantizeKvCache(x, { mode });
      expect(quantized).toMatchObject({ mode, scale: one(key, 'scale'), dims: x.dims });
      expect(hex(quantized.codes)).toBe(bytes(key, 'codes'));
      const restored = kv.dequantizeKvCache(quantized);
      expect(restored).toMatchObject({ type: 'f32', dims: x.dims });
      expect(hex(restored.data)).toBe(bytes(key, 'y'));
      expectNear(kv.errorPerToken(x, { mode }), list(key, 'error_per_token_f64'), 1e-5);
      expectNear(kv.errorPerToken(x, restored), list(key, 'error_per_token_f64'), 1e-12);
      if (mode === 'fp8') {
        const first = kv.quantizeKvCache(x, { mode, compat: 'gen1' });
        expect(first.scale).toBe(1);
        expect(hex(first.codes)).toBe(bytes(key, 'gen1_codes'));
      }
    });
  }

  it('tells wrong input', () => {
    expect(errorOf(() => kv.quantizeKvCache(Float32Array.of(1, Number.NaN, 2)))).toMatchObject({
      code: 'ERR_NON_FINITE',
      argument: 'tensor',
      message: 'tensor: values must be finite, got NaN at index 1',
    });
    expect(errorOf(() => kv.quantizeKvCache({ dims: [0, 4], data: new Float32Array(0) }))).toMatchObject({ code: 'ERR_SHAPE' });
    expect(errorOf(() => kv.quantizeKvCache(noise(4), { mode: 'int4' as 'int8' })).message).toBe("mode: must be 'int8' or 'fp8', got int4");
    expect(errorOf(() => kv.quantizeKvCache(noise(4), { compat: 'gen3' as 'gen1' })).message).toBe("compat: must be 'gen1' or 'gen2', got gen3");
    expect(() => kv.quantizeKvCache(noise(4), { made: 'int8' } as never)).toThrow(new TypeError('options.made: is no option; there are mode, compat'));
    const quantized = kv.quantizeKvCache(noise(4));
    for (const scale of [0, -1, Number.NaN, Number.POSITIVE_INFINITY]) {
      expect(errorOf(() => kv.dequantizeKvCache({ ...quantized, scale })).message).toMatch(/^scale: must be finite and > 0 as f32, got /);
    }
    expect(errorOf(() => kv.dequantizeKvCache({ ...quantized, dims: [5] }))).toMatchObject({ code: 'ERR_SHAPE' });
    expect(() => kv.dequantizeKvCache({ ...quantized, codes: new Uint8Array(4) })).toThrow(new TypeError('quantized.codes: must be an Int8Array for mode int8, got Uint8Array'));
  });
});

describe('sorted profiles', () => {
  for (const { key, name, top_k: topK, threshold, family, index_bytes: indexBytes } of casesOf('profile').filter((c) => has(c.key, 'x'))) {
    it(`give the vectors of ${name}`, () => {
      const x = tensor(key, 'x');
      const gamma = family === 'gamma';
      using profile = kv.fitSortedProfile(x, { topK, threshold, family });
      expect(profile.fallback).toBe(one(key, 'fallback') !== 0);
      expect(profile.info.indexBytes).toBe(indexBytes);
      expectNear([profile.d], [one(key, 'd')], 0, gamma ? 1e-8 : 1e-14);
      if (has(key, 'head')) {
        expect(Array.from(profile.headIndices)).toEqual(list(key, 'head'));
        expect(Array.from(profile.permutation)).toEqual(list(key, 'permutation'));
        expect(Array.from(profile.values as Float32Array)).toEqual(list(key, 'head').map((i) => (x.data as Float32Array)[i]));
        const { mu, sigma2, k, theta } = profile.info;
        if (gamma) expectNear([k!, theta!], [one(key, 'k'), one(key, 'theta')], 1e-7);
        else expect([mu, sigma2]).toEqual([one(key, 'mu'), one(key, 'v')]);
      }
      const restored = kv.reconstruct(profile);
      expect(restored.dims).toEqual(x.dims);
      expectNear(restored.data as Float32Array, list(key, 'y'), gamma ? 1e-6 : 2e-7);
      // A digit more or less in D is a byte.
      expectNear([profile.byteLength], [one(key, 'nbytes')], 0, gamma ? 8 : 2);
      const serialized = profile.serialize();
      using parsed = kv.parseSortedProfile(serialized);
      expect(hex(parsed.serialize())).toBe(hex(serialized));
      expect(hex(parsed.reconstruct().data)).toBe(hex(restored.data));
      if (!gamma) {
        using first = kv.fitSortedProfile(x, { topK, threshold, family, compat: 'gen1' });
        expectNear([first.d], [one(key, 'gen1_d')], 0, 1e-14);
        expect([first.fallback, first.byteLength, first.info.generation]).toEqual([one(key, 'gen1_fallback') !== 0, one(key, 'gen1_nbytes'), 1]);
        expect(errorOf(() => first.serialize()).code).toBe('ERR_UNSUPPORTED');
      }
    });
  }

  for (const { key, name } of casesOf('profile').filter((c) => has(c.key, 'payload'))) {
    it(`read and write mixle's bytes of ${name}`, () => {
      using profile = kv.parseSortedProfile(new Uint8Array(tensors.get(`${key}/payload`)!.data.buffer, tensors.get(`${key}/payload`)!.data.byteOffset, tensors.get(`${key}/payload`)!.data.byteLength));
      expect(hex(profile.serialize())).toBe(bytes(key, 'payload'));
      expectNear(profile.reconstruct().data as Float32Array, list(key, 'y'), 2e-7);
    });
  }

  it('keep the type of float64 and the order of every value', () => {
    const x = Float64Array.from(noise(2048), (value) => value / 3);
    using profile = kv.fitSortedProfile({ dims: [2, 16, 64], data: x }, { topK: 8, threshold: 1 });
    const restored: FloatTensor = profile.reconstruct();
    expect(restored).toMatchObject({ type: 'f64', dims: [2, 16, 64] });
    const order = (values: ArrayLike<number>) => Array.from(profile.permutation, (i) => values[i]!);
    const sorted = order(restored.data as Float64Array);
    expect(sorted.every((value, i) => i === 0 || value >= sorted[i - 1]!)).toBe(true);
    for (const i of profile.headIndices) expect((restored.data as Float64Array)[i]).toBe(x[i]);
    expect(kv.memoryRatio(profile)).toBeLessThan(1.1);
  });

  it('tell anomalies', () => {
    using reference = kv.fitSortedProfile(noise(4096, 1), { topK: 300, threshold: 1 });
    const same = kv.detectAnomaly(noise(4096, 2), reference);
    expect(same.isAnomaly).toBe(false);
    expect(same.limit).toBe(Math.max(2 * reference.d, reference.d + 0.02));
    const shifted = kv.detectAnomaly(noise(4096, 2).map((value) => value + 1), reference);
    expect(shifted.isAnomaly).toBe(true);
    expect(shifted.d).toBeGreaterThan(shifted.limit);
    expect(kv.detectAnomaly(noise(4096, 2), reference, { ratio: 3, margin: 0.5 }).limit).toBe(Math.max(3 * reference.d, reference.d + 0.5));
    expect(kv.detectAnomaly(noise(4096, 2), reference, { ratio: 3, margin: 0 }).limit).toBe(3 * reference.d);
    expect(errorOf(() => kv.detectAnomaly(noise(8), reference, { ratio: 0 })).message).toBe('ratio: must be finite and > 0, got 0');
    expect(errorOf(() => kv.detectAnomaly(noise(8), reference, { margin: -1 })).message).toBe('margin: must be finite and >= 0, got -1');
    using dense = kv.fitSortedProfile(Float32Array.of(1));
    expect(dense).toMatchObject({ fallback: true, d: 1 });
    expect(errorOf(() => kv.detectAnomaly(noise(8), dense))).toMatchObject({ code: 'ERR_ARGUMENT', argument: 'reference' });
  });

  it('refuse wrong input', () => {
    const fit = (x: Float32Array, options: ProfileOptions) => errorOf(() => kv.fitSortedProfile(x, options)).message;
    expect(fit(noise(3), { topK: 4 })).toBe('topK: must lie between 0 and the 3 elements, got 4');
    expect(fit(noise(3), { topK: 1.5 })).toMatch(/^topK: must be an integer/);
    expect(fit(noise(3), { threshold: 2 })).toBe('threshold: must lie between 0 and 1, got 2');
    expect(fit(noise(3), { family: 'beta' as 'gamma' })).toBe("family: must be 'gaussian' or 'gamma', got beta");
    expect(fit(Float32Array.of(1, 2, -3), { family: 'gamma' })).toBe('tensor: the gamma family needs tail values > 0, got -3 at index 2');
    expect(fit(Float32Array.of(1, 2, Number.POSITIVE_INFINITY), {})).toBe('tensor: values must be finite, got Infinity at index 2');
    expect(() => kv.fitSortedProfile(noise(3), { topK: true } as never)).toThrow(new TypeError('topK: must be a number, got true'));
    expect(() => kv.fitSortedProfile(noise(3), { threshold: null } as never)).toThrow(new TypeError('threshold: must be a number, got null'));
    expect(() => kv.quantizeKvCache(noise(3), { mode: null } as never)).toThrow(new TypeError('mode: must be a string, got null'));
    expect(() => kv.reconstruct({} as SortedProfile)).toThrow(new TypeError('profile: must be a SortedProfile, got an Object'));
    using profile = kv.fitSortedProfile(noise(2048), { threshold: 1 });
    const serialized = profile.serialize();
    expect(errorOf(() => kv.parseSortedProfile(serialized.subarray(0, 100)))).toMatchObject({ code: 'ERR_CORRUPT', byteOffset: 5 });
    serialized[serialized.length - 1]! ^= 1;
    expect(errorOf(() => kv.parseSortedProfile(serialized))).toMatchObject({ code: 'ERR_CORRUPT' });
    profile.dispose();
    expect(errorOf(() => profile.reconstruct()).code).toBe('ERR_DISPOSED');
  });

  it('give their memory back', async () => {
    const own = await loadHere();
    const before = own.usedBytes;
    const profile = own.fitSortedProfile(noise(4096));
    expect(own.usedBytes).toBeGreaterThan(before);
    profile.dispose();
    expect(own.usedBytes).toBe(before);
    using small = await loadHere({ maxBytes: 1000 });
    expect(errorOf(() => small.fitSortedProfile(noise(4096))).code).toBe('ERR_LIMIT');
    expect(small.usedBytes).toBe(0);
    expect(errorOf(() => own.detectAnomaly(noise(8), kv.fitSortedProfile(noise(64), { threshold: 1 })))).toMatchObject({ code: 'ERR_ARGUMENT', argument: 'reference' });
  });
});

describe('quantizeClusterOutliers', () => {
  for (const { key, name, mode, tail_top_k: tailTopK, clusters: count, receipt } of casesOf('clusters')) {
    it(`gives the vectors of ${name}`, () => {
      const keys = tensor(key, 'k');
      const values = tensor(key, 'v');
      const width = keys.dims[1]! * keys.dims[2]!;
      const rows = (source: ArrayLike<number>, indices: number[]) =>
        Float32Array.from(indices.flatMap((i) => Array.from({ length: width }, (_, j) => source[i * width + j]!)));
      const clusters: ClusterTokens[] = Array.from({ length: count }, (_, id) => {
        const outliers = list(key, `c${id}_outliers`);
        const side = (source: ArrayLike<number>) => ({ dims: [outliers.length, ...keys.dims.slice(1)], data: rows(source, outliers) });
        return { id, members: list(key, `c${id}_members`), outliers, keys: side(keys.data as Float32Array), values: side(values.data as Float32Array) };
      });
      const stored = kv.quantizeClusterOutliers(clusters, keys, values, { mode, tailTopK });
      const { input, member, outlier, tail } = receipt;
      expect(kv.verifyClusterTokenConservation(stored, keys.dims[0]!)).toEqual({ input, member, outlier, tail });
      for (const cluster of stored) {
        const field = (part: string) => `c${cluster.id}_${part}`;
        expect(Array.from(cluster.tail)).toEqual(list(key, field('tail')));
        const restored = kv.dequantizeClusterOutliers(cluster);
        for (const [letter, part, whole, profile, tailPart] of [
          ['k', cluster.outlierKeys, restored.outlierKeys, cluster.tailKeys, restored.tailKeys],
          ['v', cluster.outlierValues, restored.outlierValues, cluster.tailValues, restored.tailValues],
        ] as const) {
          expect(part !== null).toBe(has(key, field(`outlier_${letter}`)));
          if (part !== null) {
            expect(hex(part.codes)).toBe(bytes(key, field(`outlier_${letter}_codes`)));
            expect(part.scale).toBe(one(key, field(`outlier_${letter}_scale`)));
            expect(hex(whole!.data)).toBe(bytes(key, field(`outlier_${letter}`)));
          }
          expect(profile !== null).toBe(has(key, field(`tail_${letter}`)));
          if (profile !== null) {
            expectNear([profile.d], [one(key, field(`tail_${letter}_d`))], 0, 1e-14);
            expect(profile.fallback).toBe(one(key, field(`tail_${letter}_fallback`)) !== 0);
            expectNear(tailPart!.data as Float32Array, list(key, field(`tail_${letter}`)), 2e-7);
          }
        }
        cluster.dispose();
      }
    });
  }

  const x = { dims: [6, 1, 2], data: Float32Array.from({ length: 12 }, (_, i) => i) };
  const store = (...clusters: Array<[members: number[], outliers: number[]]>) =>
    kv.quantizeClusterOutliers(clusters.map(([members, outliers], id) => ({ id, members, outliers })), x, x);

  it('refuses what would not conserve tokens', () => {
    const message = (...clusters: Array<[number[], number[]]>) => errorOf(() => store(...clusters)).message;
    expect(message([[0, 1, 2], [0]], [[2, 3, 4, 5], [3]])).toBe('clusters: must be an exact partition of the tokens, got token 2 in two clusters');
    expect(message([[0, 1, 2], [0]])).toBe('clusters: must be an exact partition of the tokens, got token 3 in no cluster');
    expect(message([[0, 1, 2], [3]], [[3, 4, 5], []])).toBe('cluster 0 outliers: must be members of the cluster, got 3');
    expect(message([[0, 6], []], [[1], []])).toBe('cluster 0 members: must lie between 0 and 5, got 6');
    expect(message([[0, 0], []], [[1], []])).toBe('cluster 0 members: must name a token once, got 0 twice');
    expect(message()).toBe('clusters: must not be empty');
    expect(() => store([[0, 0.5], []])).toThrow(new TypeError('clusters[0].members[1]: must be an integer of 32 bits, got 0.5'));
    expect(errorOf(() => kv.quantizeClusterOutliers([{ id: 0, members: [0, 1, 2, 3, 4, 5], outliers: [1], keys: Float32Array.of(2, 4), values: Float32Array.of(2, 3) }], x, x))).toMatchObject({
      code: 'ERR_MISMATCH',
      argument: 'outlierKeys',
    });
    expect(errorOf(() => kv.quantizeClusterOutliers([{ id: 0, members: [0], outliers: [] }], x, { ...x, dims: [6, 2] }))).toMatchObject({ code: 'ERR_SHAPE', argument: 'values' });
  });

  it('of the wrong JavaScript types is a TypeError that names what is wrong', () => {
    const stored = kv.quantizeClusterOutliers([{ id: 0, members: [0, 1, 2], outliers: [1] }], { dims: [3, 2], data: noise(6) }, { dims: [3, 2], data: noise(6) });
    const changed = (change: object) => ({ ...stored[0]!, ...change }) as never;
    const restore = (change: object) => () => kv.dequantizeClusterOutliers(changed(change));
    expect(restore({ members: undefined })).toThrow(new TypeError('cluster.members: must be an array, got undefined'));
    expect(restore({ tail: [0.5] })).toThrow(new TypeError('cluster.tail[0]: must be an integer of 32 bits, got 0.5'));
    expect(restore({ outlierKeys: undefined })).toThrow(new TypeError('quantized: must be an object, got undefined'));
    expect(restore({ tailKeys: {} })).toThrow(new TypeError('profile: must be a SortedProfile, got an Object'));
    const verify = (change: object) => () => kv.verifyClusterTokenConservation([changed(change)], 3);
    expect(verify({ outlierKeys: undefined })).toThrow(new TypeError('clusters[0].outlierKeys: must be an object, got undefined'));
    expect(verify({ tailValues: {} })).toThrow(new TypeError('clusters[0].tailValues.dims: must be an array of integers, got undefined'));
    expect(verify({})()).toMatchObject({ input: 3 });
    stored[0]!.dispose();
  });

  it('is checked again by verifyClusterTokenConservation', () => {
    const stored = store([[0, 2, 4], [2]], [[1, 3, 5], [5]]);
    const verify = (change: object, tokens = 6) => errorOf(() => kv.verifyClusterTokenConservation([{ ...stored[0]!, ...change }, stored[1]!], tokens)).message;
    expect(kv.verifyClusterTokenConservation(stored, 6)).toEqual({ input: 6, member: 6, outlier: 2, tail: 4 });
    expect(verify({ tail: Int32Array.of(0) })).toBe('cluster 0 members: must each be stored once, as outlier or in the tail, got token 4 in neither');
    expect(verify({ outlierKeys: null })).toBe('cluster 0 outlierK: must store 1 tokens, got 0');
    expect(verify({ tailValues: null })).toBe('cluster 0 tailV: must store 2 tokens, got 0');
    expect(verify({ id: 1 })).toBe('clusters: must have ids of their own, got 1 twice');
    expect(verify({}, 7)).toBe('clusters: must be an exact partition of the tokens, got token 6 in no cluster');
    for (const cluster of stored) cluster.dispose();
  });
});

describe('the cluster bank', () => {
  for (const { key, name, ...parameters } of casesOf('bank')) {
    it(`gives the vectors of ${name}`, () => {
      const [, , kvHeads, headDim] = tensor(key, 'k0').dims as [number, number, number, number];
      using bank = kv.createClusterBank({ kvHeads, headDim, maxClusters: parameters.max_clusters });
      const options = {
        birthThreshold: parameters.birth_threshold,
        outlierTopK: parameters.outlier_top_k,
        ...(parameters.merge_threshold === null ? {} : { mergeThreshold: parameters.merge_threshold }),
      };
      for (let i = 0; i < parameters.chunks; ++i) {
        const keys = tensor(key, `k${i}`);
        const values = tensor(key, `v${i}`);
        const receipt = bank.ingest(keys, values, options);
        const wanted = parameters.receipts[i]!;
        expect(receipt).toMatchObject({ birthed: wanted.birthed, updated: wanted.soft_update_applied, merged: wanted.merged });
        expectNear([receipt.misfitScalar], [wanted.misfit_scalar], 1e-4);
        for (const { id, members, outliers, misfit } of receipt.perCluster) {
          expectNear([misfit], [wanted.misfit[id]!], 1e-4);
          if (!has(key, `s${i}_c${id}_members`)) continue;
          expect(Array.from(members)).toEqual(list(key, `s${i}_c${id}_members`));
          expect(Array.from(outliers)).toEqual(list(key, `s${i}_c${id}_outliers`));
        }
        expect(bank.clusters).toBe(wanted.n_clusters);
        for (const [array, field] of [['count', 'count'], ['meanKeys', 'mu_k'], ['meanValues', 'mu_v'], ['keyVariances', 'sigma_kk'], ['covariances', 'sigma_vk']] as const) {
          expectNear(bank.array(array), list(key, `s${i}_${field}`), 1e-4, 1e-4);
        }
        // What the receipt names can be stored.
        const flat = ({ data, dims }: typeof keys) => ({ data, dims: [dims[0]! * dims[1]!, dims[2]!, dims[3]!] });
        const stored = kv.quantizeClusterOutliers(receipt.perCluster.filter(({ members }) => members.length > 0), flat(keys), flat(values));
        expect(kv.verifyClusterTokenConservation(stored, keys.dims[0]! * keys.dims[1]!).member).toBe(keys.dims[0]! * keys.dims[1]!);
        for (const cluster of stored) cluster.dispose();
      }
    });
  }

  it('counts nothing in birthAndMerge without a birth, and clones', () => {
    using bank = kv.createClusterBank({ kvHeads: 1, headDim: 2, maxClusters: 1 });
    expect(bank).toBeInstanceOf(ClusterBank);
    const chunk = { dims: [1, 8, 1, 2], data: noise(16) };
    expect(bank.birthAndMerge(chunk, chunk)).toMatchObject({ birthed: true, updated: false });
    using copy = bank.clone();
    expect(bank.birthAndMerge(chunk, chunk)).toMatchObject({ birthed: false, updated: false });
    expect(Array.from(bank.array('count'))).toEqual([8]);
    expect(bank.ingest(chunk, chunk)).toMatchObject({ birthed: false, updated: true });
    expect(Array.from(bank.array('count'))).toEqual([16]);
    expect(Array.from(copy.array('count'))).toEqual([8]);
  });

  it('is left as it was by bad input', () => {
    using bank = kv.createClusterBank({ kvHeads: 1, headDim: 2, maxClusters: 2 });
    const chunk = { dims: [1, 8, 1, 2], data: noise(16) };
    bank.ingest(chunk, chunk);
    const before = hex(bank.array('covariances'));
    expect(errorOf(() => bank.ingest({ dims: [1, 8, 2, 1], data: noise(16) }, chunk))).toMatchObject({ code: 'ERR_SHAPE', argument: 'keys' });
    expect(errorOf(() => bank.ingest(chunk, { dims: [8, 1, 1, 2], data: noise(16) }))).toMatchObject({ code: 'ERR_SHAPE', argument: 'values' });
    expect(errorOf(() => bank.ingest(chunk, { ...chunk, data: noise(16).fill(Number.NaN, 3) }))).toMatchObject({ code: 'ERR_NON_FINITE', argument: 'values' });
    expect(errorOf(() => bank.ingest(chunk, chunk, { outlierTopK: -1 })).code).toBe('ERR_ARGUMENT');
    expect(errorOf(() => bank.array('sums' as 'count')).code).toBe('ERR_ARGUMENT');
    expect(hex(bank.array('covariances'))).toBe(before);
    expect(errorOf(() => kv.createClusterBank({ kvHeads: 0, headDim: 2, maxClusters: 2 })).message).toBe('kvHeads: must be an integer from 1 to 1048576, got 0');
  });
});

describe('measures', () => {
  it('rmse and errorPerToken compare any two tensors', () => {
    const a = { dims: [3, 2], data: Float32Array.of(1, 2, 3, 4, 5, 6) };
    const b = { dims: [3, 2], data: Float64Array.of(1, 2, 3, 7, 5, 2) };
    expect(kv.rmse(a, b)).toBe(Math.sqrt(25 / 6));
    expect(Array.from(kv.errorPerToken(a, b))).toEqual([0, 1.5, 2]);
    const x = { dims: [2, 16, 8], data: noise(256) };
    using quantized = kv.quantize(x, { spec: 'int8/tensor/given', scale: 0.25 });
    expect(kv.rmse(x, quantized)).toBeCloseTo(quantized.measure(x).rmse, 14);
    expect(errorOf(() => kv.rmse(a, noise(6)))).toMatchObject({ code: 'ERR_SHAPE', argument: 'b', expected: '[3, 2]' });
    expect(errorOf(() => kv.rmse(a, { dims: [3, 2], data: new Float32Array(6).fill(Number.NaN, 5) })).message).toBe('b: values must be finite, got NaN at index 5');
  });

  it('fidelity: top-1 agreement and KL in nats', () => {
    const reference = { dims: [2, 3], data: Float64Array.of(Math.log(0.5) + 7, Math.log(0.25) + 7, Math.log(0.25) + 7, 1, 2, 3) };
    const logits = { dims: [2, 3], data: Float64Array.of(Math.log(0.25), Math.log(0.5), Math.log(0.25), 1, 2, 3) };
    const result = kv.fidelity(reference, logits);
    expect(result).toMatchObject({ top1: 0.5, positions: 2 });
    expect(result.maxKl).toBeCloseTo(0.25 * Math.log(2), 14);
    expect(result.meanKl).toBeCloseTo(0.125 * Math.log(2), 14);
    expect(kv.fidelity(reference, reference)).toEqual({ top1: 1, meanKl: 0, maxKl: 0, positions: 2 });
    expect(errorOf(() => kv.fidelity(reference, { ...logits, dims: [3, 2] })).code).toBe('ERR_SHAPE');
    expect(errorOf(() => kv.fidelity({ ...reference, data: new Float64Array(6).fill(Number.NaN) }, logits)).message).toBe('reference: logits must be finite or -Infinity, got NaN at index 0');
  });

  it('ksDistance of two tensors and of a tensor to a fit', () => {
    expect(kv.ksDistance(Float32Array.of(1, 2, 3, 4), Float32Array.of(3.5, 4.5, 5.5, 6.5))).toBe(0.75);
    const x = noise(2048);
    using profile = kv.fitSortedProfile(x, { threshold: 1 });
    expect(kv.ksDistance(x, profile)).toBe(profile.d);
  });

  it("memoryRatio: the study's figure and exact ones", () => {
    expect(kv.memoryRatio(4)).toBeCloseTo(3.556, 3);
    expect(kv.memoryRatio(3)).toBeCloseTo(4.571, 3);
    expect(kv.memoryRatio({ bits: 8, block: 32, scaleBits: 16 })).toBeCloseTo(2 / 1.0625, 12);
    expect(kv.memoryRatio(kv.quantizeKvCache(noise(1024)))).toBe(2048 / 1028);
    using quantized = kv.quantize({ dims: [1, 1, 16, 64], data: noise(1024) }, { spec: 'int8/tensor/given', scale: 0.1 });
    expect(kv.memoryRatio(quantized)).toBe(2048 / quantized.byteLength);
    expect(errorOf(() => kv.memoryRatio(0)).message).toBe('bits: must be finite and > 0, got 0');
    expect(() => kv.memoryRatio('4' as never)).toThrow(new TypeError('of: must be an object, got "4"'));
  });
});
