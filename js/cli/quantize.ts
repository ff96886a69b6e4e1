// SPDX-License-Identifier: Apache-2.0
// kvpages quantize: keys and values of a safetensors file, cut into pages, encoded, written as a PagedCacheProto.
import type { KvPages, PageSource } from '../index.js';
import type { Arguments, Command } from './args.js';
import { Failure, placed, Progress, readInput, shown, writeOutput, writeStdout } from './io.js';
import { encode, layerNumbers, readLayers, Total } from './layers.js';
import type { Layer } from './layers.js';
import { backendOptions, loadFrom } from './load.js';
import { errorText, plural, table } from './text.js';

export const quantize: Command = {
  name: 'quantize',
  summary: 'Cut keys and values into pages, quantize them, write a PagedCacheProto',
  operands: ['IN.safetensors', 'OUT'],
  options: [
    { name: 'key', value: 'SPEC', help: 'format of the keys, a spec or a preset (int4/channel/16)' },
    { name: 'value', value: 'SPEC', help: 'format of the values (uint4/token)' },
    { name: 'page-tokens', value: 'N', help: 'tokens per page (16)' },
    { name: 'layer', value: 'N', help: 'layer to take from a file with several' },
    { name: 'pages', value: 'LIST', help: 'pages to quantize, others stay dense: all, full, or 0-3,5 (all)' },
    { name: 'quiet', help: 'no progress, no table' },
    ...backendOptions,
  ],
  notes: [
    'One PagedCacheProto holds one layer. A file with several needs --layer N, or {layer} in OUT:\n  kvpages quantize chat.safetensors layer-{layer}.pb',
    'Each page is encoded by itself with scales of its own, also the last one, which may be shorter.',
  ],
  async run(args) {
    const input = args.operand(0);
    const output = args.operand(1);
    const pageTokens = args.count('page-tokens', 1) ?? 16;
    const wanted = args.count('layer', 0);
    const selection = parsePages(args);
    const specs = { key: args.text('key') ?? 'int4/channel/16', value: args.text('value') ?? 'uint4/token' };
    const bytes = await readInput(input);
    const name = shown(input, 'standard input');
    const layers = chooseLayers(args, readLayers(bytes, name), wanted, output, name);
    const kv = await loadFrom(args);
    const progress = new Progress(args.flag('quiet'));
    const rows: string[][] = [];
    try {
      for (const [i, layer] of layers.entries()) {
        const where = layers.length > 1 ? `layer ${layer.layer} (${i + 1} of ${layers.length})` : `layer ${layer.layer}`;
        const result = await quantizeLayer(kv, layer, `${name}, layer ${layer.layer}`, specs, pageTokens, selection, (done, total) =>
          progress.show(`${where}: page ${done} of ${total}`, done === total && i === layers.length - 1),
        );
        const file = output.replaceAll('{layer}', String(layer.layer));
        await writeOutput(file, result.bytes);
        rows.push([shown(file, 'standard output'), String(layer.layer), ...result.row]);
      }
    } finally {
      progress.close();
    }
    if (args.flag('quiet')) return;
    const text = table(['file', '>layer', '>pages', '>tokens', '>dense bytes', '>bytes', '>bits', '>K RMSE', '>V RMSE', '>largest error'], rows);
    if (output === '-') process.stderr.write(text);
    else await writeStdout(text);
  },
};

function chooseLayers(args: Arguments, layers: Layer[], wanted: number | undefined, output: string, name: string): Layer[] {
  if (wanted !== undefined) {
    const layer = layers.find((candidate) => candidate.layer === wanted);
    if (!layer) throw new Failure(`${name} has no layer ${wanted}; it has ${layerNumbers(layers)}`);
    return [layer];
  }
  if (layers.length > 1 && !output.includes('{layer}')) {
    args.fail(`${name} has ${plural(layers.length, 'layer')}: choose one with --layer N, or put {layer} into the name of the output`);
  }
  return layers;
}

type Selection = 'all' | 'full' | ReadonlyArray<readonly [first: number, last: number]>;

function parsePages(args: Arguments): Selection {
  const text = args.text('pages') ?? 'all';
  if (text === 'all' || text === 'full') return text;
  return text.split(',').map((part): readonly [number, number] => {
    const match = /^(\d{1,9})(?:-(\d{1,9}))?$/.exec(part);
    if (!match) return args.fail(`--pages must be all, full, or numbers and ranges such as 0-3,5, got ${text}`);
    const first = Number(match[1]);
    const last = match[2] === undefined ? first : Number(match[2]);
    if (last < first) args.fail(`--pages: the range ${part} ends before it begins`);
    return [first, last];
  });
}

async function quantizeLayer(
  kv: KvPages,
  layer: Layer,
  place: string,
  specs: { key: string; value: string },
  pageTokens: number,
  selection: Selection,
  report: (done: number, total: number) => void,
): Promise<{ bytes: Uint8Array; row: string[] }> {
  const dense = kv.splitIntoPages(layer.key, layer.value, { pageTokens });
  const count = dense.pages.length;
  if (Array.isArray(selection)) {
    const beyond = selection.find(([, last]) => last >= count);
    if (beyond) throw new Failure(`layer ${layer.layer} has the pages 0 to ${count - 1}, not ${beyond[1]}`);
  }
  const key = new Total();
  const value = new Total();
  const pages: PageSource[] = [];
  for (let i = 0; i < count; ++i) {
    const page = dense.page(i);
    const chosen =
      selection === 'all' || (selection === 'full' ? page.length === pageTokens : selection.some(([first, last]) => first <= i && i <= last));
    if (chosen) {
      const k = placed(`${place}, K of page ${i}`, () => encode(kv, page.key, specs.key, 'key'));
      const v = placed(`${place}, V of page ${i}`, () => encode(kv, page.value, specs.value, 'value'));
      key.add(k.figures, k.encoded.byteLength);
      value.add(v.figures, v.encoded.byteLength);
      pages.push({ ...page, key: k.encoded, value: v.encoded });
      page.key.dispose();
      page.value.dispose();
    } else {
      pages.push(page);
    }
    report(i + 1, count);
    // Lets the terminal show the progress and Ctrl-C through.
    await new Promise((resolve) => setImmediate(resolve));
  }
  const cache = kv.createPagedCache(pages);
  const bytes = cache.serialize();
  const elements = key.elements + value.elements;
  const row = [
    String(count),
    String(cache.tokens),
    String(dense.byteLength),
    String(cache.byteLength),
    elements === 0 ? '' : ((8 * (key.bytes + value.bytes)) / elements).toFixed(2),
    elements === 0 ? '' : errorText(key.rmse),
    elements === 0 ? '' : errorText(value.rmse),
    elements === 0 ? '' : errorText(Math.max(key.maxError, value.maxError)),
  ];
  for (const object of [cache, dense, ...pages.flatMap((page) => [page.key, page.value])]) (object as { dispose(): void }).dispose();
  return { bytes, row };
}
