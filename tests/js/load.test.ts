// SPDX-License-Identifier: Apache-2.0
// What load() chooses, says and refuses.
import { afterEach, describe, expect, it, vi } from 'vitest';
import { KvPagesError, load } from '../../js/index.js';
import type { ErrorCode } from '../../js/index.js';
import { backend, errorOf, inBrowser, loadHere, readRepositoryFile } from './support.js';

const wasm = () => readRepositoryFile('dist/kvpages.wasm');

describe('load', () => {
  it('runs on the backend of this project and says why', async () => {
    const kv = await loadHere();
    expect(kv.reason).toMatch(backend === 'native' ? /addon for .* loaded/ : /WebAssembly module runs/);
    const { backends, kernels } = kv.backends();
    expect(backends.map((entry) => entry.backend)).toEqual(['cuda', 'native', 'wasm']);
    expect(backends.find((entry) => entry.backend === backend)).toMatchObject({ available: true });
    expect(backends[0]).toEqual({ backend: 'cuda', available: false, reason: 'not looked for' });
    expect(kernels.at(-1)).toEqual({ name: 'reference', available: true });
    expect(kernels.find((entry) => entry.name === kv.kernels)).toMatchObject({ available: true });
  });

  it('takes the best kernels by default, and any that were asked for', async () => {
    const kv = await loadHere();
    const { kernels } = kv.backends();
    expect(kv.kernels).toBe(kernels.find((entry) => entry.available)!.name);
    for (const { name, available } of kernels) {
      if (available) expect((await loadHere({ kernels: name })).kernels).toBe(name);
      else await expect(load({ backend, kernels: name })).rejects.toMatchObject({ code: 'ERR_BACKEND' });
    }
  });

  it('knows kernels of another machine by name and refuses them', async () => {
    const foreign = backend === 'native' ? 'wasm128' : 'avx2';
    const failure = load({ backend, kernels: foreign });
    await expect(failure).rejects.toMatchObject({ name: 'KvPagesError', code: 'ERR_BACKEND' });
    await expect(failure).rejects.toThrow(foreign);
  });

  it('refuses backends that are not there instead of taking another', async () => {
    if (inBrowser) {
      await expect(load({ backend: 'cuda' })).rejects.toMatchObject({
        code: 'ERR_BACKEND',
        message: "backend: 'cuda' is not available here (cuda: there is no CUDA outside Node)",
      });
    }
    await expect(load({ backend: 'gpu' as 'cuda' })).rejects.toMatchObject({
      code: 'ERR_BACKEND',
      message: "backend: must be auto, cuda, native or wasm, got 'gpu'",
    });
    if (inBrowser) {
      await expect(load({ backend: 'native' })).rejects.toMatchObject({
        code: 'ERR_BACKEND',
        message: "backend: 'native' is not available here (native: there are no addons outside Node)",
      });
    }
  });

  it('throws a TypeError for options of the wrong type', async () => {
    await expect(load(1 as never)).rejects.toThrow(new TypeError('options: must be an object, got 1'));
    await expect(load({ bakend: 'wasm' } as never)).rejects.toThrow(
      new TypeError('options.bakend: is no option; there are backend, kernels, maxBytes, wasm'),
    );
    await expect(load({ backend: 1 as never })).rejects.toThrow(new TypeError('backend: must be a string, got 1'));
    await expect(load({ maxBytes: '1' as never })).rejects.toThrow(
      new TypeError('maxBytes: must be a number, got "1"'),
    );
    await expect(load({ backend: 'wasm', wasm: 5 as never })).rejects.toThrow(TypeError);
  });

  it('lists the codes that the core has', async () => {
    const kv = await loadHere();
    // The keys of this record are held against the union by the compiler, and against the core here.
    const codes: Record<ErrorCode, true> = {
      ERR_ARGUMENT: true,
      ERR_SHAPE: true,
      ERR_SPEC: true,
      ERR_NON_FINITE: true,
      ERR_UNSUPPORTED: true,
      ERR_CORRUPT: true,
      ERR_MISMATCH: true,
      ERR_LIMIT: true,
      ERR_MEMORY: true,
      ERR_BUFFER: true,
      ERR_DISPOSED: true,
      ERR_ABORTED: true,
      ERR_BACKEND: true,
      ERR_DEVICE: true,
      ERR_INTERNAL: true,
    };
    expect(Object.keys(kv.errorCodes).sort()).toEqual(Object.keys(codes).sort());
    expect(Object.values(kv.errorCodes).every((number) => number < 0)).toBe(true);
  });

  it('keeps to maxBytes', async () => {
    const kv = await loadHere({ maxBytes: 1000 });
    expect(kv.usedBytes).toBe(0);
    const small = kv.quantize(new Float32Array(100), 'f32');
    expect(kv.usedBytes).toBeGreaterThanOrEqual(400);
    expect(errorOf(() => kv.quantize(new Float32Array(1000), 'f32')).code).toBe('ERR_LIMIT');
    small.dispose();
    expect(kv.usedBytes).toBe(0);
  });

  it('gives each load an instance of its own', async () => {
    const [first, second] = await Promise.all([loadHere(), loadHere()]);
    first.quantize(new Float32Array(8), 'f32');
    expect(first.usedBytes).toBeGreaterThan(0);
    expect(second.usedBytes).toBe(0);
    first.dispose();
    first.dispose();
    expect(errorOf(() => first.quantize(new Float32Array(8), 'f32')).code).toBe('ERR_DISPOSED');
    expect(second.quantize(new Float32Array(8), 'f32').byteLength).toBe(32);
  });
});

describe.runIf(backend === 'wasm')('the WebAssembly module', () => {
  it('is taken as bytes, as a module, as a response and as a location', async () => {
    const bytes = await wasm();
    const module = await WebAssembly.compile(bytes);
    const location = inBrowser ? '/dist/kvpages.wasm' : new URL('../../dist/kvpages.wasm', import.meta.url);
    const typed = new Response(bytes, { headers: { 'content-type': 'application/wasm' } });
    for (const source of [
      bytes,
      bytes.buffer,
      module,
      typed,
      new Response(bytes),
      Promise.resolve(new Response(bytes)),
      location,
      String(location),
    ]) {
      const kv = await loadHere({ wasm: source });
      expect(kv.quantize(new Float32Array(8), 'bf16').byteLength).toBe(16);
    }
  });

  it('is refused with a reason where it is none', async () => {
    const failure = load({ backend: 'wasm', wasm: new Uint8Array(8) });
    await expect(failure).rejects.toBeInstanceOf(KvPagesError);
    await expect(failure).rejects.toMatchObject({ code: 'ERR_BACKEND' });
    await expect(failure).rejects.toThrow(/does not load: CompileError/);
    const other = Uint8Array.of(0, 0x61, 0x73, 0x6d, 1, 0, 0, 0);
    await expect(load({ backend: 'wasm', wasm: other })).rejects.toThrow(/does not export kvp_describe/);
    await expect(load({ backend: 'wasm', wasm: new Response('', { status: 404 }) })).rejects.toThrow(/status 404/);
  });
});

describe.skipIf(inBrowser)('the environment variables of Node', () => {
  afterEach(() => {
    vi.unstubAllEnvs();
  });

  it('stand in for options, which win', async () => {
    // Wherever this runs, there is no GPU.
    vi.stubEnv('KVPAGES_CUDA_LIBRARY', '/nowhere/libcuda.so.1');
    vi.stubEnv('KVPAGES_BACKEND', 'wasm');
    vi.stubEnv('KVPAGES_KERNELS', 'reference');
    const slow = await load();
    expect([slow.backend, slow.kernels]).toEqual(['wasm', 'reference']);
    expect((await load({ backend: 'native' })).backend).toBe('native');
    vi.stubEnv('KVPAGES_BACKEND', '');
    const kv = await load();
    expect(kv.backend).toBe('native');
    expect(kv.reason).toMatch(/^the addon for .* loaded; cuda: /);
    expect(kv.backends().backends[0]).toMatchObject({ backend: 'cuda', available: false });
    vi.stubEnv('KVPAGES_BACKEND', 'cuda');
    await expect(load()).rejects.toMatchObject({ code: 'ERR_BACKEND' });
    await expect(load()).rejects.toThrow(/^backend: 'cuda' is not available here \(cuda: .*\)$/s);
  });
});
