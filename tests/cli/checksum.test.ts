// SPDX-License-Identifier: Apache-2.0
// One program, unchanged, on every backend of this machine: the same checksum of codes and scales of all specs.
import { spawnSync } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { expect, test } from 'vitest';
import { load } from 'kvpages';

const root = fileURLToPath(new URL('../..', import.meta.url));

function checksum(backend: string): string {
  const { status, stdout, stderr } = spawnSync(process.execPath, ['scripts/checksum.mjs', backend], { cwd: root, encoding: 'utf8' });
  expect(status, stderr).toBe(0);
  return stdout;
}

test('wasm, native and a GPU that is there give one checksum', async () => {
  const wasm = checksum('wasm');
  expect(wasm).toMatch(/^[0-9a-f]{64} \d{3,} specs, \d{3,} tensors\n$/);
  expect(checksum('native')).toBe(wasm);
  const { backends } = (await load()).backends();
  if (backends.some(({ backend, available }) => backend === 'cuda' && available)) expect(checksum('cuda')).toBe(wasm);
});
