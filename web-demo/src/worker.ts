// SPDX-License-Identifier: Apache-2.0
// Reads files, quantizes pages, measures; knows the library and nothing of the page. One request is answered at a time; a newer
// one ends an older one between two pages.
import { KvPagesError, load } from 'kvpages';
import type { DenseTensor, KvPages, PageSource, QuantizedTensor } from 'kvpages';
import { keyValueLayers, readSafetensors } from 'kvpages/safetensors';
import type { FormatChoice, Reply, Request, RunRequest, SideResult } from './protocol.js';

const send = (reply: Reply, transfer: Transferable[] = []) => self.postMessage(reply, { transfer });

type File = ReturnType<typeof readSafetensors>;
let layers: ReturnType<typeof keyValueLayers<File['tensors'] extends ReadonlyMap<string, infer T> ? T : never>> = [];
let newest = 0;

const started = load().then((kv) => {
  const engine = `kvpages ${kv.version}, WebAssembly, ${kv.kernels} kernels.`;
  send({ type: 'ready', engine, formats: offered(kv) });
  return kv;
});
started.catch((error: unknown) => send({ type: 'failed', id: 0, sentence: sentence(error, 'The library could not be loaded') }));

/** The formats that this build takes for a page, plain ones first. */
function offered(kv: KvPages): FormatChoice[] {
  const { types, presets } = kv.formats();
  const probe = { data: new Float32Array(16 * 64).fill(1), dims: [1, 1, 16, 64] };
  const works = (spec: string, side: 'key' | 'value') => {
    try {
      kv.quantize(probe, { spec, side }).dispose();
      return true;
    } catch {
      return false;
    }
  };
  const coded = types.filter((type) => type.family === 'integer' || type.family === 'float').map((type) => type.name);
  const levels = types.filter((type) => type.family === 'levels').map((type) => type.name);
  const axes: Array<[group: string, suffix: string, words: string]> = [
    ['One scale per page', '/tensor', 'per page'],
    ['One scale per token and head', '/token', 'per token'],
    ['One scale per 16 channels of a token', '/token/16', 'per 16 channels'],
    ['One scale per channel and 16 tokens', '/channel/16', 'per channel, 16 tokens'],
  ];
  const choices: Array<[group: string, spec: string, label: string]> = [
    ...axes.flatMap(([group, suffix, words]) => coded.map((type): [string, string, string] => [group, type + suffix, `${type} ${words}`])),
    ...levels.map((type): [string, string, string] => ['Level tables', `${type}/token+hadamard`, `${type} per token, rotated`]),
    ...types.filter((type) => type.family === 'scheme').map((type): [string, string, string] => ['Whole schemes', type.name, type.name]),
    // A centred preset takes its centre from the first tokens of a cache, which single pages do not have.
    ...presets
      .filter((preset) => !preset.key.includes('+center') && !types.some((type) => type.name === preset.name))
      .map(({ name, key }): [string, string, string] => {
        const block = Number(/\/channel\/(\d+)/.exec(key)?.[1] ?? 0);
        return ['Presets', name, block > 16 ? `${name}, made for pages of ${block} tokens` : name];
      }),
    ...types.filter((type) => type.family === 'dense').map((type): [string, string, string] => ['Dense', type.name, type.name]),
  ];
  return choices.filter(([, spec]) => works(spec, 'key') && works(spec, 'value')).map(([group, spec, label]) => ({ group, spec, label }));
}

function sentence(error: unknown, start: string): string {
  const text = error instanceof Error ? error.message : String(error);
  return `${start}: ${text}${text.endsWith('.') ? '' : '.'}`;
}

function open(id: number, name: string, bytes: ArrayBuffer): void {
  const file = readSafetensors(bytes);
  const found = keyValueLayers(file);
  if (found.length === 0) {
    throw new Error('it holds no keys and values; the tensors must be named like past_key_values.0.key and past_key_values.0.value');
  }
  const entries = found.map(({ layer, key, value }) => {
    const [headDim = 0, tokens = 0, kvHeads = 1, batch = 1] = [...key.dims].reverse();
    if (key.dims.length < 2 || headDim < 1 || tokens < 1 || kvHeads < 1) throw new Error(`the keys of layer ${layer} have the shape [${key.dims.join(', ')}], which is no [batch, KV heads, tokens, head_dim]`);
    if (batch !== 1) throw new Error(`layer ${layer} holds a batch of ${batch}; this page shows one sequence`);
    if (value.dims.at(-2) !== tokens) throw new Error(`layer ${layer} has ${tokens} keys and ${value.dims.at(-2)} values`);
    return { layer, tokens, kvHeads, headDim };
  });
  layers = found;
  send({ type: 'opened', id, file: { name, model: file.metadata['model'] ?? '', layers: entries } });
}

function oneHead(tensor: DenseTensor, head: number): Float32Array<ArrayBuffer> {
  const [, , tokens, width] = tensor.dims;
  return new Float32Array((tensor.data as Float32Array).slice(head * tokens * width, (head + 1) * tokens * width));
}

function encode(kv: KvPages, source: QuantizedTensor, spec: string, side: 'key' | 'value', head: number): { encoded: QuantizedTensor; result: SideResult } {
  const dense = source.dequantize();
  const encoded = kv.quantize(dense, { spec, side });
  const { rmse, maxError, elements } = encoded.measure(dense);
  return {
    encoded,
    result: {
      original: oneHead(dense, head),
      restored: oneHead(encoded.dequantize(), head),
      headDim: dense.dims[3],
      spec: encoded.spec ?? spec,
      elements,
      bytesBefore: source.byteLength,
      bytesAfter: encoded.byteLength,
      rmse,
      maxError,
    },
  };
}

const pause = () => new Promise<void>((resolve) => setTimeout(resolve, 0));

async function run(kv: KvPages, id: number, request: RunRequest): Promise<void> {
  const layer = layers.find((candidate) => candidate.layer === request.layer);
  if (!layer) throw new Error(`the file has no layer ${request.layer}`);
  const begun = performance.now();
  const held: Array<{ dispose(): void }> = [];
  const hold = <T extends { dispose(): void }>(object: T): T => {
    held.push(object);
    return object;
  };
  try {
    const dense = hold(kv.splitIntoPages(layer.key, layer.value, { pageTokens: request.pageTokens }));
    const sources: PageSource[] = [];
    for (let i = 0; i < dense.pages.length; ++i) {
      const page = dense.page(i);
      hold(page.key);
      hold(page.value);
      if (!request.pages.includes(i)) {
        sources.push(page);
        continue;
      }
      const where = (side: string, error: unknown) => {
        if (error instanceof KvPagesError) throw new Error(sentence(error, `${side} of page ${i}`));
        throw error;
      };
      const side = (name: 'key' | 'value') => {
        try {
          return encode(kv, page[name], request[name], name, request.head);
        } catch (error) {
          return where(name === 'key' ? 'K' : 'V', error);
        }
      };
      const key = side('key');
      const value = side('value');
      sources.push({ ...page, key: hold(key.encoded), value: hold(value.encoded) });
      const arrays = [key.result.original, key.result.restored, value.result.original, value.result.restored];
      send(
        { type: 'page', id, result: { page: i, start: page.start, length: page.length, key: key.result, value: value.result } },
        arrays.map((array) => array.buffer),
      );
      await pause();
      if (id !== newest) return;
    }
    const cache = hold(kv.createPagedCache(sources));
    const bytes = cache.serialize();
    const back = hold(kv.parse(bytes));
    const file = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength) as ArrayBuffer;
    send({ type: 'done', id, file, checked: sameValues(cache, back) ? 'equal' : 'different', milliseconds: performance.now() - begun }, [file]);
  } finally {
    for (const object of held) object.dispose();
  }
}

/** Whether every page of two caches decodes to the same values. */
function sameValues(a: ReturnType<KvPages['parse']>, b: ReturnType<KvPages['parse']>): boolean {
  const bits = (tensor: QuantizedTensor) => {
    const { data } = tensor.dequantize();
    tensor.dispose();
    return new Uint32Array((data as Float32Array).buffer);
  };
  return (
    a.pages.length === b.pages.length &&
    a.pages.every((_, i) => {
      const [one, other] = [a.page(i), b.page(i)];
      return (['key', 'value'] as const).every((side) => {
        const [x, y] = [bits(one[side]), bits(other[side])];
        return x.length === y.length && x.every((word, j) => word === y[j]);
      });
    })
  );
}

self.addEventListener('message', async ({ data: request }: MessageEvent<Request>) => {
  const { id } = request;
  newest = id;
  try {
    if (request.type === 'open') open(id, request.name, request.bytes);
    else await run(await started, id, request.run);
  } catch (error) {
    send({ type: 'failed', id, sentence: sentence(error, request.type === 'open' ? `${request.name} cannot be used` : 'Not quantized') });
  }
});
