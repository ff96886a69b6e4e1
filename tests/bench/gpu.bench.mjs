// SPDX-License-Identifier: Apache-2.0
// A ModelCache on a GPU as JavaScript uses it, beside the same cache on the CPU: one token appended to all layers in one call, a
// prompt encoded, attention of one cache and of many, moving. The kernels alone: gpu_bench.cc.
//   node gpu.bench.mjs [quick]
import { load } from '../../dist/index.node.js';

const quick = process.argv[2] === 'quick';
const [layers, kvHeads, headDim, heads] = quick ? [2, 1, 32, 2] : [32, 8, 128, 32];
const prompt = quick ? 96 : 4096;
const rounds = quick ? 2 : 50;

let seed = 1;
const uniform = () => (seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0) / 4294967296;
const noise = (count) => Float32Array.from({ length: count }, () => (uniform() + uniform() + uniform() + uniform() - 2) * 1.7);
const median = (times) => times.sort((a, b) => a - b)[times.length >> 1];
/** Milliseconds that a caller waits. */
function time(count, call) {
  const times = [];
  for (let i = 0; i < count; i++) {
    const began = performance.now();
    call();
    times.push(performance.now() - began);
  }
  return median(times);
}

async function measure(backend, preset) {
  const kv = await load({ backend });
  const cache = kv.createCache({ layers, kvHeads, headDim, preset });
  const name = backend === 'cuda' ? kv.device.description : kv.kernels;
  const part = { dims: [layers, kvHeads, 256, headDim], data: noise(layers * kvHeads * 256 * headDim) };
  const first = quick ? { dims: [layers, kvHeads, prompt, headDim], data: noise(layers * kvHeads * prompt * headDim) } : part;
  const filled = time(1, () => {
    while (cache.tokens < prompt) cache.appendAll(first, first);
  });
  const frozen = time(1, () => cache.freeze());
  const token = { dims: [layers, kvHeads, 1, headDim], data: noise(layers * kvHeads * headDim) };
  const append = time(rounds, () => cache.appendAll(token, token));
  const query = { dims: [heads, 1, headDim], data: noise(heads * headDim) };
  const attend = time(rounds, () => cache.attend(layers - 1, query));
  const sizes = quick ? [2] : [8, 64];
  const batches = sizes.map((count) => {
    const caches = Array.from({ length: count }, () => cache.fork());
    const queries = { dims: [count, heads, 1, headDim], data: noise(count * heads * headDim) };
    const took = time(quick ? 1 : 10, () => kv.attendBatch(caches, layers - 1, queries));
    for (const one of caches) one.dispose();
    return `${count} caches ${took.toFixed(2)} ms`;
  });
  const moved = backend === 'cuda' ? time(1, () => cache.to('cpu').dispose()) : 0;
  const { byteLength } = cache.stats();
  console.log(
    `${preset}, ${name}: ${prompt} tokens appended in ${filled.toFixed(1)} ms, encoded in ${frozen.toFixed(1)} ms; one token to all layers ` +
      `${(append * 1000).toFixed(1)} us; attend over a layer ${attend.toFixed(3)} ms, ${batches.join(', ')}` +
      (backend === 'cuda' ? `; ${(byteLength / 1e6).toFixed(1)} MB to the CPU in ${moved.toFixed(1)} ms` : ''),
  );
  cache.dispose();
  kv.dispose();
}

const cuda = await load({ backend: 'cuda' }).then(
  (kv) => kv.dispose() ?? true,
  (error) => console.log(`no GPU, nothing measured: ${error.message}`),
);
if (cuda) {
  console.log(`${layers} layers, ${kvHeads} KV heads, ${heads} query heads, head_dim ${headDim}`);
  for (const preset of quick ? ['kv4'] : ['bf16', 'int8', 'kv4', 'nvfp4']) {
    for (const backend of ['cuda', 'native']) await measure(backend, preset);
  }
}
