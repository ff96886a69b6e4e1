// SPDX-License-Identifier: Apache-2.0
// Binder for a WebAssembly instance of the core: reads its signatures from the instance itself and names no function
// of the API. One arena per call holds all arrays of that call.
import { bootstrap, checkArgument, Core, letters, parseDescription } from './binding.js';
import type { Argument, CoreFunction, CoreFunctions } from './binding.js';
import { KvPagesError } from './errors.js';

interface Exports {
  readonly memory: WebAssembly.Memory;
  malloc(bytes: number): number;
  free(pointer: number): void;
  _initialize?(): void;
  readonly [name: string]: unknown;
}

const alignment = 16; // enough for any element and for v128 loads
const addressSpace = 2 ** 32;
const encoder = new TextEncoder();

/** Makes an instance of a compiled core. Each has a heap of its own. */
export async function bindWasm(module: WebAssembly.Module): Promise<CoreFunctions> {
  const instance = await WebAssembly.instantiate(module, importsOf(module));
  return bindInstance(instance.exports as unknown as Exports);
}

/** What the C library asks of its host. Nothing in the core prints, reads files or ends the process. */
function importsOf(module: WebAssembly.Module): WebAssembly.Imports {
  const imports: Record<string, Record<string, WebAssembly.ImportValue>> = {};
  const notSupported = 52; // WASI's errno for a call that the host does not have
  for (const { module: room, name, kind } of WebAssembly.Module.imports(module)) {
    if (kind !== 'function') continue;
    (imports[room] ??= {})[name] = /exit|abort/.test(name)
      ? () => {
          throw new Error(`the core called ${name}`);
        }
      : () => notSupported;
  }
  return imports;
}

function bindInstance(exports: Exports): CoreFunctions {
  const state: { trap?: unknown } = {};
  exports._initialize?.();
  const bind = (signatures: ReadonlyMap<string, string>): Record<string, CoreFunction> => {
    const bound: Record<string, CoreFunction> = {};
    for (const [name, signature] of signatures) {
      const native = exports[name];
      if (typeof native !== 'function')
        throw new KvPagesError('ERR_BACKEND', `the WebAssembly module does not export ${name}`);
      bound[name] = bindFunction(exports, state, name, signature, native as (...args: number[]) => number);
    }
    return bound;
  };
  const signatures = parseDescription(new Core(bind(bootstrap)).text('kvp_describe'));
  return bind(signatures);
}

interface Part {
  readonly offset: number;
  readonly bytes: Uint8Array;
  readonly output: boolean;
}

function bindFunction(
  exports: Exports,
  state: { trap?: unknown },
  name: string,
  signature: string,
  native: (...args: number[]) => number,
): CoreFunction {
  return (...args: Argument[]) => {
    if ('trap' in state) {
      throw new KvPagesError(
        'ERR_INTERNAL',
        `this instance stopped: ${String(state.trap)}; load() a new one`,
        {},
        { cause: state.trap },
      );
    }
    if (args.length !== signature.length)
      throw new TypeError(`${name}: takes ${signature.length} arguments, got ${args.length}`);
    const parts: Part[] = [];
    // Numbers for the call; of an array its offset in the arena, made a pointer once the arena is there.
    const slots: Array<{ value: number } | { part: Part | null; length: number }> = [];
    let total = 0;
    for (let i = 0; i < signature.length; ++i) {
      const letter = signature[i]!;
      const value = args[i]!;
      checkArgument(name, i, letter, value);
      if (typeof value === 'number') {
        slots.push({ value });
        continue;
      }
      const bytes =
        typeof value === 'string'
          ? encoder.encode(value)
          : new Uint8Array(value.buffer, value.byteOffset, value.byteLength);
      const shape = letters.get(letter);
      const part = bytes.length === 0 ? null : { offset: total, bytes, output: shape?.output ?? false };
      if (part !== null) parts.push(part);
      slots.push({ part, length: bytes.length / (shape?.bytes ?? 1) });
      total += Math.ceil(bytes.length / alignment) * alignment;
    }
    const room = total + alignment;
    let pointer = 0;
    let alive = true;
    try {
      if (total > 0) {
        if (room < addressSpace) pointer = exports.malloc(room) >>> 0;
        if (pointer === 0) throw new OutOfMemory();
      }
      // malloc gives 8 bytes of alignment; the arena starts at the next multiple of 16.
      const base = Math.ceil(pointer / alignment) * alignment;
      // Views are made anew: growth of the memory detaches older ones.
      if (parts.length > 0) {
        const heap = new Uint8Array(exports.memory.buffer);
        for (const part of parts) if (!part.output) heap.set(part.bytes, base + part.offset);
      }
      const status = native(
        ...slots.flatMap((slot) =>
          'value' in slot ? [slot.value] : [slot.part === null ? 0 : base + slot.part.offset, slot.length],
        ),
      );
      if (status === 0) {
        const heap = new Uint8Array(exports.memory.buffer);
        for (const part of parts) {
          if (part.output) part.bytes.set(heap.subarray(base + part.offset, base + part.offset + part.bytes.length));
        }
      }
      return status;
    } catch (error) {
      if (error instanceof OutOfMemory) {
        throw new KvPagesError('ERR_MEMORY', `out of WebAssembly memory: ${room} bytes for the arguments of one call`);
      }
      // A trap, or the stack's end: the heap may be in any state, so nothing may run in it again.
      alive = false;
      state.trap = error;
      throw new KvPagesError('ERR_INTERNAL', `the core stopped: ${String(error)}`, {}, { cause: error });
    } finally {
      if (alive && pointer !== 0) exports.free(pointer);
    }
  };
}

class OutOfMemory extends Error {}
