// SPDX-License-Identifier: Apache-2.0
// The options of every command that needs the core, and the core they ask for.
import { load } from '../index.js';
import type { KvPages } from '../index.js';
import type { Arguments, Option } from './args.js';

export const backendOptions: readonly Option[] = [
  { name: 'backend', value: 'WORD', help: 'auto, native or wasm (KVPAGES_BACKEND)' },
  { name: 'kernels', value: 'WORD', help: 'auto, reference, sse4, avx2, avx512, neon or wasm128 (KVPAGES_KERNELS)' },
];

export function loadFrom(args: Arguments): Promise<KvPages> {
  const backend = args.oneOf('backend', ['auto', 'cuda', 'native', 'wasm']);
  const kernels = args.oneOf('kernels', ['auto', 'reference', 'sse4', 'avx2', 'avx512', 'neon', 'wasm128']);
  return load({ ...(backend && { backend }), ...(kernels && { kernels }) });
}
