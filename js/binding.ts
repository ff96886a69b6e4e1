// SPDX-License-Identifier: Apache-2.0
// What both binders give: the functions of src/kvpages.h under their C names, callable with numbers, strings and typed
// arrays. Lengths are implied. A function returns the status; outputs are written only when it is 0.
import { KvPagesError } from './errors.js';

export type Argument = number | string | ArrayBufferView;
export type CoreFunction = (...args: Argument[]) => number;
export type CoreFunctions = Readonly<Record<string, CoreFunction>>;

/** Signature letters of src/abi/describe.h: bytes of an element, the view that holds it, and the direction. */
export interface Letter {
  readonly bytes: number;
  readonly view: string;
  readonly output: boolean;
}
const arrays: ReadonlyArray<readonly [input: string, output: string, bytes: number, view: string]> = [
  ['B', 'b', 1, 'Uint8Array'],
  ['F', 'f', 4, 'Float32Array'],
  ['D', 'e', 8, 'Float64Array'],
  ['I', 'j', 4, 'Int32Array'],
  ['U', 'v', 4, 'Uint32Array'],
  ['L', 'l', 8, 'BigInt64Array'],
];
export const letters: ReadonlyMap<string, Letter> = new Map(
  arrays.flatMap(
    ([input, output, bytes, view]): Array<[string, Letter]> => [
      [input, { bytes, view, output: false }],
      [output, { bytes, view, output: true }],
    ],
  ),
);

/** Lines "name letters" of `kvp_describe`. */
export function parseDescription(text: string): ReadonlyMap<string, string> {
  const signatures = new Map<string, string>();
  for (const line of text.split('\n')) {
    const [name, signature = ''] = line.split(' ');
    if (name) signatures.set(name, signature);
  }
  return signatures;
}

/** Signatures of the few functions that reading the description itself takes. */
export const bootstrap: ReadonlyMap<string, string> = parseDescription(
  'kvp_describe v\nkvp_blob_size ue\nkvp_blob_read ub\nkvp_release u',
);

/** Name of a view's class, also for a view of another realm (a frame, a vm context). */
export function viewName(view: ArrayBufferView): string {
  return Object.prototype.toString.call(view).slice(8, -1);
}

/** Throws where an argument does not have the type of its letter; both binders give the same text. */
export function checkArgument(name: string, index: number, letter: string, value: Argument): void {
  const expected = letter === 'T' ? 'a string' : 'iud'.includes(letter) ? 'a number' : `a ${letters.get(letter)?.view}`;
  const fits =
    letter === 'T'
      ? typeof value === 'string'
      : 'iud'.includes(letter)
        ? typeof value === 'number'
        : ArrayBuffer.isView(value) && viewName(value) === letters.get(letter)?.view;
  if (!fits) throw new TypeError(`${name}: argument ${index} must be ${expected}`);
}

/** Whether a view lies in shared memory. */
export function isShared(view: ArrayBufferView): boolean {
  return typeof SharedArrayBuffer !== 'undefined' && view.buffer instanceof SharedArrayBuffer;
}

/** The functions with a status turned into an exception, and the shapes of result that several of them share. */
export class Core {
  constructor(readonly functions: CoreFunctions) {}

  call(name: string, ...args: Argument[]): void {
    const f = this.functions[name];
    if (f === undefined)
      throw new KvPagesError(
        'ERR_BACKEND',
        `the loaded core has no ${name}: it is of another version than this script`,
      );
    if (f(...args) !== 0) throw this.lastError();
  }

  /** Calls a function whose last parameter receives a handle. */
  handle(name: string, ...args: Argument[]): number {
    const out = new Uint32Array(1);
    this.call(name, ...args, out);
    return out[0]!;
  }

  /** Calls a function whose last parameter receives one double. */
  number(name: string, ...args: Argument[]): number {
    const out = new Float64Array(1);
    this.call(name, ...args, out);
    return out[0]!;
  }

  /** Calls a function whose last parameter receives a blob of text. */
  text(name: string, ...args: Argument[]): string {
    const blob = this.handle(name, ...args);
    try {
      const bytes = new Uint8Array(this.number('kvp_blob_size', blob));
      this.call('kvp_blob_read', blob, bytes);
      return new TextDecoder().decode(bytes);
    } finally {
      this.functions['kvp_release']!(blob);
    }
  }

  json<T>(name: string, ...args: Argument[]): T {
    return JSON.parse(this.text(name, ...args)) as T;
  }

  private lastError(): KvPagesError {
    const { code, message, ...fields } = this.json<{ code: KvPagesError['code']; message: string }>('kvp_last_error');
    return new KvPagesError(code, message, fields);
  }
}
