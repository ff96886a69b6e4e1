#!/usr/bin/env node
// The main job: quantizes the pages of a real model's cache with several formats, saves them with one binding, reads them with
// the other, compares, and at a terminal serves the demo page. Uses the package by its public name.
import { createReadStream, mkdirSync, readFileSync, statSync, writeFileSync } from 'node:fs';
import { createServer } from 'node:http';
import { extname, join, normalize, relative, sep } from 'node:path';
import { parseArgs } from 'node:util';
import { Failure, inRoot, isMain, script } from './lib.mjs';

const usage = `npm start -- [options]
  --data small|chat|FILE  keys and values to take (small)
  --layer N               layer of the file (the middle one)
  --page-tokens N         tokens per page (16)
  --once                  end after the report; without a terminal it ends in any case
  --port N                port of the demo page (4173 or the next free one)
`;

/** What K and V of the pages become, in turn. */
const plan = [
  { key: 'int8', value: 'int8' },
  { key: 'uint8', value: 'int4' },
  { key: 'int4', value: 'uint4' },
  { key: 'int8', value: 'uint2' },
  { key: 'f16', value: 'bf16' },
];

/** One scale for a page: the largest magnitude lands on the last code on either side of the zero point. */
function destination(type, dense, valid) {
  if (type === 'f16' || type === 'bf16') return { type };
  const bits = Number(type.match(/\d+/)[0]);
  const { data } = dense.dequantize({ end: valid });
  const absmax = data.reduce((largest, x) => Math.max(largest, Math.abs(x)), 0);
  const scale = Math.fround((absmax || 1) / (2 ** (bits - 1) - 1));
  return { type, scale, zeroPoint: type.startsWith('u') ? 2 ** (bits - 1) : 0 };
}

function convert(kv, layer, pageTokens) {
  const dense = kv.splitIntoPages(layer.key, layer.value, { pageTokens });
  let cache = dense;
  for (let i = 0; i < dense.pages.length; ++i) {
    const page = dense.page(i);
    const { key, value } = plan[i % plan.length];
    cache = kv.quantizePagedCache(cache, [i], {
      key: destination(key, page.key, page.length),
      value: destination(value, page.value, page.length),
    });
  }
  return { dense, cache };
}

function report({ dense, cache }) {
  const rows = [['page', 'tokens', 'side', 'format', 'bytes before', 'after', 'RMSE', 'largest error']];
  cache.pages.forEach(({ start, length }, i) => {
    const before = dense.page(i);
    const after = cache.page(i);
    for (const side of ['key', 'value']) {
      const { rmse, maxError } = after[side].measure(before[side], { valid: length });
      const first = side === 'key' ? [String(i), `${start}-${start + length - 1}`] : ['', ''];
      rows.push([...first, side === 'key' ? 'K' : 'V', after[side].spec, String(before[side].byteLength), String(after[side].byteLength), number(rmse), number(maxError)]);
    }
  });
  const right = [true, true, false, false, true, true, true, true];
  const widths = rows[0].map((_, column) => Math.max(...rows.map((row) => row[column].length)));
  for (const row of rows) console.log(row.map((cell, i) => (right[i] ? cell.padStart(widths[i]) : cell.padEnd(widths[i]))).join('  ').trimEnd());
}

function number(value) {
  return value === 0 || (value >= 0.001 && value < 1000) ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

/** Index of the first difference of two arrays of bytes, -1 where there is none. */
function difference(a, b) {
  if (a.length !== b.length) return Math.min(a.length, b.length);
  return Buffer.compare(a, b) === 0 ? -1 : a.findIndex((byte, i) => byte !== b[i]);
}

function compare(writer, reader, name) {
  reader.pages.forEach((_, i) => {
    const [a, b] = [writer.page(i), reader.page(i)];
    for (const side of ['key', 'value']) {
      const [x, y] = [a, b].map((page) => new Uint8Array(page[side].dequantize().data.buffer));
      const at = difference(x, y);
      if (at >= 0) throw new Failure(`page ${i}, ${side}: ${name} restores another value at element ${at >> 2}`);
    }
  });
}

/** Reads the command line; null when it asked for help and got it. */
export function readOptions(args) {
  let values;
  try {
    ({ values } = parseArgs({
      args,
      options: { data: { type: 'string', default: 'small' }, layer: { type: 'string' }, 'page-tokens': { type: 'string', default: '16' },
        once: { type: 'boolean' }, port: { type: 'string' }, help: { type: 'boolean', short: 'h' } },
    }));
  } catch (error) {
    throw new Failure(`${error.message}\n${usage}`);
  }
  for (const [name, least] of [['page-tokens', 1], ['port', 1]]) {
    if (values[name] !== undefined && !(/^\d+$/.test(values[name]) && Number(values[name]) >= least)) throw new Failure(`--${name} must be a number, got ${values[name]}`);
  }
  if (!values.help) return values;
  process.stdout.write(usage);
  return null;
}

export async function mainJob(values) {
  const { load } = await import('kvpages');
  const { keyValueLayers, readSafetensors } = await import('kvpages/safetensors');

  const data = ['small', 'chat'].includes(values.data) ? inRoot('tests', 'data', `smollm2-${values.data}.safetensors`) : values.data;
  const layers = keyValueLayers(readSafetensors(readFileSync(data)));
  const layer = values.layer === undefined ? layers[layers.length >> 1] : layers.find((candidate) => String(candidate.layer) === values.layer);
  if (!layer) throw new Failure(`${data} has the layers ${layers.map((candidate) => candidate.layer).join(', ')}`);
  const pageTokens = Number(values['page-tokens']);

  const writer = await load({ backend: 'native' });
  const reader = await load({ backend: 'wasm' });
  console.log(`${relative(process.cwd(), data)}, layer ${layer.layer}, pages of ${pageTokens} tokens; addon with ${writer.kernels} kernels\n`);
  const written = convert(writer, layer, pageTokens);
  report(written);

  const bytes = written.cache.serialize();
  const file = inRoot('output', 'cache.kvpages.pb');
  mkdirSync(inRoot('output'), { recursive: true });
  writeFileSync(file, bytes);
  const { dense, cache } = written;
  console.log(`\nK and V together: ${dense.byteLength} bytes dense, ${cache.byteLength} quantized (${((100 * cache.byteLength) / dense.byteLength).toFixed(1)} %)`);
  console.log(`${relative(process.cwd(), file)}: ${bytes.length} bytes, written by the addon`);

  const back = reader.parse(readFileSync(file));
  compare(cache, back, 'WebAssembly');
  const again = difference(back.serialize(), bytes);
  if (again >= 0) throw new Failure(`WebAssembly writes the cache that it read with another byte at ${again}`);
  const own = difference(convert(reader, layer, pageTokens).cache.serialize(), bytes);
  if (own >= 0) throw new Failure(`WebAssembly quantizes to another file, first at byte ${own}`);
  console.log(`read by WebAssembly with ${reader.kernels} kernels: ${back.pages.length} pages, all values equal, and it writes the same ${bytes.length} bytes`);

  if (values.once || !process.stdout.isTTY) return;
  await serve(values.port === undefined ? undefined : Number(values.port));
}

const mediaTypes = { '.html': 'text/html; charset=utf-8', '.js': 'text/javascript', '.css': 'text/css', '.svg': 'image/svg+xml', '.wasm': 'application/wasm' };

/** The file of a request, if there is one inside the folder. */
function locate(folder, url) {
  try {
    const path = normalize(decodeURIComponent(new URL(url, 'http://localhost').pathname));
    const file = join(folder, path.endsWith(sep) ? join(path, 'index.html') : path);
    return file.startsWith(folder + sep) ? { file, found: statSync(file, { throwIfNoEntry: false }) } : {};
  } catch {
    return {}; // escapes or null bytes that no address has
  }
}

/** Serves a folder of static files; resolves when the server listens. A policy in its page also goes into the headers, since a
 * worker obeys those and not its page. */
export function serveFolder(folder, port, host = '127.0.0.1') {
  const policy = readFileSync(join(folder, 'index.html'), 'utf8').match(/content="(default-src [^"]*)"/)?.[1];
  const server = createServer((request, response) => {
    const { file, found } = locate(folder, request.url);
    if (!found?.isFile()) {
      response.writeHead(404, { 'content-type': 'text/plain' }).end('not found\n');
      return;
    }
    response.writeHead(200, {
      'content-type': mediaTypes[extname(file)] ?? 'application/octet-stream',
      'content-length': found.size,
      'cache-control': 'no-cache',
      'x-content-type-options': 'nosniff',
      ...(policy && { 'content-security-policy': policy }),
    });
    createReadStream(file).pipe(response);
  });
  return new Promise((resolve, reject) => {
    server.once('error', reject);
    server.listen(port, host, () => resolve(server));
  });
}

/** Builds the demo page and gives its folder. */
export async function buildDemo() {
  const { build } = await import('vite');
  await build({ root: inRoot('web-demo'), configFile: inRoot('web-demo', 'vite.config.ts'), logLevel: 'warn' });
  return inRoot('web-demo', 'dist');
}

async function serve(port) {
  const folder = await buildDemo();
  let server;
  for (let candidate = port ?? 4173; !server; ++candidate) {
    try {
      server = await serveFolder(folder, candidate);
    } catch (error) {
      if (error.code !== 'EADDRINUSE' || port !== undefined || candidate > 4272) throw error;
    }
  }
  console.log(`\nDemo: http://127.0.0.1:${server.address().port}/   (Ctrl-C ends it)`);
  await new Promise((resolve) => {
    for (const signal of ['SIGINT', 'SIGTERM']) process.once(signal, resolve);
  });
  server.closeAllConnections();
  server.close();
}

if (isMain(import.meta)) {
  await script(async () => {
    const options = readOptions(process.argv.slice(2));
    if (options) await mainJob(options);
  });
}
