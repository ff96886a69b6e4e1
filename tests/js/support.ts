// SPDX-License-Identifier: Apache-2.0
// What the test bodies need from the place that they run in.
import { expect, inject } from 'vitest';
import { KvPagesError, load } from '../../js/index.js';
import type { KvPages, LoadOptions } from '../../js/index.js';

declare module 'vitest' {
  export interface ProvidedContext {
    backend: 'native' | 'wasm' | 'cuda';
  }
}

/** The backend that this project is about. */
export const backend = inject('backend');
export const inBrowser = typeof document !== 'undefined';

/** Loads the project's backend and makes sure that it is what runs. */
export async function loadHere(options: LoadOptions = {}): Promise<KvPages> {
  const kv = await load({ backend, ...options });
  expect(kv.backend).toBe(backend);
  return kv;
}

/** A file of the repository. */
export async function readRepositoryFile(path: string): Promise<Uint8Array<ArrayBuffer>> {
  if (inBrowser) {
    const response = await fetch(`/${path}`);
    if (!response.ok) throw new Error(`${path}: ${response.status}`);
    return new Uint8Array(await response.arrayBuffer());
  }
  const { readFile } = await import(/* @vite-ignore */ 'node:fs/promises');
  return new Uint8Array(await readFile(new URL(`../../${path}`, import.meta.url)));
}

export function hex(bytes: ArrayBufferView): string {
  return Array.from(new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength), (byte) =>
    byte.toString(16).padStart(2, '0'),
  ).join('');
}

export function fromHex(text: string): Uint8Array<ArrayBuffer> {
  return Uint8Array.from(text.replaceAll(/\s/g, '').match(/../g) ?? [], (pair) => Number.parseInt(pair, 16));
}

/** The error of a call that must throw one of this package. */
export function errorOf(f: () => unknown): KvPagesError {
  try {
    f();
  } catch (error) {
    expect(error).toBeInstanceOf(KvPagesError);
    return error as KvPagesError;
  }
  throw new Error('nothing was thrown');
}

/** Numbers of a fixed sequence, about normally distributed, with some outliers. */
export function noise(count: number, seed = 1): Float32Array<ArrayBuffer> {
  let state = seed >>> 0;
  const next = () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
  return Float32Array.from(
    { length: count },
    (_, i) => (next() + next() + next() + next() - 2) * (i % 17 === 0 ? 8 : 1),
  );
}

export async function sha256(bytes: Uint8Array<ArrayBuffer>): Promise<string> {
  return hex(new Uint8Array(await crypto.subtle.digest('SHA-256', bytes)));
}
