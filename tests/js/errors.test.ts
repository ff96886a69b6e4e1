// SPDX-License-Identifier: Apache-2.0
// The table of bad inputs (tests/errors/README.md) against the bound core: the same cases as in C++, the same texts.
import { describe, expect, it } from 'vitest';
import { bindAddon } from '../../js/bind-addon.js';
import { bindWasm } from '../../js/bind-wasm.js';
import { Core, letters, parseDescription } from '../../js/binding.js';
import type { Argument } from '../../js/binding.js';
import { KvPagesError } from '../../js/index.js';
import table from '../errors/cases.json';
import { backend, fromHex, hex, inBrowser, readRepositoryFile } from './support.js';

type Json = number | string | Json[] | { [key: string]: Json };
type Step = [name: string, ...args: Json[]];
interface Case {
  name: string;
  steps?: Step[];
  call: Step;
  code: string;
  message?: string;
  fields?: Record<string, unknown>;
}

async function core(): Promise<Core> {
  if (backend === 'wasm')
    return new Core(await bindWasm(await WebAssembly.compile(await readRepositoryFile('dist/kvpages.wasm'))));
  const { createRequire } = await import(/* @vite-ignore */ 'node:module');
  return new Core(
    bindAddon(createRequire(import.meta.url)(`../../prebuilds/${process.platform}-${process.arch}/kvpages.node`)),
  );
}

const number = (value: Json): number => (typeof value === 'string' ? Number(value) : (value as number));

function bytes(value: { [key: string]: Json }): Uint8Array {
  if ('hex' in value) return fromHex(value['hex'] as string);
  if ('f32' in value) return new Uint8Array(Float32Array.from(value['f32'] as Json[], number).buffer);
  if ('u16' in value) return new Uint8Array(Uint16Array.from(value['u16'] as number[]).buffer);
  return new Uint8Array(value['count'] as number).fill(value['repeat'] as number);
}

const views = { Uint8Array, Float32Array, Float64Array, Int32Array, Uint32Array, BigInt64Array };

/** Arguments of a step in the form that the binder takes. */
function argumentsOf(signature: string, step: Step, handles: Map<string, number>): Argument[] {
  expect(step.length - 1, `arguments of ${step[0]}`).toBe(signature.length);
  return step.slice(1).map((value, i) => {
    const letter = signature[i]!;
    if (letter === 'T') return value as string;
    if (letter === 'B') return bytes(value as { [key: string]: Json });
    const shape = letters.get(letter);
    if (shape === undefined)
      return typeof value === 'string' && value.startsWith('$') ? handles.get(value.slice(1))! : number(value);
    const View = views[shape.view as 'Float32Array'];
    if (shape.output) {
      const view = new View(typeof value === 'string' ? 1 : (value as number));
      new Uint8Array(view.buffer).fill(0xa5);
      return view;
    }
    return letter === 'L'
      ? BigInt64Array.from(value as Array<number | string>, BigInt)
      : View.from((value as Json[]).map(number));
  });
}

const cases = table as unknown as Case[];
const bound = await core();
const signatures = parseDescription(bound.text('kvp_describe'));
const kernels = bound
  .json<{ kernels: Array<{ name: string; available: boolean }> }>('kvp_catalogue')
  .kernels.filter((entry) => entry.available);

describe.each(kernels.map((entry) => entry.name))('bad input on %s', (kernel) => {
  it('has cases', () => {
    expect(cases.length).toBeGreaterThan(50);
    expect(new Set(cases.map((entry) => entry.name)).size).toBe(cases.length);
  });

  for (const entry of cases) {
    it(entry.name, () => {
      const handles = new Map<string, number>();
      const run = (step: Step): Argument[] => {
        const args = argumentsOf(signatures.get(step[0]) ?? '', step, handles);
        bound.call(step[0], ...args);
        step.slice(1).forEach((value, i) => {
          if (typeof value === 'string' && value.startsWith('='))
            handles.set(value.slice(1), (args[i] as Uint32Array)[0]!);
        });
        return args;
      };
      const state = () =>
        [...handles].map(([name, handle]) => {
          for (const info of ['kvp_paged_info', 'kvp_payload_info']) {
            try {
              return `${name}: ${bound.text(info, handle)}`;
            } catch {
              // A handle of another kind, or one that the steps gave up.
            }
          }
          return name;
        });
      try {
        handles.set('instance', bound.handle('kvp_instance_create', kernel, 0));
        for (const step of entry.steps ?? []) run(step);
        if (entry.code === 'OK') {
          run(entry.call);
          return;
        }
        const before = state();
        const args = argumentsOf(signatures.get(entry.call[0]) ?? '', entry.call, handles);
        const copies = args.map((value) => (ArrayBuffer.isView(value) ? hex(value) : value));
        let error: unknown;
        try {
          bound.call(entry.call[0], ...args);
        } catch (thrown) {
          error = thrown;
        }
        expect(error).toBeInstanceOf(KvPagesError);
        const { code, message, name: _, ...fields } = error as KvPagesError;
        expect({ code, message, fields }).toEqual({
          code: entry.code,
          message: entry.message,
          fields: entry.fields ?? {},
        });
        expect(args.map((value) => (ArrayBuffer.isView(value) ? hex(value) : value))).toEqual(copies);
        expect(state()).toEqual(before);
      } finally {
        for (const handle of handles.values()) bound.functions['kvp_release']!(handle);
      }
    });
  }
});

describe('the binder', () => {
  it('binds every function of the header, and the core exports it', async () => {
    const header = new TextDecoder().decode(await readRepositoryFile('src/kvpages.h'));
    const declared = [...header.matchAll(/KVP_EXPORT int32_t (kvp_\w+)\(/g)].map((match) => match[1]!);
    const listed = [...header.matchAll(/\bF\((kvp_\w+)\)/g)].map((match) => match[1]!);
    expect(declared.length).toBeGreaterThan(20);
    expect([...listed].sort()).toEqual([...declared].sort());
    expect(Object.keys(bound.functions).sort()).toEqual([...declared].sort());
    if (backend === 'wasm') {
      const module = await WebAssembly.compile(await readRepositoryFile('dist/kvpages.wasm'));
      const exported = WebAssembly.Module.exports(module).map((entry) => entry.name);
      expect(exported).toEqual(expect.arrayContaining(declared));
    }
  });

  it('refuses wrong types by name instead of reading wrong memory', () => {
    const { functions } = bound;
    const create = functions['kvp_instance_create']! as (...args: unknown[]) => number;
    expect(() => create('auto', 0)).toThrow(new TypeError('kvp_instance_create: takes 3 arguments, got 2'));
    expect(() => create(1, 0, new Uint32Array(1))).toThrow(
      new TypeError('kvp_instance_create: argument 0 must be a string'),
    );
    expect(() => create('auto', '0', new Uint32Array(1))).toThrow(
      new TypeError('kvp_instance_create: argument 1 must be a number'),
    );
    expect(() => create('auto', 0, new Int32Array(1))).toThrow(
      new TypeError('kvp_instance_create: argument 2 must be a Uint32Array'),
    );
    expect(() => create('auto', 0, [1])).toThrow(
      new TypeError('kvp_instance_create: argument 2 must be a Uint32Array'),
    );
  });

  it('passes text as UTF-8', () => {
    const error = () => bound.handle('kvp_instance_create', 'ä€😀\u0000x', 0);
    expect(error).toThrow('ä€😀');
  });

  it('leaves nothing behind', () => {
    const before = bound.handle('kvp_instance_create', 'auto', 0);
    expect(bound.functions['kvp_release']!(before)).toBe(0);
    expect(bound.functions['kvp_release']!(before)).not.toBe(0);
  });
});

describe.runIf(backend === 'wasm')('the binder for WebAssembly', () => {
  it('survives growth of the memory between and within calls', async () => {
    const own = await core();
    const instance = own.handle('kvp_instance_create', 'auto', 0);
    for (const megabytes of [1, 8, 32]) {
      const data = new Uint8Array(megabytes << 20).map((_, i) => i * 7);
      const payload = own.handle(
        'kvp_payload_dense',
        instance,
        data,
        'bf16',
        BigInt64Array.of(BigInt(data.length / 2)),
      );
      const out = new Uint8Array(data.length);
      own.call('kvp_payload_array', payload, 'data', out);
      expect(out.every((byte, i) => byte === data[i])).toBe(true);
    }
  });

  it('gives ERR_MEMORY where the heap ends, and goes on', async ({ skip }) => {
    const own = await core();
    const instance = own.handle('kvp_instance_create', 'auto', 0);
    let huge: Uint8Array;
    try {
      // Just under 4 GiB, which a heap with anything in it cannot hold. Zeros cost nothing before they are touched.
      huge = new Uint8Array(2 ** 32 - 2 ** 20);
    } catch {
      skip('this engine has no array of 4 GiB');
    }
    const dims = BigInt64Array.of(BigInt(huge!.length / 2));
    expect(() => own.handle('kvp_payload_dense', instance, huge, 'bf16', dims)).toThrow(
      expect.objectContaining({ code: 'ERR_MEMORY' }),
    );
    expect(
      own.handle('kvp_payload_dense', instance, huge!.subarray(0, 64), 'bf16', BigInt64Array.of(32n)),
    ).toBeGreaterThan(0);
  });

  it('turns a trap into ERR_INTERNAL and lets nothing run in that instance again', async () => {
    const own = await core();
    const trap = await trappingCore();
    expect(() => trap.call('kvp_release', 1)).toThrow(expect.objectContaining({ code: 'ERR_INTERNAL' }));
    expect(() => trap.call('kvp_blob_size', 1, new Float64Array(1))).toThrow(/this instance stopped: RuntimeError/);
    // Others are not touched.
    expect(own.handle('kvp_instance_create', 'auto', 0)).toBeGreaterThan(0);
  });
});

/** A module of the core's form whose kvp_release traps: the memory holds a description, everything else returns 0. */
async function trappingCore(): Promise<Core> {
  const text = 'kvp_describe v\nkvp_blob_size ue\nkvp_blob_read ub\nkvp_release u\n';
  return new Core(await bindWasm(await WebAssembly.compile(trappingModule(text))));
}

function trappingModule(text: string): Uint8Array<ArrayBuffer> {
  const leb = (value: number): number[] => (value < 128 ? [value] : [(value & 127) | 128, ...leb(value >>> 7)]);
  const name = (word: string) => [...leb(word.length), ...new TextEncoder().encode(word)];
  const section = (id: number, content: number[]) => [id, ...leb(content.length), ...content];
  const vector = (items: number[][]) => [...leb(items.length), ...items.flat()];
  const body = (code: number[]) => [...leb(code.length + 2), 0, ...code, 0x0b];
  const i32 = 0x7f;
  const type = (params: number[], results: number[]) => [
    0x60,
    ...vector(params.map((p) => [p])),
    ...vector(results.map((r) => [r])),
  ];
  // Types: 0 (i32) -> i32, 1 (i32) -> (), 2 (i32, i32) -> i32, 3 (i32, i32, i32) -> i32.
  const types = [type([i32], [i32]), type([i32], []), type([i32, i32], [i32]), type([i32, i32, i32], [i32])];
  const length = new Uint8Array(Float64Array.of(text.length).buffer);
  const functions: Array<[word: string, type: number, code: number[]]> = [
    ['malloc', 0, [0x41, ...signedLeb(1024)]],
    ['free', 1, []],
    // A description for the first reading, traps from the second release on (release of the blob is the first).
    ['kvp_describe', 2, [0x41, 0]],
    // Writes the length of the text: f64.store at the pointer.
    ['kvp_blob_size', 3, [0x20, 1, 0x44, ...length, 0x39, 3, 0, 0x41, 0]],
    // memory.copy(pointer, 4096, length).
    ['kvp_blob_read', 3, [0x20, 1, 0x41, ...signedLeb(4096), 0x20, 2, 0xfc, 10, 0, 0, 0x41, 0]],
    // if (counter++) unreachable; return 0. The counter lies at address 0.
    ['kvp_release', 0, [0x41, 0, 0x28, 2, 0, 0x04, 0x40, 0x00, 0x0b, 0x41, 0, 0x41, 1, 0x36, 2, 0, 0x41, 0]],
  ];
  return Uint8Array.from([
    ...[0, 0x61, 0x73, 0x6d, 1, 0, 0, 0],
    ...section(1, vector(types)),
    ...section(3, vector(functions.map(([, index]) => leb(index)))),
    ...section(5, vector([[0, 1]])),
    ...section(
      7,
      vector([[...name('memory'), 2, 0], ...functions.map(([word], index) => [...name(word), 0, ...leb(index)])]),
    ),
    ...section(10, vector(functions.map(([, , code]) => body(code)))),
    ...section(
      11,
      vector([[0, 0x41, ...signedLeb(4096), 0x0b, ...leb(text.length), ...new TextEncoder().encode(text)]]),
    ),
  ]);
}

function signedLeb(value: number): number[] {
  return value < 64 ? [value] : [(value & 127) | 128, ...signedLeb(value >>> 7)];
}

describe.skipIf(inBrowser || backend !== 'native')('the binder for Node', () => {
  it('copies arguments in shared memory, and outputs back only on success', () => {
    const instance = bound.handle('kvp_instance_create', 'auto', 0);
    const data = new Uint8Array(new SharedArrayBuffer(16));
    data.set([1, 2, 3, 4, 5, 6, 7, 8], 4);
    const payload = bound.handle('kvp_payload_dense', instance, data.subarray(4, 12), 'f16', BigInt64Array.of(4n));
    const out = new Uint8Array(new SharedArrayBuffer(10)).fill(0xa5);
    bound.call('kvp_payload_array', payload, 'data', out.subarray(1, 9));
    expect(hex(out)).toBe('a50102030405060708a5');
    expect(() => bound.call('kvp_payload_array', payload, 'data', out)).toThrow(KvPagesError);
    expect(hex(out)).toBe('a50102030405060708a5');
  });
});
