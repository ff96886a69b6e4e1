// SPDX-License-Identifier: Apache-2.0
// A GPU's driver as load() finds it: missing, broken, refusing, and the fake one of tests/cuda/fake. Each in a process of its
// own, as an environment is read once.
import { spawnSync } from 'node:child_process';
import { existsSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';

const root = fileURLToPath(new URL('../..', import.meta.url));
const fake = join(root, 'build/dev/tests/libfake_cuda.so');

interface Found {
  readonly backend?: string;
  readonly reason?: string;
  readonly row?: { readonly available: boolean; readonly reason: string };
  readonly code?: string;
  readonly message?: string;
}

/** What `load(options)` gives in a new process. */
function found(environment: Record<string, string>, options: object = {}): Found {
  const body = `
    import { load } from './dist/index.node.js';
    try {
      const kv = await load(${JSON.stringify(options)});
      console.log(JSON.stringify({ backend: kv.backend, reason: kv.reason, row: kv.backends().backends[0] }));
    } catch ({ code, message }) {
      console.log(JSON.stringify({ code, message }));
    }`;
  const { status, stdout, stderr } = spawnSync(process.execPath, ['--input-type=module', '-e', body], {
    cwd: root,
    encoding: 'utf8',
    env: { ...process.env, KVPAGES_BACKEND: '', KVPAGES_CUDA_DEVICE: '', ...environment },
  });
  expect(status, stderr).toBe(0);
  return JSON.parse(stdout) as Found;
}

const folder = mkdtempSync(join(tmpdir(), 'kvpages-device-'));
const broken = join(folder, 'libcuda.so.1');
beforeAll(() => writeFileSync(broken, 'no library'));
afterAll(() => rmSync(folder, { recursive: true }));

// An addon without kernels says so before it looks for a driver.
const kernels = !/without CUDA/.test(found({ KVPAGES_CUDA_LIBRARY: '/nowhere/libcuda.so.1' }).row?.reason ?? '');

describe('without a driver', () => {
  test('the addon runs on the CPU and says why', () => {
    for (const library of ['/nowhere/libcuda.so.1', broken]) {
      const { backend, reason, row } = found({ KVPAGES_CUDA_LIBRARY: library });
      expect(backend).toBe('native');
      expect(reason).toMatch(/^the addon for \S+ loaded; cuda: /);
      expect(row).toMatchObject({ available: false, reason: expect.stringMatching(kernels ? /^no CUDA driver \(.*libcuda/ : /without CUDA/) });
    }
  });

  test('asked for, it is an error', () => {
    const { code, message } = found({ KVPAGES_CUDA_LIBRARY: broken }, { backend: 'cuda' });
    expect(code).toBe('ERR_BACKEND');
    expect(message).toMatch(kernels ? /^backend: 'cuda' is not available here \(cuda: no CUDA driver \(/ : /without CUDA/);
  });

  test('nothing looks for it where the CPU was asked for', () => {
    const library = { KVPAGES_CUDA_LIBRARY: broken };
    for (const { backend, row } of [found({ ...library, KVPAGES_BACKEND: 'native' }), found(library, { backend: 'native' })]) {
      expect(backend).toBe('native');
      expect(row).toEqual({ backend: 'cuda', available: false, reason: 'not looked for' });
    }
  });
});

const able = kernels && existsSync(fake);
if (!able) console.warn(`SKIPPED: devices on the fake driver: ${kernels ? `${fake} is not built` : 'the addon has no CUDA kernels'}`);

describe.skipIf(!able)('with the fake driver', () => {
  const refused = (words: string, device = '') => {
    const { backend, row } = found({ KVPAGES_CUDA_LIBRARY: fake, KVPAGES_FAKE_CUDA: words, KVPAGES_CUDA_DEVICE: device });
    expect(backend).toBe('native');
    expect(row).toMatchObject({ backend: 'cuda', available: false });
    return row!.reason;
  };

  test('what does not fit is named', () => {
    expect(refused('devices=0')).toBe('no CUDA device (cuInit: CUDA_ERROR_NO_DEVICE)');
    expect(refused('version=12040')).toMatch(/^the driver is too old: it has CUDA 12\.4, the kernels need \d+\.0 or newer$/);
    expect(refused('version=99000;capability=6.1')).toMatch(/compute capability 6\.1, the kernels need 7\.5 or newer$/);
    expect(refused('version=99000;devices=2', '2')).toBe("KVPAGES_CUDA_DEVICE must be a number from 0 to 1, got 2");
    expect(refused('version=99000;cuDevicePrimaryCtxRetain:*:2')).toBe('cuDevicePrimaryCtxRetain failed, got CUDA_ERROR_OUT_OF_MEMORY');
    expect(refused('version=99000;cuModuleLoadDataEx:*:209')).toBe('cuModuleLoadDataEx failed, got CUDA_ERROR_NO_BINARY_FOR_GPU');
    expect(refused('version=99000;cuMemHostAlloc:*:2')).toBe('device: cuMemHostAlloc failed, got CUDA_ERROR_OUT_OF_MEMORY');
  });

  test('what fits is taken, by itself or by name', () => {
    const environment = { KVPAGES_CUDA_LIBRARY: fake, KVPAGES_FAKE_CUDA: 'version=99000;devices=2', KVPAGES_CUDA_DEVICE: '1' };
    const reason = 'Fake device 1, compute capability 9.0, CUDA driver 99.0';
    for (const options of [{}, { backend: 'auto' }, { backend: 'cuda' }]) {
      expect(found(environment, options)).toEqual({ backend: 'cuda', reason, row: { backend: 'cuda', available: true, reason } });
    }
    expect(found(environment, { backend: 'native' }).backend).toBe('native');
    expect(found({ ...environment, KVPAGES_BACKEND: 'native' }).backend).toBe('native');
  });
});
