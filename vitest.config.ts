// SPDX-License-Identifier: Apache-2.0
// The same test bodies in three places, and the tools once: Node with the addon, Node with WebAssembly, Chromium with
// WebAssembly.
import { availableParallelism } from 'node:os';
import { playwright } from '@vitest/browser-playwright';
import { defineConfig } from 'vitest/config';

const include = ['tests/js/**/*.test.ts'];
const chromium = process.env['KVP_CHROMIUM'] ?? '/usr/bin/chromium';

export default defineConfig({
  test: {
    // By default a core is left free for the runner, half the machine where there are two.
    maxWorkers: Math.max(2, availableParallelism() - 1),
    projects: [
      { test: { name: 'node-addon', include, provide: { backend: 'native' } } },
      { test: { name: 'node-wasm', include, provide: { backend: 'wasm' } } },
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
