// SPDX-License-Identifier: Apache-2.0
// How long work lets others of its thread run, and when it ends for them.
import { KvPagesError } from './errors.js';
import { wrongType } from './tensor.js';

/** Lets timers, events and rendering run. */
export function pause(): Promise<void> {
  const { setImmediate } = globalThis as { setImmediate?: (callback: () => void) => void };
  return new Promise((resolve) => (setImmediate === undefined ? setTimeout(resolve, 0) : setImmediate(resolve)));
}

export function requireSignal(signal: unknown): void {
  if (signal === undefined || typeof (signal as Partial<AbortSignal> | null)?.addEventListener === 'function') return;
  throw wrongType('signal', 'must be an AbortSignal', signal);
}

export function throwIfAborted(signal: AbortSignal | undefined, after: string): void {
  requireSignal(signal);
  if (signal?.aborted) throw new KvPagesError('ERR_ABORTED', `aborted after ${after}`, {}, { cause: signal.reason });
}
