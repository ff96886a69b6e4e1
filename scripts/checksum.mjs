#!/usr/bin/env node
// node scripts/checksum.mjs BACKEND: one line with a checksum of the codes and scales of every spec. The same program and the
// same line on every backend.
import { createHash } from 'node:crypto';
import { load } from '../dist/index.node.js';

// Odd sizes: partial groups of codes, short blocks, more than one head and batch.
const shapes = [
  [1, 2, 20, 64],
  [2, 1, 19, 33],
];

/** Numbers that are the same everywhere: integers of 24 bits over a power of two, some of them large. */
function numbers(count) {
  const data = new Float32Array(count);
  for (let i = 0, state = 1; i < count; ++i) {
    state = (Math.imul(state, 1664525) + 1013904223) | 0;
    data[i] = ((state >> 8) / (1 << 23)) * ((state & 0xff00) === 0 ? 32 : 4);
  }
  return data;
}

function scalesOf(spec, [batch, heads, tokens, width]) {
  const [, axis, block] = spec.split('/');
  const size = Number(block);
  if (axis === 'head') return heads;
  if (axis === 'token') return batch * heads * tokens * Math.ceil(width / (size || width));
  if (axis === 'channel') return batch * heads * Math.ceil(tokens / (size || 16)) * width;
  return 1;
}

const kv = await load({ backend: process.argv[2] ?? 'auto' });
const hash = createHash('sha256');
let encoded = 0;
for (const spec of kv.formats().specs) {
  for (const dims of shapes) {
    const data = numbers(dims.reduce((product, dim) => product * dim, 1));
    const given = spec.includes('/given') ? { scales: new Float32Array(scalesOf(spec, dims)).fill(0.37) } : {};
    hash.update(`${spec} ${dims}\n`);
    let tensor;
    try {
      tensor = kv.quantize({ dims, data }, { spec, ...given });
    } catch (error) {
      hash.update(error.code); // a shape that the spec does not take
      continue;
    }
    for (const array of [tensor.codes, tensor.scales, tensor.zeroPoints, tensor.data]) {
      if (array !== undefined) hash.update(new Uint8Array(array.buffer, array.byteOffset, array.byteLength));
    }
    hash.update(`${tensor.info.global ?? ''}\n`);
    encoded += 1;
    tensor.dispose();
  }
}
process.stdout.write(`${hash.digest('hex')} ${kv.formats().specs.length} specs, ${encoded} tensors\n`);
process.stderr.write(`${kv.backend}: ${kv.reason}\n`);
