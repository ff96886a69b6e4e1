// SPDX-License-Identifier: Apache-2.0
// Runs a benchmark that was built as a WebAssembly program. The few system calls that it makes are here: Node 20's own WASI ends
// now and then with a segmentation fault when such a program is done.
import { existsSync, writeSync } from 'node:fs';
import { readFile } from 'node:fs/promises';

class Exit extends Error {}

export async function runProgram(name, ...words) {
  const path = new URL(`../../build/wasm/wasm/${name}.wasm`, import.meta.url);
  if (!existsSync(path)) return console.log(`build/wasm/wasm/${name}.wasm is not built: npm run bench builds it`);
  const texts = [name, ...words].map((word) => new TextEncoder().encode(`${word}\0`));
  let memory;
  const view = () => new DataView(memory.buffer);
  const sizes = (list) => (count, bytes) => {
    view().setUint32(count, list.length, true);
    view().setUint32(bytes, list.reduce((sum, text) => sum + text.length, 0), true);
    return 0;
  };
  const strings = (list) => (pointers, at) => {
    for (const [i, text] of list.entries()) {
      view().setUint32(pointers + 4 * i, at, true);
      new Uint8Array(memory.buffer).set(text, at);
      at += text.length;
    }
    return 0;
  };
  const unsupported = 52;
  const calls = {
    args_sizes_get: sizes(texts),
    args_get: strings(texts),
    environ_sizes_get: sizes([]),
    environ_get: strings([]),
    clock_time_get: (_clock, _precision, out) => {
      view().setBigUint64(out, process.hrtime.bigint(), true);
      return 0;
    },
    fd_write: (file, list, count, written) => {
      let total = 0;
      for (let i = 0; i < count; ++i) {
        const at = view().getUint32(list + 8 * i, true), size = view().getUint32(list + 8 * i + 4, true);
        writeSync(file, new Uint8Array(memory.buffer, at, size));
        total += size;
      }
      view().setUint32(written, total, true);
      return 0;
    },
    fd_seek: () => unsupported,
    fd_close: () => 0,
    proc_exit: (status) => {
      if (status !== 0) process.exitCode = status;
      throw new Exit();
    },
  };
  const { instance } = await WebAssembly.instantiate(await readFile(path), {
    wasi_snapshot_preview1: calls,
    env: { emscripten_notify_memory_growth: () => {} },
  });
  memory = instance.exports.memory;
  try {
    instance.exports._start();
  } catch (error) {
    if (!(error instanceof Exit)) throw error;
  }
}
