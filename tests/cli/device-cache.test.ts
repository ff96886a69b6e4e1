// SPDX-License-Identifier: Apache-2.0
// Caches and tensors on a GPU as JavaScript sees them, on the fake driver of tests/cuda/fake: the same bytes as on the CPU, the
// same objects, and what is left when the device fails. Each in a process of its own, as an environment is read once.
import { spawnSync } from 'node:child_process';
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { describe, expect, test } from 'vitest';

const root = fileURLToPath(new URL('../..', import.meta.url));
const fake = join(root, 'build/dev/tests/libfake_cuda.so');

/** What `body` puts into `result`, in a process whose driver is the fake one. */
function run(body: string, environment: Record<string, string> = {}): Record<string, unknown> {
  const program = `
    import { load } from './dist/index.node.js';
    const shape = { layers: 2, kvHeads: 2, headDim: 32 };
    const noise = (count, seed) => Float32Array.from({ length: count }, (_, i) => {
      const x = Math.imul(i + 1, 0x9e3779b1) ^ Math.imul(seed, 0x85ebca6b);
      return (Math.imul(x ^ (x >>> 15), 0x2c1b3c6d) >> 8) / 2 ** 21;
    });
    const tokens = (count, seed) => ({ dims: [2, 2, count, 32], data: noise(4 * count * 32, seed) });
    const same = (a, b) => Buffer.compare(Buffer.from(a.buffer, a.byteOffset, a.byteLength), Buffer.from(b.buffer, b.byteOffset, b.byteLength)) === 0;
    const failure = (f) => { try { f(); } catch ({ code, message }) { return { code, message }; } };
    const result = {};
    ${body}
    console.log(JSON.stringify(result));`;
  const { status, stdout, stderr } = spawnSync(process.execPath, ['--input-type=module', '-e', program], {
    cwd: root,
    encoding: 'utf8',
    env: { ...process.env, KVPAGES_BACKEND: '', KVPAGES_CUDA_DEVICE: '', KVPAGES_CUDA_LIBRARY: fake, KVPAGES_FAKE_CUDA: 'version=99000', ...environment },
  });
  expect(status, stderr).toBe(0);
  return JSON.parse(stdout) as Record<string, unknown>;
}

const why = existsSync(fake)
  ? (run(`result.row = (await load()).backends().backends[0];`)['row'] as { available: boolean; reason: string })
  : { available: false, reason: `${fake} is not built` };
if (!why.available) console.warn(`SKIPPED: caches on the fake driver: ${why.reason}`);

describe.skipIf(!why.available)('on the fake driver', () => {
  test('a cache is the CPU’s, and moves without being encoded anew', () => {
    const result = run(`
      const kv = await load(), cpu = await load({ backend: 'native' });
      result.backend = kv.backend;
      result.device = kv.device;
      result.none = cpu.device === undefined;
      const there = kv.createCache({ ...shape, preset: 'kv4' }), here = cpu.createCache({ ...shape, preset: 'kv4' });
      result.devices = [there.device, here.device, there.stats().device, here.stats().device];
      for (const [i, count] of [90, 1, 17, 1].entries()) {
        for (const cache of [there, here]) cache.appendAll(tokens(count, i), tokens(count, i + 100));
      }
      result.frozen = [there.freeze(), here.freeze()].map(({ key }) => key);
      const file = here.serialize();
      result.files = same(there.serialize(), file);
      result.stats = [there, here].map((cache) => ({ ...cache.stats(), device: '' }));
      const home = there.to('cpu');
      result.moved = [home.device, same(home.serialize(), file), same(home.to('cuda').serialize(), file)];
      const fork = there.to('cuda');
      result.shared = fork.stats().pages.shared === there.pages(0).length * 2;
      const queries = { dims: [4, 1, 32], data: noise(128, 7) };
      const near = (a, b) => Math.max(...a.map((x, i) => Math.abs(x - b[i])));
      const a = there.attend(1, queries, { lse: true }), b = here.attend(1, queries, { lse: true });
      result.attend = [near(a.data, b.data) < 1e-2, near(a.lse, b.lse) < 1e-2];
      const batch = kv.attendBatch([there, fork, home], 1, { dims: [3, 4, 1, 32], data: noise(384, 7) });
      result.batch = same(batch.data.subarray(0, 128), a.data);
      result.read = ['f32', 'bf16'].map((type) => {
        const [x, y] = [there, here].map((cache) => cache.read(0, { start: 2, end: 100, type }).value.data);
        return same(x, y);
      });
      const restored = kv.restore(file), plain = kv.restore(file, { device: 'cpu' });
      result.restored = [restored.device, plain.device, same(restored.serialize(), file), same(plain.serialize(), file)];
      result.paged = same(there.toPaged(0).serialize(), here.toPaged(0).serialize());
      const back = kv.fromPaged([there.toPaged(0), there.toPaged(1)], { ...shape, preset: 'kv4' });
      result.back = [back.device, same(back.read(1).key.data, here.read(1).key.data)];
      result.sliced = same(there.slice(4, 52).serialize(), here.slice(4, 52).serialize());
      result.held = kv.device.heldBytes > 0;
      for (const cache of [there, home, fork, restored, plain, back]) cache.dispose();
      result.unknown = failure(() => kv.createCache({ ...shape, device: 'tpu' }));
    `);
    expect(result).toMatchObject({
      backend: 'cuda',
      device: { name: 'cuda', description: expect.stringMatching(/\S/) },
      none: true,
      devices: ['cuda', 'cpu', 'cuda', 'cpu'],
      files: true,
      moved: ['cpu', true, true],
      shared: true,
      attend: [true, true],
      batch: true,
      read: [true, true],
      restored: ['cuda', 'cpu', true, true],
      paged: true,
      back: ['cuda', true],
      sliced: true,
      held: true,
      unknown: { code: 'ERR_BACKEND', message: 'device: this instance has only cpu or cuda, got tpu' },
    });
    expect((result['frozen'] as unknown[])[0]).toEqual((result['frozen'] as unknown[])[1]);
    expect((result['stats'] as unknown[])[0]).toEqual((result['stats'] as unknown[])[1]);
  });

  test('tensors and pages are encoded and decoded there', () => {
    const result = run(`
      const kv = await load({ backend: 'cuda' }), cpu = await load({ backend: 'native' });
      const data = noise(2 * 30 * 64, 1), dims = [2, 30, 64];
      const both = (spec) => [kv, cpu].map((one) => one.quantize({ dims, data }, { spec, side: 'key' }));
      result.codes = kv.formats().presets.map(({ name }) => {
        const [a, b] = both(name);
        return same(a.dequantize().data, b.dequantize().data) && same(a.dequantize({ type: 'f16', start: 3 }).data, b.dequantize({ type: 'f16', start: 3 }).data)
          && JSON.stringify(a.figures) === JSON.stringify(b.figures);
      });
      const pages = [kv, cpu].map((one) => {
        const cache = one.splitIntoPages({ dims, data }, { dims, data });
        const to = { scale: 0.25, zeroPoint: 1, type: 'uint4' };
        const made = one.quantizePagedCache(cache, [0, 1], { key: to, value: { ...to, type: 'int8' } });
        const again = one.quantizePagedCache(made, [0], { key: { scale: 1, zeroPoint: 0, type: 'f16' }, value: { scale: 0.5, zeroPoint: 0, type: 'int2' } });
        return again.serialize();
      });
      result.pages = same(pages[0], pages[1]);
      const bad = data.slice();
      bad[70] = NaN;
      result.bad = [kv, cpu].map((one) => failure(() => one.quantize({ dims, data: bad }, 'int8')));
    `);
    expect(new Set(result['codes'] as boolean[])).toEqual(new Set([true]));
    expect(result).toMatchObject({ pages: true });
    const [a, b] = result['bad'] as Array<{ code: string }>;
    expect(a).toEqual(b);
    expect(a!.code).toBe('ERR_NON_FINITE');
  });

  test('the benchmark of caches runs', () => {
    const { status, stdout, stderr } = spawnSync(process.execPath, ['tests/bench/gpu.bench.mjs', 'quick'], {
      cwd: root,
      encoding: 'utf8',
      env: { ...process.env, KVPAGES_CUDA_LIBRARY: fake, KVPAGES_FAKE_CUDA: 'version=99000' },
    });
    expect(status, stderr).toBe(0);
    const [, there, here] = stdout.split('\n');
    expect(there).toMatch(/^kv4, Fake device 0.* MB to the CPU in /);
    expect(here).toMatch(/^kv4, \w+: 96 tokens/);
  });

  test('once the context is lost, its caches say so; the CPU’s and files work', () => {
    const result = run(
      `
      const kv = await load({ backend: 'cuda' }), cpu = await load({ backend: 'native' });
      const cache = kv.createCache({ ...shape, preset: 'kv4' });
      cache.appendAll(tokens(40, 1), tokens(40, 2));
      const file = cache.serialize(), home = cache.to('cpu');
      let lost;
      for (let i = 0; lost === undefined && i < 50; ++i) lost = failure(() => cache.appendAll(tokens(20, i), tokens(20, i)));
      result.lost = lost;
      result.after = [() => cache.serialize(), () => cache.read(0), () => cache.attend(0, { dims: [2, 1, 32], data: noise(64, 3) }), () => cache.to('cpu'),
        () => kv.quantize({ dims: [2, 16], data: noise(32, 1) }, 'int8')].map((f) => failure(f)?.code);
      result.error = kv.device.error;
      cache.dispose();
      home.appendAll(tokens(20, 1), tokens(20, 2));
      result.home = home.tokens;
      result.restored = same(kv.restore(file, { device: 'cpu' }).serialize(), file) && same(cpu.restore(file).serialize(), file);
      result.next = (await load()).backend;
    `,
      { KVPAGES_FAKE_CUDA: 'version=99000;cuLaunchKernel:12:719' },
    );
    expect(result['lost']).toMatchObject({ code: 'ERR_DEVICE' });
    expect(result).toMatchObject({ after: Array(5).fill('ERR_DEVICE'), error: expect.stringContaining('CUDA_ERROR'), home: 60, restored: true, next: 'native' });
  });
});
