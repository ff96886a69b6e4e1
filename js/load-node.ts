// SPDX-License-Identifier: Apache-2.0
// Finds the core in Node: the addon of this platform, with a GPU or without, else WebAssembly, and says which and why.
import { readFile } from 'node:fs/promises';
import { createRequire } from 'node:module';
import { bindAddon } from './bind-addon.js';
import { Core } from './binding.js';
import { compile, once, open } from './loader.js';
import type { Attempt, Environment } from './loader.js';
import type { LoadOptions } from './kv-pages.js';

const require = createRequire(import.meta.url);

// Literal paths, so that bundlers can trace them. They hold from js/ and from dist/.
const addons: Readonly<Record<string, () => unknown>> = {
  'darwin-arm64': () => require('../prebuilds/darwin-arm64/kvpages.node'),
  'darwin-x64': () => require('../prebuilds/darwin-x64/kvpages.node'),
  'linux-arm64': () => require('../prebuilds/linux-arm64/kvpages.node'),
  'linux-x64': () => require('../prebuilds/linux-x64/kvpages.node'),
  'win32-x64': () => require('../prebuilds/win32-x64/kvpages.node'),
};

let found: Attempt | undefined;

function native(): Attempt {
  return (found ??= findAddon());
}

function findAddon(): Attempt {
  // Deno and Bun run this file too; their addon support is partial, and a crash there is no error value.
  for (const runtime of ['bun', 'deno']) {
    if (process.versions[runtime] !== undefined) return { reason: `the addon is for Node, not for ${runtime}` };
  }
  const platform = `${process.platform}-${process.arch}`;
  const addon = addons[platform];
  if (addon === undefined) return { reason: `there is no addon for ${platform}` };
  try {
    return { functions: bindAddon(addon()), reason: `the addon for ${platform} loaded` };
  } catch (error) {
    // The first line says it; the rest is the list of requiring files.
    return { reason: `the addon for ${platform} does not load: ${String(error).split('\n')[0]}` };
  }
}

function cuda(): Attempt {
  const { functions } = native();
  if (functions === undefined) return { reason: 'there is no addon to use it' };
  const core = new Core(functions);
  // Asked each time: what is there is remembered by the core, and a GPU may be lost.
  const { usable, reason } = core.json<{ usable: boolean; reason: string }>('kvp_device_probe');
  if (!usable) return { reason };
  // It may still have no memory for an instance.
  const instance = core.handle('kvp_instance_create', 'reference', 0);
  try {
    core.call('kvp_instance_device', instance, 'cuda');
  } catch (error) {
    return { reason: (error as Error).message };
  } finally {
    core.call('kvp_release', instance);
  }
  return { functions, reason };
}

/** Files are read, other locations are fetched. */
async function read(location: string | URL): Promise<Response | BufferSource> {
  const isUrl = location instanceof URL || /^(https?|data|blob|file):/.test(location);
  const url = isUrl ? new URL(location) : undefined;
  if (url !== undefined && url.protocol !== 'file:') return fetch(url);
  return readFile(url ?? location);
}

const beside = once(() => compile(new URL('../dist/kvpages.wasm', import.meta.url), read));

export function openHere(options: LoadOptions): ReturnType<typeof open> {
  const environment: Environment = {
    backend: process.env['KVPAGES_BACKEND'],
    kernels: process.env['KVPAGES_KERNELS'],
    native,
    cuda,
    module: (source) => (source === undefined ? beside() : compile(source, read)),
  };
  return open(options, environment);
}
