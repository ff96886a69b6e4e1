// SPDX-License-Identifier: Apache-2.0
// Runs a benchmark that was built as a WebAssembly program.
import { existsSync } from 'node:fs';
import { readFile } from 'node:fs/promises';
import { WASI } from 'node:wasi';

export async function runProgram(name, ...words) {
  const path = new URL(`../../build/wasm/wasm/${name}.wasm`, import.meta.url);
  if (!existsSync(path)) return console.log(`build/wasm/wasm/${name}.wasm is not built: npm run bench builds it`);
  const wasi = new WASI({ version: 'preview1', args: [name, ...words], env: {}, returnOnExit: true });
  const { instance } = await WebAssembly.instantiate(await readFile(path), {
    wasi_snapshot_preview1: wasi.wasiImport,
    env: { emscripten_notify_memory_growth: () => {} },
  });
  wasi.start(instance);
}
