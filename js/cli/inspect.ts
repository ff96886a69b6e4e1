// SPDX-License-Identifier: Apache-2.0
// kvpages inspect: what is in a file.
import type { KvPages, TensorInfo } from '../index.js';
import { keyValueLayers } from '../key-value-layers.js';
import { readSafetensors } from '../safetensors.js';
import type { Command } from './args.js';
import { placed, readInput, shown, writeStdout } from './io.js';
import { isSafetensors } from './layers.js';
import { backendOptions, loadFrom } from './load.js';
import { plural, shape, table } from './text.js';

export const inspect: Command = {
  name: 'inspect',
  summary: "Say what is in a file: a PagedCacheProto, a model cache's envelope or a safetensors file",
  operands: ['FILE'],
  options: [{ name: 'json', help: 'the same as JSON' }, ...backendOptions],
  async run(args) {
    const name = args.operand(0);
    const bytes = await readInput(name);
    const kv = isSafetensors(bytes) ? undefined : await loadFrom(args);
    const report = placed(shown(name, 'standard input'), () => (kv === undefined ? tensors(bytes) : isEnvelope(bytes) ? envelope(bytes, kv) : pages(bytes, kv)));
    if (args.flag('json')) {
      await writeStdout(`${JSON.stringify({ file: name, bytes: bytes.byteLength, ...report.json }, null, 2)}\n`);
    } else {
      await writeStdout(`${shown(name, 'standard input')}: ${report.headline}, ${plural(bytes.byteLength, 'byte')}\n${report.text}`);
    }
  },
};

interface Report {
  headline: string;
  text: string;
  json: object;
}

function tensors(bytes: Uint8Array): Report {
  const file = readSafetensors(bytes);
  const entries = [...file.tensors.values()];
  const layers = keyValueLayers(file);
  const metadata = Object.entries(file.metadata);
  const rows = entries.map((tensor) => [tensor.name, tensor.type, shape(tensor.dims), String(tensor.end - tensor.begin)]);
  const short = (text: string) => (text.length > 100 ? `${text.slice(0, 97)}...` : text);
  return {
    headline: `a safetensors file of ${plural(entries.length, 'tensor')}, keys and values of ${plural(layers.length, 'layer')}`,
    text:
      metadata.map(([key, value]) => `  ${key}: ${short(value)}\n`).join('') +
      table(['tensor', 'type', 'shape', '>bytes'], rows),
    json: {
      kind: 'safetensors',
      metadata: file.metadata,
      layers: layers.map((layer) => layer.layer),
      tensors: entries.map((tensor) => ({ name: tensor.name, type: tensor.type, dims: tensor.dims, bytes: tensor.end - tensor.begin })),
    },
  };
}

function pages(bytes: Uint8Array, kv: KvPages): Report {
  const cache = kv.parse(bytes);
  const side = (info: TensorInfo) => [info.format, String(info.byteLength), info.bitsPerElement?.toFixed(2) ?? ''];
  const rows = cache.pages.map((page, i) => [String(i), String(page.start), String(page.length), String(page.capacity), ...side(page.key), ...side(page.value)]);
  const first = cache.pages[0];
  const words = first === undefined ? '' : `  K ${shape(withoutTokens(first.key))}, V ${shape(withoutTokens(first.value))} (batch, KV heads, head_dim)\n`;
  return {
    headline: `a PagedCacheProto of ${plural(cache.pages.length, 'page')}, ${plural(cache.tokens, 'token')}`,
    text:
      (cache.name === undefined ? '' : `  name: ${cache.name}\n`) +
      (cache.docString === undefined ? '' : `  doc_string: ${cache.docString}\n`) +
      words +
      (rows.length === 0 ? '' : table(['>page', '>start', '>length', '>capacity', 'K', '>bytes', '>bits', 'V', '>bytes', '>bits'], rows)),
    json: {
      kind: 'PagedCacheProto',
      ...(cache.name === undefined ? {} : { name: cache.name }),
      ...(cache.docString === undefined ? {} : { docString: cache.docString }),
      tokens: cache.tokens,
      payloadBytes: cache.byteLength,
      pages: cache.pages,
    },
  };
}

/** The envelope's magic. */
function isEnvelope(bytes: Uint8Array): boolean {
  return [0x89, 0x4b, 0x56, 0x50].every((byte, i) => bytes[i] === byte);
}

function envelope(bytes: Uint8Array, kv: KvPages): Report {
  const cache = kv.restore(bytes);
  const stats = cache.stats();
  const rows = cache.layers.map((layer, i) => [
    String(i),
    String(layer.kvHeads),
    String(layer.key.headDim),
    layer.key.spec,
    String(layer.value.headDim),
    layer.value.spec,
    String(cache.pages(i).length),
  ]);
  return {
    headline: `the envelope of a model cache of ${plural(rows.length, 'layer')}, ${plural(cache.tokens, 'token')}`,
    text:
      `  model: ${cache.model || '(no tag)'}\n` +
      `  ${stats.bits.frozen.toFixed(2)} bits per element in frozen pages, ${stats.bits.overall.toFixed(2)} overall\n` +
      table(['>layer', '>KV heads', '>K dim', 'K', '>V dim', 'V', '>pages'], rows),
    json: {
      kind: 'envelope',
      model: cache.model,
      tokens: cache.tokens,
      tokenIds: cache.tokenIds.length,
      stats,
      layers: cache.layers.map((layer, i) => ({ ...layer, pages: cache.pages(i) })),
    },
  };
}

function withoutTokens({ dims: [batch, heads, , width] }: TensorInfo): number[] {
  return [batch, heads, width];
}
