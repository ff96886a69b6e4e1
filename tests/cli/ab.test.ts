// SPDX-License-Identifier: Apache-2.0
// kvpages ab and plan as a user types them, on the model of tests/data/models/tiny. Prompts are token ids, so no tokenizer is needed but where it is what is tested.
import { spawnSync } from 'node:child_process';
import { cpSync, existsSync, mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import type { StudyResult } from 'kvpages/study';
import { carrier, halfModel } from '../js/onnx-file.js';

const root = fileURLToPath(new URL('../..', import.meta.url));
const tiny = join(root, 'tests/data/models/tiny');
const folder = mkdtempSync(join(tmpdir(), 'kvpages-ab-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));
const at = (name: string) => join(folder, name);
const ids = (count: number) => Array.from({ length: count }, (_, i) => (i * 131 + 7) % 2048);

function kvpages(args: string[], cli = join(root, 'dist/cli.js')) {
  const result = spawnSync(process.execPath, [cli, ...args], { cwd: folder, maxBuffer: 1 << 26 });
  return { code: result.status, out: result.stdout.toString(), err: result.stderr.toString() };
}
const ab = (...args: string[]) => kvpages(['ab', '--model', tiny, ...args]);

beforeAll(() => {
  writeFileSync(at('ids.json'), JSON.stringify([ids(40), { tokens: ids(32) }]));
  writeFileSync(at('text.json'), JSON.stringify(ids(84)));
  writeFileSync(at('short.json'), JSON.stringify(ids(9)));
  writeFileSync(at('broken.json'), '[1, 2');
  writeFileSync(at('other.json'), '{"a": 1}');
  writeFileSync(at('words.txt'), 'It was in the month of June that Miss Elliot had been in the country, and nobody knew of it.');
});

describe('the table', () => {
  const args = ['--schemes', 'f32,bf16,nvfp4,four=int4/channel/16:lm3/token/64+hadamard@4+16,kivi4,kv4', '--prompts', 'ids.json', '--max-new', '40', '--text', 'text.json'];
  let first: ReturnType<typeof kvpages>;

  test('has every scheme, and the same digits from addon and WebAssembly with a thawed past', { timeout: 120_000 }, () => {
    first = ab(...args, '--engine', 'thaw', '--plot', 'out.svg');
    expect(first.err).toMatch(/\d of 3, (writing|comparing): \d+ of \d+ tokens, about \d+ s left/);
    expect(first.err).toMatch(/keys and values beside the cache [\d.]+ MB, process at its peak \d+ MB/);
    expect(first.code).toBe(0);
    expect(first.out).toMatch(/^f32 +0 +32\.00 +0\.4\d +0 +0 +100\.00 % +0 +-100\.0 % +[\d.]+$/m);
    expect(first.out).toMatch(/^nvfp4 +0 +4\.5\d +3\.56 +[23]\.\d\d +0\.1\d+ +0\.\d+ +9\d\.\d\d % +0\.0\d+ +[\d.]+$/m);
    expect(first.out).toMatch(/^four +4\+16 +/m);
    expect(first.out).toContain('KL of each text');
    const again = ab(...args, '--engine', 'thaw', '--backend', 'wasm', '--quiet');
    expect(again.err).toBe('');
    expect(again.out).toBe(first.out);
  });

  test('is drawn', () => {
    const svg = readFileSync(at('out.svg'), 'utf8');
    expect(svg).toMatch(/^<svg [^>]*>/);
    expect(svg).toContain('K RMSE by layer');
    expect(svg).not.toMatch(/NaN|undefined|Infinity/);
    // Four schemes that err have a line in each panel; f32 and bf16 encode nothing, and f32 has no divergence.
    expect(svg.match(/<path d="M[^"]*L/g)).toHaveLength(4 + 4 + 5);
  });

  test('as JSON, with attention over the codes', () => {
    const { code, out } = ab(...args, '--json', '--quiet');
    expect(code).toBe(0);
    const result = JSON.parse(out) as StudyResult & { backend: string; run: { peakBytes: number; denseBytes: number } };
    expect(result).toMatchObject({ engine: 'attend', baseline: 'nvfp4', run: { denseBytes: 0 } });
    expect(result.sequences.map(({ kind, tokens }) => [kind, tokens])).toEqual([['prompt', 80], ['prompt', 72], ['text', 84]]);
    const [f32, bf16, , four] = result.schemes;
    expect(f32).toMatchObject({ kl: 0, top1: 1, perplexity: result.perplexity });
    expect(bf16!.kl).toBeLessThan(1e-4);
    expect(bf16!.top1).toBeGreaterThan(0.98);
    expect(four).toMatchObject({ kept: 4, recent: 16, key: 'int4/channel/16/absmax/f32', value: 'lm3/token/64/mse/f32+hadamard' });
  });

  test('is the same with both engines where the page that fills is f32 in both, KL within 2 %', () => {
    const schemes = (...more: string[]) => (JSON.parse(ab('--schemes', 'nvfp4,q8_0,kv4', '--text', 'text.json', '--hot', 'f32', '--json', '--quiet', ...more).out) as StudyResult).schemes;
    const thawed = schemes('--engine', 'thaw');
    const attended = schemes();
    expect(attended.map(({ name }) => name)).toEqual(['nvfp4', 'q8_0', 'kv4']);
    attended.forEach(({ kl, top1 }, i) => {
      expect(kl).toBeGreaterThan(1e-6);
      expect(Math.abs(kl / thawed[i]!.kl - 1)).toBeLessThan(0.02);
      expect(Math.abs(top1 - thawed[i]!.top1)).toBeLessThan(0.003);
    });
  });

  test('of a text in words', () => {
    const { code, out } = ab('--prompts', 'words.txt', '--max-new', '24', '--schemes', 'nvfp4', '--quiet', '--layers');
    expect(code).toBe(0);
    expect(out).toContain('words.txt: ');
    expect(out).toMatch(/V RMSE by layer\nlayer +nvfp4\n +0 +0\.0/);
  });
});

describe('what cannot be run is named', () => {
  beforeAll(() => {
    mkdirSync(at('none'));
    cpSync(join(tiny, 'config.json'), at('none/config.json'));
    writeFileSync(at('none/model.onnx'), 'this is no model');
    mkdirSync(at('empty'));
    mkdirSync(at('piece'));
    writeFileSync(at('half.onnx'), halfModel());
    const names = { layers: [0], past: (l: number, s: string) => `past_key_values.${l}.${s}`, present: (l: number, s: string) => `present.${l}.${s}` };
    writeFileSync(at('bytes.onnx'), carrier({ ...names, type: 'int8' }));
    writeFileSync(at('carrier.onnx'), carrier(names));
    writeFileSync(at('named.onnx'), carrier({ ...names, past: (l, s) => `memory.${l}.${s}` }));
    writeFileSync(at('one.json'), '[5]');
    writeFileSync(at('beyond.json'), JSON.stringify([...ids(83), 2048]));
    const plan = (cache: object) => JSON.stringify({ format: 'kvpages.plan.v1', cache: { key: ['int4/token'], value: ['int4/token'], ...cache } });
    writeFileSync(at('numbers.json'), plan({ key: [4, 4] }));
    writeFileSync(at('paged.json'), plan({ pageTokens: '16' }));
    writeFileSync(at('wider.json'), plan({ headDim: 64 }));
    cpSync(join(tiny, 'config.json'), at('piece/config.json'));
    cpSync(join(tiny, 'onnx/split_int8_6.onnx'), at('piece/model.onnx'));
  });
  const text = ['--text', 'text.json', '--quiet', '--plot', 'nothing.svg'];
  test.each([
    [['--model', 'nowhere', ...text], 1, 'nowhere could not be read: there is no such file or folder'],
    [['--model', 'empty', ...text], 1, 'empty has no .onnx file'],
    [['--model', 'none', ...text], 1, 'none/model.onnx could not be loaded'],
    [['--model', 'none', '--engine', 'attend', ...text], 1, 'none has no pieces for --engine attend'],
    [['--model', 'piece', ...text], 1, 'a model exported without a cache cannot be used'],
    [['--model', 'bytes.onnx', ...text], 1, 'bytes.onnx: session: must have past_key_values.0.key in float32 or float16, got int8'],
    [['--model', 'carrier.onnx', ...text], 1, 'carrier.onnx: session: must have the input input_ids'],
    [['--model', 'named.onnx', ...text], 1, 'named.onnx: session: must have inputs for past keys and values, named past_key_values.{layer}.{side}, got memory.0.key'],
    [['--model', 'half.onnx', ...text, '--schemes', 'int4/token,nvfp4'], 2, 'scheme nvfp4: '],
    [['--model', tiny, '--text', 'missing.txt'], 1, 'missing.txt could not be read: there is no such file'],
    [['--model', tiny, '--text', 'broken.json'], 1, 'broken.json is no JSON'],
    [['--model', tiny, '--prompts', 'other.json'], 1, 'other.json: must hold texts, chats or token ids'],
    [['--model', tiny, '--text', 'short.json', '--schemes', 'nvfp4', '--plot', 'nothing.svg'], 1, 'short.json: must be long enough that a page of scheme nvfp4 is encoded'],
    [['--model', tiny, '--text', 'text.json,short.json', '--schemes', 'kv4'], 1, 'short.json: must be long enough that a page of scheme kv4 is encoded'],
    [['--model', tiny, '--text', 'one.json', '--schemes', 'kv4'], 1, 'one.json: must have two tokens or more to compare, got 1'],
    [['--model', tiny, '--text', 'beyond.json', '--engine', 'thaw'], 1, "beyond.json: must have token ids below the model's 2048, got 2048"],
    [['--model', 'nowhere', '--text', 'text.json', '--plot', 'no/where.svg'], 1, 'no/where.svg could not be written: there is no such file or folder'],
    [['--model', 'nowhere', '--text', 'text.json', '--plot', 'empty'], 1, 'empty could not be written: it is a folder'],
    [['--model', tiny, ...text, '--schemes', 'numbers.json'], 1, 'numbers.json: must be a plan with format kvpages.plan.v1 and specs by layer in cache.key and cache.value'],
    [['--model', tiny, ...text, '--schemes', 'paged.json'], 1, 'paged.json: must be a plan with cache.pageTokens of type number'],
    [['--model', tiny, ...text, '--schemes', 'wider.json'], 1, 'maxBytes, hot beside key and value, got cache.headDim'],
    [['--model', tiny, ...text, '--schemes', 'nvfp4,nope'], 2, 'nope'],
    [['--model', tiny, ...text, '--schemes', 'nvfp4,nvfp4'], 2, 'names nvfp4 twice'],
    [['--model', tiny, ...text, '--baseline', 'kv9'], 2, '--baseline must be one of the schemes, got kv9'],
    [['--model', tiny, ...text, '--engine', 'steam'], 2, '--engine must be one of attend, thaw, got steam'],
    [['--model', tiny, ...text, '--schemes', 'other.json'], 1, 'kvpages.plan.v1'],
    [text, 2, '--model is missing'],
  ] as Array<[string[], number, string]>)('%j', (args, code, message) => {
    const result = kvpages(['ab', ...args]);
    expect(result.err).toContain(message);
    // Found before the model computes anything.
    expect(result.err).not.toMatch(/please report|comparing|writing/);
    expect({ code: result.code, out: result.out }).toEqual({ code, out: '' });
    expect(existsSync(at('nothing.svg'))).toBe(false);
    expect(readdirSync(folder).filter((name) => name.endsWith('.part'))).toEqual([]);
  });

  test('an onnxruntime that is not installed, with the command', () => {
    mkdirSync(at('alone'));
    for (const name of ['dist', 'prebuilds', 'package.json']) cpSync(join(root, name), at(`alone/${name}`), { recursive: true });
    const { code, err } = kvpages(['ab', '--model', tiny, ...text], at('alone/dist/cli.js'));
    expect(err).toContain('npm install onnxruntime-node');
    expect(code).toBe(1);
  });
});

describe('a plan', () => {
  const args = ['plan', '--model', tiny, '--engine', 'thaw', '--text', 'plan-ids.json', '--specs', 'int3/token/16,int8/token/16', '--against', 'int3/token/16'];
  beforeAll(() => writeFileSync(at('plan-ids.json'), JSON.stringify(ids(40))));

  test('keeps its budget, spends it where it saves, and is a scheme of ab', { timeout: 120_000 }, () => {
    const { code, out, err } = kvpages([...args, '--bits', '8', '--out', 'plan.json']);
    expect({ code, measured: err.endsWith('measured\n') }).toEqual({ code: 0, measured: true });
    const plan = JSON.parse(readFileSync(at('plan.json'), 'utf8')) as { format: string; bits: number; cache: { key: string[]; value: string[]; keepFirst: number } };
    expect(plan).toMatchObject({ format: 'kvpages.plan.v1', model: 'tiny', cache: { keepFirst: 4 } });
    const specs = [...plan.cache.key, ...plan.cache.value];
    expect(specs).toHaveLength(12);
    expect(new Set(specs)).toEqual(new Set(['int3/token/16', 'int8/token/16']));
    // 3 or 8 bits and an f32 scale for 16 elements.
    const bits = specs.reduce((sum, spec) => sum + (spec.startsWith('int3') ? 5 : 10) / 12, 0);
    expect(plan.bits).toBeCloseTo(bits, 6);
    expect(bits).toBeLessThanOrEqual(8);
    expect(bits).toBeGreaterThan(8 - 5 / 12);
    const kl = (name: string) => Number(new RegExp(`^${name} .* ([\\d.e-]+)$`, 'm').exec(out)![1]);
    expect(kl('plan-8')).toBeLessThan(kl('int3/token/16') / 2);
    const used = kvpages(['ab', '--model', tiny, '--engine', 'thaw', '--text', 'plan-ids.json', '--schemes', 'plan.json', '--json', '--quiet']);
    const { schemes } = JSON.parse(used.out) as StudyResult;
    expect(schemes[0]!.kl).toBeCloseTo(kl('plan-8'), 4);
    expect(schemes[0]!.key).toHaveLength(6);
  });

  test('says what a budget must be', () => {
    expect(kvpages([...args, '--bits', '4.5', '--quiet', '--out', 'none.json'])).toMatchObject({ code: 1, err: expect.stringContaining('bits: must be 5.00 or more') as string });
    expect(existsSync(at('none.json'))).toBe(false);
    expect(kvpages([...args, '--bits', '6', '--out', 'no/where.json'])).toMatchObject({ code: 1, err: 'kvpages: no/where.json could not be written: there is no such file or folder\n' });
    expect(kvpages([...args, '--bits', 'many'])).toMatchObject({ code: 2 });
    expect(kvpages(args)).toMatchObject({ code: 2, err: expect.stringContaining('--bits is missing') as string });
  });
});
