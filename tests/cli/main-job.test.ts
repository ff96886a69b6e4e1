// SPDX-License-Identifier: Apache-2.0
// The main job of `npm start`, after its build: the report, the file that it leaves, its options; and the server of the demo page.
import { spawnSync } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import type { AddressInfo } from 'node:net';
import { request } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { expect, test } from 'vitest';
import { load } from 'kvpages';
import { serveFolder } from '../../scripts/demo-run.mjs';

const root = fileURLToPath(new URL('../..', import.meta.url));
const job = (...args: string[]) => spawnSync(process.execPath, ['scripts/demo-run.mjs', ...args], { cwd: root, encoding: 'utf8' });

test.each([
  ['small', 6, 83],
  ['chat', 18, 277],
])('%s: writes with the addon, reads with WebAssembly, ends with 0', async (data, pages, tokens) => {
  const { status, stdout, stderr } = job('--once', '--data', data);
  expect({ status, stderr }).toEqual({ status: 0, stderr: '' });
  expect(stdout.match(/^ *\d+ +\d+-\d+ +K /gm)).toHaveLength(pages);
  expect(stdout).toContain(`${pages} pages, all values equal`);
  const cache = (await load({ backend: 'wasm' })).parse(readFileSync(join(root, 'output', 'cache.kvpages.pb')));
  expect(cache.tokens).toBe(tokens);
  // Different formats for K and V, and for different pages.
  expect(new Set(cache.pages.map((page) => `${page.key.type} ${page.value.type}`)).size).toBe(5);
});

test('wrong options are named', () => {
  for (const [args, text] of [
    [['--dat', 'x'], "Unknown option '--dat'"],
    [['--page-tokens', '0'], '--page-tokens must be a number'],
    [['--layer', '99'], 'has the layers 0, 15, 29'],
  ] as const) {
    const { status, stderr } = job('--once', ...args);
    expect(stderr).toContain(text);
    expect(status).toBe(1);
  }
});

test('the server gives files of its folder and nothing else', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'kvpages-serve-'));
  writeFileSync(join(folder, 'index.html'), '<meta content="default-src \'none\'" />');
  const server = await serveFolder(folder, 0);
  try {
    const get = (path: string) =>
      new Promise<number>((resolve, reject) => {
        request({ port: (server.address() as AddressInfo).port, host: '127.0.0.1', path }, (response) => {
          response.resume();
          resolve(response.statusCode ?? 0);
        })
          .on('error', reject)
          .end();
      });
    expect(await get('/')).toBe(200);
    for (const path of ['/none', '/../../etc/passwd', '/%2e%2e/%2e%2e/etc/passwd', '/..%2f..%2fetc%2fpasswd', '/%zz', '/%00', '//']) {
      expect({ path, status: await get(path) }).toEqual({ path, status: path === '//' ? expect.any(Number) : 404 });
    }
    expect(await get('/index.html')).toBe(200);
  } finally {
    server.closeAllConnections();
    server.close();
    rmSync(folder, { recursive: true, force: true });
  }
});
