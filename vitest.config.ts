// SPDX-License-Identifier: Apache-2.0
// The same test bodies in three places, and the tools once: Node with the addon, Node with WebAssembly, Chromium with
// WebAssembly.
import { existsSync, readFileSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import { fileURLToPath } from 'node:url';
import { playwright } from '@vitest/browser-playwright';
import { defineConfig } from 'vitest/config';

const include = ['tests/js/**/*.test.ts'];
const chromium = process.env['KVP_CHROMIUM'] ?? '/usr/bin/chromium';

// On this machine's GPU (npm run test:gpu): what works on tensors and caches. Otherwise a part of it on the fake driver, where that
// is built and the addon holds the kernels.
const onGpu = process.env['KVP_TEST_GPU'] !== undefined;
const fake = fileURLToPath(new URL('build/dev/tests/libfake_cuda.so', import.meta.url));
const addon = fileURLToPath(new URL(`prebuilds/${process.platform}-${process.arch}/kvpages.node`, import.meta.url));
const fatbin = Uint8Array.of(0x50, 0xed, 0x55, 0xba);
const onFake = existsSync(fake) && existsSync(addon) && readFileSync(addon).includes(fatbin);
if (!onGpu && !onFake) console.warn('SKIPPED: project node-cuda: no fake driver in build/dev, or no CUDA kernels in the addon');
const cuda = {
  test: {
    name: 'node-cuda',
    include: [`tests/js/{${onGpu ? 'tensors,equality,model-cache-random,vectors,errors,' : ''}model-cache,paged-cache}.test.ts`],
    env: onGpu ? {} : { KVPAGES_CUDA_LIBRARY: fake, KVPAGES_FAKE_CUDA: 'version=99000' },
    provide: { backend: 'cuda' as const },
    testTimeout: 60_000, // kernels on the CPU
  },
};

export default defineConfig({
  test: {
    // By default a core is left free for the runner, half the machine where there are two.
    maxWorkers: Math.max(2, availableParallelism() - 1),
    projects: [
      { test: { name: 'node-addon', include, provide: { backend: 'native' } } },
      { test: { name: 'node-wasm', include, provide: { backend: 'wasm' } } },
      ...(onGpu || onFake ? [cuda] : []),
      // What is built: command line, README, demo page.
      { test: { name: 'tools', include: ['tests/{cli,readme,demo}/**/*.test.ts'], testTimeout: 60_000 } },
      {
        // For SharedArrayBuffer, which pages only get with these headers.
        server: {
          headers: { 'Cross-Origin-Opener-Policy': 'same-origin', 'Cross-Origin-Embedder-Policy': 'require-corp' },
        },
        optimizeDeps: { include: ['onnxruntime-common', 'onnxruntime-web/wasm', 'protobufjs', '@huggingface/transformers'] },
        test: {
          name: 'chromium-wasm',
          include,
          provide: { backend: 'wasm' },
          browser: {
            enabled: true,
            headless: true,
            screenshotFailures: false,
            provider: playwright({
              launchOptions: {
                executablePath: chromium,
                args: [
                  '--no-sandbox',
                  '--disable-quic',
                  '--no-first-run',
                  '--disable-background-networking',
                  '--disable-component-update',
                  '--disable-sync',
                ],
              },
            }),
            instances: [{ browser: 'chromium' }],
          },
        },
      },
    ],
  },
});
