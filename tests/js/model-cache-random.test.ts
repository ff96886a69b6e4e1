// SPDX-License-Identifier: Apache-2.0
// Any sequence of append, freeze, fork, truncate, drop, save and restore against a model of it: lists of pages of rows.
import { describe, expect, it } from 'vitest';
import type { KvPages, ModelCache } from '../../js/index.js';
import { backend, errorOf, loadHere, noise, sha256 } from './support.js';

const [layers, kvHeads, headDim, pageTokens] = [2, 2, 16, 8] as const;
const row = kvHeads * headDim;

/** One token of one side of one layer, `[kv_heads, head_dim]`. */
type Row = Float32Array;
interface Page {
  start: number;
  kept: boolean;
  frozen: boolean;
  /** Rows as they are read: rounded to the type of dense pages, or what encoding left of them. */
  readonly rows: { key: Row[]; value: Row[] };
}
interface Layer {
  end: number;
  pages: Page[];
}
type Model = Layer[];
const endOf = (page: Page) => page.start + page.rows.key.length;
const copyOf = (model: Model): Model =>
  model.map(({ end, pages }) => ({
    end,
    pages: pages.map((page) => ({ ...page, rows: { key: [...page.rows.key], value: [...page.rows.value] } })),
  }));

interface Rules {
  readonly name: string;
  readonly key: string;
  readonly value: string;
  readonly hot: 'bf16' | 'f32';
  readonly keepFirst: number;
  readonly keepRecent: number;
  /** Of everything that was saved. */
  readonly digest: string;
}
const all: readonly Rules[] = [
  {
    name: 'scales per channel',
    key: 'int4/channel/8/mse/e4m3',
    value: 'int8/token',
    hot: 'f32',
    keepFirst: 4,
    keepRecent: 0,
    digest: '211acea9560b49ee1eb6000e9df380e5e399eb7fd01f025512c164000e5a8b33',
  },
  {
    name: 'recent tokens stay',
    key: 'uint3/head/minmax',
    value: 'nvfp4',
    hot: 'bf16',
    keepFirst: 0,
    keepRecent: 13,
    digest: 'e96c0df0906a9890a5ad5a441360a3aefb15e93a411a74910800d655cc019299',
  },
  {
    name: 'rotated levels',
    key: 'lm4/token/64/mse/e4m3+hadamard',
    value: 'lm3/token/16/mse/f16+hadamard',
    hot: 'bf16',
    keepFirst: 3,
    keepRecent: 5,
    digest: '258b8136531a56f85072397fc06a8157cfcf9385e7b63549dca6e03ac855e7f9',
  },
];

function rounded(x: Float32Array, hot: Rules['hot']): Float32Array {
  if (hot === 'f32') return x;
  const bits = new Uint32Array(x.slice().buffer);
  for (let i = 0; i < bits.length; ++i) bits[i] = (bits[i]! + 0x7fff + ((bits[i]! >>> 16) & 1)) & 0xffff0000;
  return new Float32Array(bits.buffer);
}
/** Rows as a tensor `[kv_heads, tokens, head_dim]`, and back. */
function tensorOf(rows: readonly Row[]): { dims: number[]; data: Float32Array } {
  const data = new Float32Array(rows.length * row);
  rows.forEach((values, t) => {
    for (let h = 0; h < kvHeads; ++h) data.set(values.subarray(h * headDim, (h + 1) * headDim), (h * rows.length + t) * headDim);
  });
  return { dims: [kvHeads, rows.length, headDim], data };
}
function rowsOf(data: ArrayLike<number>, count: number): Row[] {
  return Array.from({ length: count }, (_, t) =>
    Float32Array.from({ length: row }, (_, i) => data[(Math.floor(i / headDim) * count + t) * headDim + (i % headDim)]!),
  );
}

class Play {
  readonly caches: Array<{ cache: ModelCache; model: Model }> = [];
  #seed: number;
  #tokens = 0;

  constructor(
    readonly kv: KvPages,
    readonly rules: Rules,
    seed: number,
  ) {
    this.#seed = seed;
    const { key, value, hot, keepFirst, keepRecent } = rules;
    const cache = kv.createCache({ layers, kvHeads, headDim, pageTokens, key, value, hot, keepFirst, keepRecent });
    this.caches.push({ cache, model: Array.from({ length: layers }, () => ({ end: 0, pages: [] })) });
  }

  /** An integer below `n`. */
  below(n: number): number {
    this.#seed = (Math.imul(this.#seed, 1664525) + 1013904223) >>> 0;
    return Math.floor((this.#seed / 2 ** 32) * n);
  }
  rows(count: number): { key: Row[]; value: Row[] } {
    const some = () => Array.from({ length: count }, () => noise(row, ++this.#tokens));
    return { key: some(), value: some() };
  }

  freeze({ end, pages }: Layer): number {
    const { keepRecent, key, value } = this.rules;
    let frozen = 0;
    for (const [i, page] of pages.entries()) {
      const closed = page.frozen || i + 1 < pages.length || page.rows.key.length === (page.kept ? this.rules.keepFirst : pageTokens);
      if (page.kept || page.frozen || !closed) continue;
      if (end - endOf(page) < keepRecent) break;
      for (const [side, spec] of [['key', key], ['value', value]] as const) {
        using codes = this.kv.quantize({ type: 'f32', ...tensorOf(page.rows[side]) }, spec);
        page.rows[side] = rowsOf(codes.dequantize().data, page.rows[side].length);
      }
      page.frozen = true;
      ++frozen;
    }
    return frozen;
  }
  append(layer: Layer, rows: { key: Row[]; value: Row[] }): void {
    this.freeze(layer);
    rows.key.forEach((key, i) => {
      let page = layer.pages.at(-1);
      const room = page === undefined || page.frozen ? 0 : page.kept ? this.rules.keepFirst : pageTokens;
      if (page === undefined || page.rows.key.length >= room) {
        page = { start: layer.end, kept: layer.end === 0 && this.rules.keepFirst > 0, frozen: false, rows: { key: [], value: [] } };
        layer.pages.push(page);
      }
      page.rows.key.push(rounded(key, this.rules.hot));
      page.rows.value.push(rounded(rows.value[i]!, this.rules.hot));
      ++layer.end;
    });
  }
  truncate(model: Model, n: number): void {
    for (const layer of model) {
      layer.pages = layer.pages.filter((page) => page.start < n);
      const last = layer.pages.at(-1);
      last?.rows.key.splice(n - last.start);
      last?.rows.value.splice(n - last.start);
      layer.end = n;
    }
  }

  async step(): Promise<void> {
    const at = this.below(this.caches.length);
    const { cache, model } = this.caches[at]!;
    const end = model[0]!.end;
    switch (this.below(10)) {
      case 0:
      case 1:
      case 2: {
        const rows = Array.from({ length: layers }, () => ({ key: [] as Row[], value: [] as Row[] }));
        const count = 1 + this.below(this.below(3) === 0 ? 30 : 4);
        for (const each of rows) Object.assign(each, this.rows(count));
        cache.appendAll(rows.map((each) => tensorOf(each.key)), rows.map((each) => tensorOf(each.value)));
        model.forEach((layer, i) => this.append(layer, rows[i]!));
        break;
      }
      case 3: {
        // Layer by layer, in portions of their own; what needs them even is refused in between.
        const count = 1 + this.below(12);
        model.forEach((layer, i) => {
          for (let left = count; left > 0; ) {
            const rows = this.rows(Math.min(left, 1 + this.below(7)));
            cache.append(i, tensorOf(rows.key), tensorOf(rows.value));
            this.append(layer, rows);
            left -= rows.key.length;
          }
          if (i > 0) return;
          expect(errorOf(() => cache.serialize())).toMatchObject({ code: 'ERR_MISMATCH', layer: 1, expected: `${layer.end}`, actual: `${end}` });
          expect(errorOf(() => cache.attend(1, { dims: [kvHeads, 1, headDim], data: noise(row) }))).toMatchObject({ code: 'ERR_MISMATCH', layer: 1 });
          expect(errorOf(() => cache.truncate(layer.end))).toMatchObject({ code: 'ERR_ARGUMENT', layer: 1 });
        });
        break;
      }
      case 4: {
        const frozen = model.reduce((sum, layer) => sum + this.freeze(layer), 0);
        const { key, value } = cache.freeze();
        expect([key.pages, value.pages]).toEqual([frozen, frozen]);
        break;
      }
      case 5:
        if (this.caches.length < 4) this.caches.push({ cache: cache.fork(), model: copyOf(model) });
        else this.caches.splice(at, 1)[0]!.cache.dispose();
        break;
      case 6: {
        const n = Math.max(0, end - this.below(this.below(4) === 0 ? end + 1 : 20));
        const { pages } = model[0]!;
        const behind = pages.find((page) => endOf(page) > n);
        const held = pages.filter((page) => endOf(page) <= n).map(endOf).at(-1) ?? 0;
        if (n > held && n < (behind?.start ?? end)) {
          expect(errorOf(() => cache.truncate(n))).toMatchObject({ code: 'ERR_ARGUMENT', layer: 0 });
        } else {
          cache.truncate(n);
          this.truncate(model, n);
        }
        break;
      }
      case 7: {
        const n = this.below(end + 1);
        cache.dropBefore(n);
        for (const layer of model) layer.pages = layer.pages.filter((page) => page.kept || endOf(page) > n);
        break;
      }
      default: {
        const bytes = cache.serialize({ model: this.rules.name });
        const restored = this.below(2) === 0 ? this.kv.restore(bytes) : await this.kv.restoreAsync([bytes.subarray(0, 99), bytes.subarray(99)]);
        expect(restored.serialize({ model: this.rules.name })).toEqual(bytes);
        cache.dispose();
        this.caches[at] = { cache: restored, model };
      }
    }
  }

  compare(step: number): void {
    for (const { cache, model } of this.caches) {
      model.forEach((layer, i) => {
        expect(cache.tokensOf(i)).toBe(layer.end);
        expect(
          cache.pages(i).map(({ start, length, kept, key, value }) => ({ start, length, kept, key: key.frozen, value: value.frozen })),
          `step ${step}`,
        ).toEqual(
          layer.pages.map((page) => ({ start: page.start, length: page.rows.key.length, kept: page.kept, key: page.frozen, value: page.frozen })),
        );
        for (const page of layer.pages) {
          const have = cache.read(i, { start: page.start, end: endOf(page) });
          for (const side of ['key', 'value'] as const) {
            const { data } = tensorOf(page.rows[side]);
            const other = data.findIndex((value, k) => !Object.is(value, have[side].data[k]));
            expect(other, `step ${step}, layer ${i}, ${side} of the page at ${page.start}`).toBe(-1);
          }
        }
      });
    }
  }
}

/** What follows the header, which names the version that wrote it. */
const body = (bytes: Uint8Array<ArrayBuffer>) => bytes.slice(20 + new DataView(bytes.buffer).getUint32(12, true));

describe('any sequence of calls', () => {
  for (const rules of all) {
    it(`is what a list of pages says: ${rules.name}`, async () => {
      for (const kernels of backend === 'native' ? (['auto', 'reference'] as const) : (['auto'] as const)) {
        const kv = await loadHere({ kernels });
        const play = new Play(kv, rules, rules.name.length);
        const digests: string[] = [];
        for (let step = 0; step < 45; ++step) {
          await play.step();
          if (step % 10 === 9) play.compare(step);
          if (step % 15 === 14) {
            for (const { cache } of play.caches) digests.push(await sha256(body(cache.serialize())));
          }
        }
        expect(await sha256(new TextEncoder().encode(digests.join())), kernels).toBe(rules.digest);
        for (const { cache } of play.caches) cache.dispose();
        expect(kv.usedBytes).toBe(0);
      }
    }, 60_000);
  }
});
