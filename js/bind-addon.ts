// SPDX-License-Identifier: Apache-2.0
// Binder for Node's addon, which already has the right shape. Only views in shared memory need care: another thread
// may write them during a call, so the core sees private copies.
import { bootstrap, Core, isShared, letters, parseDescription } from './binding.js';
import type { Argument, CoreFunction, CoreFunctions } from './binding.js';
import { KvPagesError } from './errors.js';

export function bindAddon(addon: unknown): CoreFunctions {
  const native = addon as Record<string, CoreFunction>;
  for (const name of bootstrap.keys()) {
    if (typeof native?.[name] !== 'function')
      throw new KvPagesError('ERR_BACKEND', `the addon does not export ${name}`);
  }
  const signatures = parseDescription(new Core(native).text('kvp_describe'));
  const bound: Record<string, CoreFunction> = {};
  for (const [name, signature] of signatures) {
    const f = native[name];
    if (typeof f !== 'function') throw new KvPagesError('ERR_BACKEND', `the addon does not export ${name}`);
    bound[name] = (...args) => (args.some(inSharedMemory) ? callWithCopies(f, signature, args) : f(...args));
  }
  return bound;
}

function inSharedMemory(value: Argument): boolean {
  return ArrayBuffer.isView(value) && isShared(value);
}

function callWithCopies(f: CoreFunction, signature: string, args: Argument[]): number {
  const copies = args.map((value) => {
    if (!inSharedMemory(value)) return value;
    const view = value as Uint8Array;
    // Any typed array's constructor copies into memory of its own.
    return new (view.constructor as new (source: Uint8Array) => Uint8Array)(view);
  });
  const status = f(...copies);
  if (status === 0) {
    copies.forEach((copy, i) => {
      if (copy !== args[i] && letters.get(signature[i]!)?.output) (args[i] as Uint8Array).set(copy as Uint8Array);
    });
  }
  return status;
}
