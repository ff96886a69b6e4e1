// SPDX-License-Identifier: Apache-2.0
// Workers: each has a core of its own, gives the same bytes, and may end at any time.
import { describe, expect, it } from 'vitest';
import { backend, hex, inBrowser, loadHere } from './support.js';
import { work } from './worker-task.js';

interface Runner {
  /** The file that the task makes in a worker. */
  readonly result: Promise<Uint8Array>;
  terminate(): unknown;
}

async function start(): Promise<Runner> {
  if (inBrowser) {
    const worker = new Worker(new URL('./worker-body.ts', import.meta.url), { type: 'module' });
    const result = new Promise<Uint8Array>((resolve, reject) => {
      worker.onmessage = ({ data }) => (data instanceof Uint8Array ? resolve(data) : reject(new Error(String(data))));
      worker.onerror = (event) => reject(new Error(event.message));
    });
    return { result, terminate: () => worker.terminate() };
  }
  // Node 20 does not run TypeScript, so its workers run the built package.
  const { Worker: NodeWorker } = await import(/* @vite-ignore */ 'node:worker_threads');
  const index = new URL('../../dist/index.node.js', import.meta.url).href;
  const code = `const work = ${work};
    (async () => {
      const { parentPort } = require('node:worker_threads');
      const { load } = await import(${JSON.stringify(index)});
      parentPort.postMessage(work(await load({ backend: ${JSON.stringify(backend)} })));
    })();`;
  const worker = new NodeWorker(code, { eval: true });
  const result = new Promise<Uint8Array>((resolve, reject) => {
    worker.on('message', resolve);
    worker.on('error', reject);
  });
  return { result, terminate: () => worker.terminate() };
}

describe('workers', () => {
  it('give the bytes that this thread gives, several at once', async () => {
    const expected = hex(work(await loadHere()));
    const runners = await Promise.all([start(), start(), start()]);
    for (const { result } of runners) expect(hex(await result)).toBe(expected);
    await Promise.all(runners.map((runner) => runner.terminate()));
    // This thread's core goes on after theirs are gone.
    expect(hex(work(await loadHere()))).toBe(expected);
  });

  it('may be ended in the middle', async () => {
    const runner = await start();
    runner.result.catch(() => undefined);
    await runner.terminate();
    expect(work(await loadHere()).length).toBeGreaterThan(0);
  });
});
