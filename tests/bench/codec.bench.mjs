// SPDX-License-Identifier: Apache-2.0
// Codecs as JavaScript calls them: typed array in, handle or typed array out, WebAssembly and addon, beside
// onnxruntime-node and onnxruntime-web doing QuantizeLinear and DequantizeLinear. 64 MiB of f32 (131072 x 128), one
// thread; time relative to a copy of the same bytes into memory that is already there, timed right before each run.
// The time of a call includes copying the tensor into the core's memory, the check for NaN and infinities, and making
// the result's memory; codec_bench, which runs here as a WebAssembly program first, times the kernels alone.
//   node codec.bench.mjs [kernels]
import { cpus } from 'node:os';
import { load } from '../../dist/index.node.js';
import { runProgram } from './wasi.mjs';

await runProgram('codec_bench');
if (process.argv[2] === 'kernels') process.exit();

const tokens = 131072;
const width = 128;
const count = tokens * width;
const source = new Float32Array(count);
let seed = 1;
const uniform = () => (seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0) / 4294967296;
for (let i = 0; i < 1 << 20; i++) source[i] = (uniform() + uniform() + uniform() + uniform() - 2) * 1.7;
for (let at = 1 << 20; at < count; at += 1 << 20) source.copyWithin(at, 0, 1 << 20);
const dims = [1, 1, tokens, width];
const copied = new Float32Array(count).fill(1);
const restored = new Float32Array(count).fill(1);

/** Median of time / copy over several runs of an async or plain function. */
async function ratio(body) {
  const ratios = [];
  const began = performance.now();
  for (let i = 0; i < 3 || (i < 9 && performance.now() - began < 1500); i++) {
    globalThis.gc?.();
    const copying = performance.now();
    copied.set(source);
    const copy = performance.now() - copying;
    const start = performance.now();
    const kept = await body();
    ratios.push((performance.now() - start) / copy);
    kept?.dispose?.();
  }
  return ratios.sort((a, b) => a - b)[ratios.length >> 1];
}

const table = new Map(); // row -> column -> text
const columns = [];
function put(column, row, value) {
  if (!columns.includes(column)) columns.push(column);
  if (!table.has(row)) table.set(row, new Map());
  table.get(row).set(column, value === undefined ? '' : value.toFixed(2));
}

const specs = [
  { spec: 'int8/tensor/given', scale: 4 / 127 },
  { spec: 'int4/tensor/given', scale: 4 / 7 },
  { spec: 'int8/token' },
  { spec: 'int8/channel/16' },
  { spec: 'int4/token' },
  { spec: 'int4/channel/16' },
  { spec: 'int3/token' },
  { spec: 'int3/channel/16' },
  { spec: 'e4m3/token' },
  { spec: 'nvfp4' },
  { spec: 'int4/channel/16/mse/e4m3' },
  { spec: 'int4/token/16/mse/e4m3' },
  { spec: 'lm4/token/64/mse/e4m3+hadamard' },
  { spec: 'q8_0' },
  { spec: 'q4_0' },
];

async function ours(column, backend) {
  let kv;
  try {
    kv = await load({ backend });
  } catch (error) {
    console.log(`${backend} does not load: ${error.message}`);
    return;
  }
  const tensor = { type: 'f32', dims, data: source };
  await ratio(() => kv.quantize(tensor, specs[0])); // not shown: the allocator has yet to see what it will be asked for
  for (const options of specs) {
    put(column, `f32 → ${options.spec}`, await ratio(() => kv.quantize(tensor, options)));
    const quantized = kv.quantize(tensor, options);
    put(column, `${options.spec} → f32`, await ratio(() => void kv.dequantize(quantized, { out: restored })));
    quantized.dispose();
  }
  const { kernels } = kv;
  kv.dispose();
  return kernels;
}

// ---- onnxruntime: models of one or two nodes, written as protobuf bytes by hand ----

const varint = (value) => {
  const bytes = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) | 128);
  return [...bytes, value];
};
const number = (field, value) => [...varint(field * 8), ...varint(value)];
const bytes = (field, value) => [...varint(field * 8 + 2), ...varint(value.length), ...value];
const text = (field, value) => bytes(field, [...Buffer.from(value)]);
const types = { f32: 1, int8: 3, int4: 22, e4m3: 17 };

const shaped = (field, name, type, shape) =>
  bytes(field, [
    ...text(1, name),
    ...bytes(2, bytes(1, [...number(1, types[type]), ...bytes(2, shape.flatMap((d) => bytes(1, number(1, d))))])),
  ]);
const constant = (name, type, shape, raw) =>
  bytes(5, [...shape.flatMap((d) => number(1, d)), ...number(2, types[type]), ...text(8, name), ...bytes(9, [...raw])]);
const node = (op, inputs, output, attributes) =>
  bytes(1, [
    ...inputs.flatMap((name) => text(1, name)),
    ...text(2, output),
    ...text(4, op),
    ...Object.entries(attributes).flatMap(([name, value]) => bytes(5, [...text(1, name), ...number(3, value), ...number(20, 2)])),
  ]);

/** `ops`: QuantizeLinear, DequantizeLinear or both; scales of [tokens / 16, width] lie along blocks of tokens. */
function model(type, ops, layout) {
  const shape = layout === 'channel' ? [tokens / 16, width] : layout === 'token' ? [tokens] : [];
  const scales = new Float32Array(shape.reduce((a, b) => a * b, 1)).fill(type === 'int8' ? 4 / 127 : type === 'int4' ? 4 / 7 : 4 / 448);
  const zeros = new Uint8Array(type === 'int4' ? Math.ceil(scales.length / 2) : scales.length);
  const attributes = layout === 'channel' ? { axis: 0, block_size: 16 } : layout === 'token' ? { axis: 0 } : {};
  let from = 'x';
  const nodes = ops.flatMap((op, i) => {
    const to = i === ops.length - 1 ? 'y' : 'coded';
    const bytesOfNode = node(op, [from, 'scale', 'zero'], to, attributes);
    from = to;
    return bytesOfNode;
  });
  const first = ops[0] === 'QuantizeLinear' ? 'f32' : type;
  const last = ops.at(-1) === 'QuantizeLinear' ? type : 'f32';
  const graph = [
    ...nodes,
    ...text(2, 'g'),
    ...constant('scale', 'f32', shape, new Uint8Array(scales.buffer)),
    ...constant('zero', type, shape, zeros),
    ...shaped(11, 'x', first, [tokens, width]),
    ...shaped(12, 'y', last, [tokens, width]),
  ];
  return Uint8Array.from([...number(1, 10), ...bytes(7, graph), ...bytes(8, number(2, 21))]);
}

async function onnxruntime(column, ort) {
  const options = { intraOpNumThreads: 1, interOpNumThreads: 1, executionProviders: [column.endsWith('web') ? 'wasm' : 'cpu'], graphOptimizationLevel: 'disabled' };
  const time = async (row, bytesOfModel, input) => {
    try {
      const session = await ort.InferenceSession.create(bytesOfModel, options);
      put(column, row, await ratio(async () => (await session.run({ x: input })).y));
      await session.release?.();
    } catch (error) {
      console.log(`${column}, ${row}: ${String(error.message ?? error).split('\n')[0].slice(0, 160)}`);
    }
  };
  const x = new ort.Tensor('float32', source, [tokens, width]);
  const codes = new ort.Tensor('int8', new Int8Array(count), [tokens, width]);
  for (const [layout, name] of [['tensor', 'tensor/given'], ['token', 'token'], ['channel', 'channel/16']]) {
    await time(`f32 → int8/${name}`, model('int8', ['QuantizeLinear'], layout), x);
    await time(`int8/${name} → f32`, model('int8', ['DequantizeLinear'], layout), codes);
    // Codes of 4 bits do not leave it, so there and back in one graph.
    await time(`f32 → int4/${name} → f32`, model('int4', ['QuantizeLinear', 'DequantizeLinear'], layout), x);
  }
  await time('f32 → e4m3/token → f32', model('e4m3', ['QuantizeLinear', 'DequantizeLinear'], 'token'), x);
}

const kernels = [await ours('wasm', 'wasm'), await ours('addon', 'native')];
for (const name of ['onnxruntime-web', 'onnxruntime-node']) {
  try {
    const ort = await import(name);
    if (name.endsWith('web')) ort.env.wasm.numThreads = 1;
    await onnxruntime(name, ort.default?.InferenceSession ? ort.default : ort);
  } catch (error) {
    console.log(`${name} does not load: ${String(error.message ?? error).split('\n')[0]}`);
  }
}
// What the two halves of ours take together, for the rows that onnxruntime can only do there and back.
for (const row of [...table.keys()].filter((key) => key.split('→').length === 3)) {
  const spec = row.split('→')[1].trim();
  for (const column of ['wasm', 'addon']) {
    const there = table.get(`f32 → ${spec}`)?.get(column), back = table.get(`${spec} → f32`)?.get(column);
    if (there && back) table.get(row).set(column, (Number(there) + Number(back)).toFixed(2));
  }
}

console.log(`\nTime / copy of the same 64 MiB, one thread, JavaScript in and out. ${cpus()[0].model}, Node ${process.version}, kernels ${kernels.filter(Boolean).join(', ')}.`);
console.log('onnxruntime is given its scales; per token, per channel and in blocks ours are found in the same time.\n');
console.log(`| | ${columns.join(' | ')} |\n|---|${columns.map(() => '---:').join('|')}|`);
for (const [row, cells] of table) console.log(`| ${row} | ${columns.map((column) => cells.get(column) ?? '').join(' | ')} |`);
