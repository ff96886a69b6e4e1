// SPDX-License-Identifier: Apache-2.0
// The command line as a user types it: what it prints, where, its exit codes, and the files it leaves.
import { spawnSync } from 'node:child_process';
import { existsSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { load } from 'kvpages';
import type { KvPages } from 'kvpages';
import { keyValueLayers, readSafetensors } from 'kvpages/safetensors';

const root = fileURLToPath(new URL('../..', import.meta.url));
const small = join(root, 'tests/data/smollm2-small.safetensors');
const folder = mkdtempSync(join(tmpdir(), 'kvpages-cli-'));
afterAll(() => rmSync(folder, { recursive: true, force: true }));
const at = (name: string) => join(folder, name);

function kvpages(args: string[], options: { input?: Uint8Array; env?: Record<string, string> } = {}) {
  const result = spawnSync(process.execPath, [join(root, 'dist/cli.js'), ...args], { cwd: folder, input: options.input ?? '', env: { ...process.env, ...options.env }, maxBuffer: 1 << 26 });
  return { code: result.status, out: result.stdout.toString(), raw: new Uint8Array(result.stdout), err: result.stderr.toString() };
}

describe('usage', () => {
  test('--help and --version print to standard output and end with 0', () => {
    const { version } = JSON.parse(readFileSync(join(root, 'package.json'), 'utf8')) as { version: string };
    expect(kvpages(['--version'])).toMatchObject({ code: 0, out: `${version}\n`, err: '' });
    for (const args of [['--help'], ['inspect', '--help'], ['quantize', '-h'], ['compare', '--help'], ['help', 'compare']]) {
      const { code, out, err } = kvpages(args);
      expect({ args, code, err }).toEqual({ args, code: 0, err: '' });
      expect(out).toContain('Usage: kvpages');
    }
  });

  test.each([
    [[], 'a command is missing'],
    [['inspekt'], 'there is no command inspekt'],
    [['inspect'], 'FILE is missing'],
    [['inspect', 'a', 'b'], 'one argument too many: b'],
    [['inspect', '--color', 'a'], "Unknown option '--color'"],
    [['quantize', 'a', 'b', '--key'], "'--key <value>' argument missing"],
    [['quantize', small, 'b', '--page-tokens', '0'], '--page-tokens must be a whole number from 1 up, got 0'],
    [['quantize', small, 'b', '--page-tokens', '1e9x'], '--page-tokens must be a whole number from 1 up, got 1e9x'],
    [['quantize', small, 'b', '--pages', '3-1'], 'the range 3-1 ends before it begins'],
    [['quantize', small, 'b', '--pages', 'some'], '--pages must be all, full, or numbers and ranges'],
    [['quantize', small, 'b'], '3 layers: choose one with --layer N'],
    [['quantize', small, 'b', '--layer', '0', '--backend', 'abacus'], '--backend must be one of auto'],
    [['quantize', small, 'b', '--layer', '0', '--key', 'int5'], 'int5'],
  ] as Array<[string[], string]>)('%j is wrong usage', (args, text) => {
    const { code, out, err } = kvpages(args);
    expect(err).toContain(text);
    expect(err).toContain('--help');
    expect({ code, out }).toEqual({ code: 2, out: '' });
    expect(existsSync(at('b'))).toBe(false);
  });
});

describe('what fails says why and ends with 1', () => {
  beforeAll(() => {
    writeFileSync(at('empty'), '');
    writeFileSync(at('noise'), Uint8Array.from({ length: 200 }, (_, i) => (i * 73) & 255));
    writeFileSync(at('cut.safetensors'), readFileSync(small).subarray(0, 5000));
    for (const [dtype, bytes] of [['I32', 4], ['F32', 4], ['F64', 8]] as const) {
      const tensor = (i: number) => ({ dtype, shape: [1, 1, 1, 2], data_offsets: [2 * bytes * i, 2 * bytes * (i + 1)] });
      const text = JSON.stringify({ 'past_key_values.0.key': tensor(0), 'past_key_values.0.value': tensor(1) });
      const all = Buffer.alloc(8 + text.length + 4 * bytes, 0xff);
      all.writeBigUInt64LE(BigInt(text.length));
      all.write(text, 8);
      writeFileSync(at(`${dtype}.safetensors`), all);
    }
    const header = Buffer.from('{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}');
    writeFileSync(at('other.safetensors'), Buffer.concat([Buffer.from([header.length, 0, 0, 0, 0, 0, 0, 0]), header, Buffer.alloc(4)]));
  });
  test.each([
    [['inspect', 'missing'], 'missing could not be read: there is no such file'],
    [['inspect', '.'], 'it is a folder'],
    [['inspect', 'empty'], 'empty is empty'],
    [['inspect', '-'], 'standard input is empty'],
    [['quantize', 'I32.safetensors', 'out'], 'I32.safetensors: keys and values must be f32, f16, bf16 or f64, got past_key_values.0.key of i32'],
    [['compare', 'I32.safetensors'], 'I32.safetensors: keys and values must be f32, f16, bf16 or f64'],
    [['compare', 'F32.safetensors'], 'kvpages: F32.safetensors, layer 0, K of page 0: tensor: values must be finite, got NaN at index 0'],
    [['quantize', 'F32.safetensors', 'out'], 'kvpages: F32.safetensors, layer 0, K of page 0: tensor: values must be finite, got NaN at index 0'],
    [['quantize', 'F64.safetensors', 'out'], 'kvpages: F64.safetensors, layer 0, K of page 0: tensor: values must be finite, got NaN at index 0'],
    [['inspect', 'noise'], 'kvpages: noise: '],
    [['inspect', 'cut.safetensors'], 'kvpages: cut.safetensors: safetensors: tensor'],
    [['quantize', 'cut.safetensors', 'out', '--layer', '0'], 'kvpages: cut.safetensors: safetensors: tensor'],
    [['quantize', 'noise', 'out'], 'noise is no safetensors file'],
    [['quantize', 'other.safetensors', 'out'], 'holds no keys and values'],
    [['quantize', small, 'out', '--layer', '7'], 'has no layer 7; it has 0, 15, 29'],
    [['quantize', small, 'out', '--layer', '0', '--pages', '6'], 'has the pages 0 to 5, not 6'],
    [['quantize', small, 'nowhere/out', '--layer', '0', '--quiet'], 'nowhere/out could not be written: there is no such file or folder'],
    [['compare', 'noise'], 'noise is no safetensors file'],
  ])('%j', (args, text) => {
    const { code, err } = kvpages(args);
    expect(err).toContain(text);
    expect(err).not.toContain('please report');
    expect(code).toBe(1);
    expect(existsSync(at('out'))).toBe(false);
    expect(readdirSync(folder).filter((name) => name.endsWith('.part'))).toEqual([]);
  });
});

describe('inspect', () => {
  test('a safetensors file, in words and as JSON', () => {
    const words = kvpages(['inspect', small]);
    expect(words.code).toBe(0);
    expect(words.out).toContain('a safetensors file of 9 tensors, keys and values of 3 layers, 479392 bytes');
    expect(words.out).toContain('model: SmolLM2-135M-Instruct');
    expect(words.out).toMatch(/past_key_values\.15\.key +bf16 +\[1, 3, 83, 64\] +31872\n/);
    const json = JSON.parse(kvpages(['inspect', '--json', small]).out);
    expect(json).toMatchObject({ file: small, bytes: 479392, kind: 'safetensors', layers: [0, 15, 29] });
    expect(json.tensors).toHaveLength(9);
  });

  test('standard input is a file too', () => {
    const { code, out } = kvpages(['inspect', '-'], { input: readFileSync(small) });
    expect(code).toBe(0);
    expect(out).toContain('standard input: a safetensors file of 9 tensors');
  });
});

describe('quantize', () => {
  let kv: KvPages;
  beforeAll(async () => {
    kv = await load();
  });

  test('writes what the library writes, from either backend, and inspect reads it', () => {
    const args = ['quantize', small, 'a.pb', '--layer', '15', '--key', 'int4/channel/16', '--value', 'uint4/token'];
    const { code, out, err } = kvpages(args);
    expect({ code, err: err.includes('layer 15: page 6 of 6') }).toEqual({ code: 0, err: true });
    const layer = keyValueLayers(readSafetensors(readFileSync(small))).find((candidate) => candidate.layer === 15)!;
    const dense = kv.splitIntoPages(layer.key, layer.value);
    const pages = dense.pages.map((_, i) => {
      const page = dense.page(i);
      const side = (name: 'key' | 'value', spec: string) => {
        const source = page[name].dequantize();
        const encoded = kv.quantize(source, spec);
        return { encoded, rmse: encoded.measure(source).rmse, elements: source.data.length };
      };
      return { key: side('key', 'int4/channel/16'), value: side('value', 'uint4/token') };
    });
    const cache = kv.createPagedCache(pages.map((page) => ({ key: page.key.encoded, value: page.value.encoded })));
    expect(new Uint8Array(readFileSync(at('a.pb')))).toEqual(cache.serialize());
    expect(kvpages(args.with(2, 'b.pb'), { env: { KVPAGES_BACKEND: 'wasm' } }).code).toBe(0);
    expect(readFileSync(at('b.pb')).equals(readFileSync(at('a.pb')))).toBe(true);

    const rmse = (name: 'key' | 'value') =>
      Math.sqrt(pages.reduce((sum, page) => sum + page[name].rmse ** 2 * page[name].elements, 0) / (3 * 83 * 64)).toPrecision(4);
    expect(out).toContain(rmse('key'));
    expect(out).toContain(rmse('value'));

    const words = kvpages(['inspect', 'a.pb']);
    expect(words.code).toBe(0);
    expect(words.out).toContain('a PagedCacheProto of 6 pages, 83 tokens');
    expect(words.out).toContain('K [1, 3, 64], V [1, 3, 64]');
    const json = JSON.parse(kvpages(['inspect', 'a.pb', '--json']).out);
    expect(json).toMatchObject({ kind: 'PagedCacheProto', tokens: 83, payloadBytes: cache.byteLength });
    expect(json.pages[5]).toMatchObject({ start: 80, length: 3, capacity: 3 });
  });

  test('standard input to standard output, nothing else there', () => {
    const { code, raw, err } = kvpages(['quantize', '-', '-', '--layer', '0', '--key', 'int8/tensor', '--value', 'int8/tensor', '--pages', '1,3-4'], { input: readFileSync(small) });
    expect(code).toBe(0);
    expect(err).toContain('standard output');
    const { pages } = kv.parse(raw);
    expect(pages.map((page) => page.key.kind)).toEqual(['dense', 'encoded', 'dense', 'encoded', 'encoded', 'dense']);
  });

  test('one file per layer', () => {
    expect(kvpages(['quantize', small, 'layer-{layer}.pb', '--pages', 'full', '--quiet'])).toMatchObject({ code: 0, out: '', err: '' });
    for (const layer of [0, 15, 29]) {
      const { pages } = kv.parse(readFileSync(at(`layer-${layer}.pb`)));
      expect(pages.map((page) => page.value.kind)).toEqual([...Array(5).fill('encoded'), 'dense']);
    }
  });

  test('a page can hold any number of tokens', () => {
    expect(kvpages(['quantize', small, 'one.pb', '--layer', '0', '--page-tokens', '100', '--quiet']).code).toBe(0);
    expect(kv.parse(readFileSync(at('one.pb'))).pages.map((page) => page.length)).toEqual([83]);
  });
});

describe('compare', () => {
  test('at least 14 formats, with the figures of the library', async () => {
    const json = JSON.parse(kvpages(['compare', small, '--json', '--quiet', '--layer', '0']).out);
    const rows = (json.rows as Array<{ name: string; refused?: string; bits: number; keyRmse: number; valueRmse: number }>).filter((row) => row.refused === undefined);
    expect(rows.length).toBeGreaterThanOrEqual(14);
    const kv = await load();
    const layer = keyValueLayers(readSafetensors(readFileSync(small)))[0]!;
    const dense = kv.splitIntoPages(layer.key, layer.value);
    let squares = 0;
    let bytes = 0;
    for (let i = 0; i < dense.pages.length; ++i) {
      const source = dense.page(i).key.dequantize();
      const encoded = kv.quantize(source, 'int4/channel/16');
      squares += encoded.measure(source).rmse ** 2 * source.data.length;
      bytes += encoded.byteLength;
    }
    const row = rows.find((candidate) => candidate.name === 'int4/channel/16')!;
    expect(row.keyRmse).toBeCloseTo(Math.sqrt(squares / (3 * 83 * 64)), 12);
    expect(row.bits).toBeCloseTo((8 * bytes) / (3 * 83 * 64), 12);
    // What makes the table worth reading: keys have outlier channels, so a scale per channel beats one per token.
    const token = rows.find((candidate) => candidate.name === 'int4/token/16')!;
    expect(row.keyRmse).toBeLessThan(token.keyRmse);
  });

  test('chosen formats, keys and values apart; one that does not fit is named with its reason', () => {
    const { code, out } = kvpages(['compare', small, '--layer', '0', '--specs', 'int8/tensor:uint2/token,q8_0', '--quiet']);
    expect(code).toBe(0);
    expect(out).toMatch(/^format +bits +K RMSE +V RMSE/);
    expect(out).toContain('int8/tensor:uint2/token');
    const refused = kvpages(['compare', small, '--layer', '0', '--specs', 'int9', '--quiet']);
    expect(refused.code).toBe(1);
    expect(refused.out).toContain('int9');
  });
});
