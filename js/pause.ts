// SPDX-License-Identifier: Apache-2.0
// How long work lets others of its thread run.

/** Lets timers, events and rendering run. */
export function pause(): Promise<void> {
  const { setImmediate } = globalThis as { setImmediate?: (callback: () => void) => void };
  return new Promise((resolve) => (setImmediate === undefined ? setTimeout(resolve, 0) : setImmediate(resolve)));
}
