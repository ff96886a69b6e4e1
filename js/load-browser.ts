// SPDX-License-Identifier: Apache-2.0
// Finds the core in browsers, workers and edge runtimes: always WebAssembly.
import { compile, once, open } from './loader.js';
import type { Environment } from './loader.js';
import type { LoadOptions } from './kv-pages.js';

// A literal, so that bundlers see the file and copy it. The path holds from js/ and from dist/.
const beside = once(() => compile(new URL('../dist/kvpages.wasm', import.meta.url), (location) => fetch(location)));

const environment: Environment = {
  native: () => ({ reason: 'there are no addons outside Node' }),
  cuda: () => ({ reason: 'there is no CUDA outside Node' }),
  module: (source) => (source === undefined ? beside() : compile(source, (location) => fetch(location))),
};

export function openHere(options: LoadOptions): ReturnType<typeof open> {
  return open(options, environment);
}
