// SPDX-License-Identifier: Apache-2.0
// A ModelCache as JavaScript uses it, addon and WebAssembly: one token appended to all layers in one call, attention over
// encoded pages, and a long context in WebAssembly's memory. Then cache_bench as a WebAssembly program: the kernels alone.
//   node cache.bench.mjs [append | attend | long | kernels]
import { cpus } from 'node:os';
import { load } from '../../dist/index.node.js';
import { runProgram } from './wasi.mjs';

const part = process.argv[2];
const wanted = (name) => part === undefined || part === name;
let seed = 1;
const uniform = () => (seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0) / 4294967296;
const noise = (count) => Float32Array.from({ length: count }, () => (uniform() + uniform() + uniform() + uniform() - 2) * 1.7);
const median = (times) => times.sort((a, b) => a - b)[times.length >> 1];

function append(kv) {
  for (const preset of ['kv4', 'int4-kivi', 'nvfp4', 'int8', 'bf16']) {
    const cache = kv.createCache({ layers: 30, kvHeads: 3, headDim: 64, preset });
    const token = { dims: [30, 3, 1, 64], data: noise(30 * 3 * 64) };
    const plain = [];
    const freezing = [];
    for (let i = 0; i < 4 + 16 * 40; i++) {
      // The first token of a page is appended after the page before it has been encoded.
      const first = i >= 4 + 80 && (i - 4) % 16 === 0;
      const began = performance.now();
      cache.appendAll(token, token);
      const took = (performance.now() - began) * 1000;
      if (i >= 100) (first ? freezing : plain).push(took);
    }
    const all = [...plain, ...freezing].reduce((sum, took) => sum + took, 0) / (plain.length + freezing.length);
    const text = [Math.min(...plain), median(plain), median(freezing), all].map((took) => took.toFixed(1));
    console.log(`${kv.kernels}: append 1 token to 30 x 3 x 64 in one call, ${preset.padEnd(9)} ${text[0]} us at best, ${text[1]} us; when 30 pages are encoded ${text[2]} us; mean of all ${text[3]} us`);
    cache.dispose();
  }
}

function attend(kv) {
  const [tokens, heads, width] = [8192, 4, 128];
  let dense = 0;
  for (const preset of ['f32', 'int8', 'kv8', 'int4/token/128/absmax/f32', 'int4-kivi', 'nvfp4', 'kv4', 'kv3']) {
    const specs = kv.formats().presets.some(({ name }) => name === preset) ? { preset } : { key: preset, value: preset };
    const cache = kv.createCache({ layers: 1, kvHeads: heads, headDim: width, hot: 'f32', ...specs });
    const dims = [heads, 1024, width];
    for (let i = 0; i < tokens; i += 1024) cache.append(0, { dims, data: noise(heads * 1024 * width) }, { dims, data: noise(heads * 1024 * width) });
    cache.freeze();
    const query = { dims: [16, 1, width], data: noise(16 * width) };
    const out = new Float32Array(16 * width);
    const times = [];
    for (let i = 0; i < 15; i++) {
      const began = performance.now();
      cache.attend(0, query, { out });
      times.push(performance.now() - began);
    }
    const took = Math.min(...times);
    dense ||= took;
    console.log(`${kv.kernels}: attend 1 token, 16 heads over 4 x 8192 x 128, ${preset.padEnd(26)} ${took.toFixed(2)} ms, ${(took / dense).toFixed(2)} of f32`);
    cache.dispose();
  }
}

/** 32768 tokens of 30 layers x 3 heads x 64, appended, encoded and attended in WebAssembly's memory. */
function long(kv) {
  const [layers, heads, width, tokens, step] = [30, 3, 64, 32768, 512];
  const cache = kv.createCache({ layers, kvHeads: heads, headDim: width, key: 'int4/token', value: 'int4/token' });
  const dims = [layers, heads, step, width];
  const keys = { dims, data: noise(layers * heads * step * width) };
  const values = { dims, data: noise(layers * heads * step * width) };
  const began = performance.now();
  let most = 0;
  for (let i = 0; i < tokens; i += step) {
    cache.appendAll(keys, values);
    most = Math.max(most, kv.usedBytes);
    cache.freeze();
  }
  const appended = performance.now();
  const query = { dims: [9, 1, width], data: noise(9 * width) };
  for (let layer = 0; layer < layers; layer++) cache.attend(layer, query);
  const attended = performance.now();
  const MB = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;
  const { byteLength, bits } = cache.stats();
  console.log(
    `${kv.kernels}: ${cache.tokens} tokens x 30 x 3 x 64, int4/token: ${MB(byteLength)} (${bits.overall.toFixed(2)} bits; f32 would be ${MB(tokens * layers * heads * width * 8)}), ` +
      `at most ${MB(most)} while appending; process ${MB(process.memoryUsage().rss)}; append and encode ${((appended - began) / 1000).toFixed(1)} s, ` +
      `a token's attention over all layers ${(attended - appended).toFixed(0)} ms`,
  );
  if (cache.tokens !== tokens) throw new Error('tokens are missing');
  cache.dispose();
}

console.log(`${cpus()[0].model}, Node ${process.version}`);
for (const backend of ['native', 'wasm']) {
  const kv = await load({ backend }).catch((error) => console.log(`${backend} does not load: ${error.message}`));
  if (!kv) continue;
  if (wanted('append')) append(kv);
  if (wanted('attend')) attend(kv);
  if (wanted('long') && backend === 'wasm') long(kv);
  kv.dispose();
}
if (wanted('kernels')) for (const rows of ['scores', 'attend']) await runProgram('cache_bench', rows);
