// SPDX-License-Identifier: Apache-2.0
// kvpages compare: what each format costs and loses on the keys and values of a file.
import { KvPagesError } from '../index.js';
import type { KvPages, PagedCache } from '../index.js';
import type { Command } from './args.js';
import { errorAt, Failure, Progress, readInput, shown, writeStdout } from './io.js';
import { encode, layerNumbers, readLayers, Total } from './layers.js';
import { backendOptions, loadFrom } from './load.js';
import { errorText, table } from './text.js';

interface Row {
  name: string;
  key: string;
  value: string;
  bits?: number;
  keyRmse?: number;
  valueRmse?: number;
  keyMax?: number;
  valueMax?: number;
  refused?: string;
}

/** Beside the presets: the plain ways to divide a page, so that one sees what axis, block and search are worth. */
const plain = [
  'f16', 'int8/tensor', 'int8/token', 'int4/tensor', 'int4/token/16', 'int4/channel/16', 'int4/channel/16/mse', 'uint4/token/16',
  'uint4/channel/16', 'int3/channel/16', 'uint3/channel/16', 'int2/channel/16', 'uint2/channel/16', 'e4m3/tensor',
];

export const compare: Command = {
  name: 'compare',
  summary: 'Table of error and size of many formats on the keys and values of a file',
  operands: ['FILE'],
  options: [
    { name: 'specs', value: 'LIST', help: 'formats to compare, separated by commas: a spec or preset, or K:V (a broad choice)' },
    { name: 'layer', value: 'N', help: 'one layer only' },
    { name: 'page-tokens', value: 'N', help: 'tokens per page (16)' },
    { name: 'json', help: 'the same as JSON' },
    { name: 'quiet', help: 'no progress' },
    ...backendOptions,
  ],
  notes: ['Bits per element count codes, scales, zero points and global scales, mean of K and V. Every page is encoded by itself; a centre\n(+center, kv4, kv8) is taken from the page and counted with it, where a whole cache has one for all pages. A scale along tokens\nends with its page: kv3 is what it is in a cache with --page-tokens 64, kivi4 and kivi2 with 32.'],
  async run(args) {
    const input = args.operand(0);
    const pageTokens = args.count('page-tokens', 1) ?? 16;
    const wanted = args.count('layer', 0);
    const name = shown(input, 'standard input');
    const bytes = await readInput(input);
    const all = readLayers(bytes, name);
    const layers = wanted === undefined ? all : all.filter((layer) => layer.layer === wanted);
    if (layers.length === 0) throw new Failure(`${name} has no layer ${wanted}; it has ${layerNumbers(all)}`);
    const kv = await loadFrom(args);
    const pairs = choose(kv, args.text('specs'));
    const caches = layers.map((layer) => kv.splitIntoPages(layer.key, layer.value, { pageTokens }));
    const progress = new Progress(args.flag('quiet'));
    const rows: Row[] = [];
    try {
      for (const [i, pair] of pairs.entries()) {
        progress.show(`${pair.name} (${i + 1} of ${pairs.length})`, i === pairs.length - 1);
        rows.push(measure(kv, caches, pair, (i, side, page) => `${name}, layer ${layers[i]!.layer}, ${side === 'key' ? 'K' : 'V'} of page ${page}`));
        await new Promise((resolve) => setImmediate(resolve));
      }
    } finally {
      progress.close();
    }
    if (args.flag('json')) {
      await writeStdout(`${JSON.stringify({ file: input, layers: layers.map((layer) => layer.layer), pageTokens, rows }, null, 2)}\n`);
      return;
    }
    const cells = rows.map((row) =>
      row.refused === undefined
        ? [row.name, row.bits!.toFixed(2), errorText(row.keyRmse!), errorText(row.valueRmse!), errorText(row.keyMax!), errorText(row.valueMax!)]
        : [row.name, row.refused],
    );
    await writeStdout(table(['format', '>bits', '>K RMSE', '>V RMSE', '>K largest', '>V largest'], cells.filter((row) => row.length > 2)));
    const refused = cells.filter((row) => row.length === 2);
    if (refused.length > 0) await writeStdout(`\nNot for these pages:\n${table(['format', 'reason'], refused)}`);
    if (refused.length === cells.length) throw new Failure('none of the formats takes these pages');
  },
};

function choose(kv: KvPages, list: string | undefined): Array<Pick<Row, 'name' | 'key' | 'value'>> {
  const one = (name: string) => {
    const [key = '', value = key] = name.split(':');
    return { name, key, value };
  };
  if (list !== undefined) return list.split(',').map((name) => one(name.trim()));
  return [...plain, ...kv.formats().presets.map((preset) => preset.name)].map(one);
}

/** `place`: words for a page of a cache. */
function measure(
  kv: KvPages,
  caches: readonly PagedCache[],
  pair: Pick<Row, 'name' | 'key' | 'value'>,
  place: (cache: number, side: 'key' | 'value', page: number) => string,
): Row {
  const totals = { key: new Total(), value: new Total() };
  let at = '';
  try {
    for (const [c, cache] of caches.entries()) {
      for (let i = 0; i < cache.pages.length; ++i) {
        const page = cache.page(i);
        for (const side of ['key', 'value'] as const) {
          at = place(c, side, i);
          const { encoded, figures } = encode(kv, page[side], pair[side], side);
          totals[side].add(figures, encoded.byteLength);
          encoded.dispose();
          page[side].dispose();
        }
      }
    }
  } catch (error) {
    // A spec that these shapes do not allow is a result; a word that is no spec at all is a mistake of the caller.
    if (!(error instanceof KvPagesError) || !['ERR_SHAPE', 'ERR_UNSUPPORTED', 'ERR_SPEC'].includes(error.code))
      throw errorAt(at, error);
    return { ...pair, refused: error.message };
  }
  return {
    ...pair,
    bits: (totals.key.bits + totals.value.bits) / 2,
    keyRmse: totals.key.rmse,
    valueRmse: totals.value.rmse,
    keyMax: totals.key.maxError,
    valueMax: totals.value.maxError,
  };
}
