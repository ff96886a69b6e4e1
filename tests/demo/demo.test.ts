// SPDX-License-Identifier: Apache-2.0
// The demo page as it ships, in Chromium: built by Vite, served with a strict policy, driven as a user would. Its figures are those
// of the library. The picture is saved as build/demo.png to be looked at.
import { mkdirSync, readFileSync } from 'node:fs';
import type { Server } from 'node:http';
import type { AddressInfo } from 'node:net';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { chromium } from 'playwright-core';
import type { Browser, BrowserContextOptions, Page } from 'playwright-core';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { load } from 'kvpages';
import { keyValueLayers, readSafetensors } from 'kvpages/safetensors';
import { buildDemo, serveFolder } from '../../scripts/demo-run.mjs';

const root = fileURLToPath(new URL('../..', import.meta.url));
const small = join(root, 'tests/data/smollm2-small.safetensors');
let server: Server;
let browser: Browser;
let address: string;

beforeAll(async () => {
  server = await serveFolder(await buildDemo(), 0);
  address = `http://127.0.0.1:${(server.address() as AddressInfo).port}/`;
  browser = await chromium.launch({
    executablePath: process.env['KVP_CHROMIUM'] ?? '/usr/bin/chromium',
    args: ['--no-sandbox', '--headless', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
  });
}, 60_000);
afterAll(async () => {
  await browser?.close();
  server?.closeAllConnections();
  server?.close();
});

/** Opens the page and waits for its first result. A console error, a policy violation among them, fails the test. */
async function open(options: BrowserContextOptions = {}): Promise<{ page: Page; complaints: string[] }> {
  const page = await browser.newPage({ viewport: { width: 1280, height: 1000 }, ...options });
  const complaints: string[] = [];
  page.on('console', (message) => {
    if (['error', 'warning'].includes(message.type())) complaints.push(message.text());
  });
  page.on('pageerror', (error) => complaints.push(error.message));
  await page.goto(address);
  await done(page);
  return { page, complaints };
}

async function done(page: Page): Promise<void> {
  await page.waitForSelector('body[data-state=done], body[data-state=failed]', { timeout: 20_000 });
  expect(await page.getAttribute('body', 'data-state'), (await page.textContent('#error')) ?? '').toBe('done');
}

async function choose(page: Page, action: () => Promise<unknown>): Promise<void> {
  await page.evaluate(() => document.body.setAttribute('data-state', 'waiting'));
  await action();
  await done(page);
}

test('shows what the library computes, for the formats and pages chosen', async () => {
  const { page, complaints } = await open();
  expect(await page.locator('.card').count()).toBe(6);
  mkdirSync(join(root, 'build'), { recursive: true });
  await page.screenshot({ path: join(root, 'build', 'demo.png') });
  expect(await page.textContent('#sum-file')).toBe('equal');
  expect(await page.textContent('#engine')).toContain(`WebAssembly, ${(await load({ backend: 'wasm' })).kernels} kernels`);

  await choose(page, () => page.selectOption('#layer', '29'));
  await choose(page, () => page.selectOption('#key-format', 'int8/tensor'));
  await choose(page, () => page.selectOption('#value-format', 'uint2/channel/16'));
  await choose(page, () => page.getByLabel('1', { exact: true }).uncheck());

  const kv = await load();
  const layer = keyValueLayers(readSafetensors(readFileSync(small))).find((candidate) => candidate.layer === 29)!;
  const dense = kv.splitIntoPages(layer.key, layer.value);
  const cards = page.locator('.card');
  expect(await cards.count()).toBe(5);
  for (const [card, index] of [0, 2, 3, 4, 5].entries()) {
    const source = dense.page(index);
    const text = (await cards.nth(card).textContent()) ?? '';
    expect(text).toContain(`Page ${index} `);
    for (const [side, spec] of [['key', 'int8/tensor'], ['value', 'uint2/channel/16']] as const) {
      const x = source[side].dequantize();
      const q = kv.quantize(x, spec);
      const { rmse, maxError } = q.measure(x);
      expect(text).toContain(q.spec);
      expect(text).toContain(`RMSE ${rmse.toPrecision(3)} · max error ${maxError.toPrecision(3)}`);
    }
  }
  await page.getByRole('button', { name: 'None' }).click();
  await page.getByText('Choose a page to see').waitFor();
  expect(await cards.count()).toBe(0);
  expect(complaints).toEqual([]);
  await page.close();
});

test('draws the values: a picture has as many colours as a page has different numbers, and follows the keyboard', async () => {
  const { page, complaints } = await open();
  const maps = page.locator('.card').first().locator('canvas.maps').first();
  const colours = () =>
    maps.evaluate((canvas: HTMLCanvasElement) => {
      const { data } = canvas.getContext('2d')!.getImageData(0, 0, canvas.width, canvas.height);
      return new Set(new Uint32Array(data.buffer)).size;
    });
  expect(await colours()).toBeGreaterThan(40);
  const curve = page.locator('.card').first().locator('canvas.curve').first();
  const picture = () => curve.evaluate((canvas: HTMLCanvasElement) => canvas.toDataURL());
  const before = await picture();
  await maps.focus();
  await page.keyboard.press('ArrowDown');
  await page.keyboard.press('ArrowDown');
  expect(await maps.getAttribute('aria-valuenow')).toBe('2');
  expect(await page.locator('.card h2').first().textContent()).toContain('curve: token 2');
  expect(await picture()).not.toBe(before);
  await page.keyboard.press('End');
  expect(await maps.getAttribute('aria-valuenow')).toBe('15');
  expect(complaints).toEqual([]);
  await page.close();
});

test('takes a file of the user, says in a sentence why it does not, and goes on', async () => {
  const { page, complaints } = await open();
  const put = (name: string, bytes: Buffer) => page.setInputFiles('#file', { name, mimeType: 'application/octet-stream', buffer: bytes });
  const bytes = readFileSync(small);
  for (const [name, content, text] of [
    ['cut.safetensors', bytes.subarray(0, 9000), 'cut.safetensors cannot be used: safetensors: tensor'],
    ['noise.safetensors', Buffer.alloc(100, 7), 'noise.safetensors cannot be used: safetensors: the header length must be'],
    ['empty.safetensors', Buffer.alloc(0), 'empty.safetensors cannot be used:'],
  ] as const) {
    await put(name, content);
    await page.getByRole('alert').filter({ hasText: text }).waitFor({ timeout: 5000 });
    expect(await page.getByRole('alert').textContent()).toMatch(/\.$/);
  }
  // A file that opens but cannot be quantized: nothing of the one before may stand under its name.
  const one = Buffer.from(JSON.stringify(Object.fromEntries(['key', 'value'].map((side, i) =>
    [`past_key_values.0.${side}`, { dtype: 'F32', shape: [1, 1, 2], data_offsets: [8 * i, 8 * i + 8] }]))));
  const head = Buffer.alloc(8);
  head.writeBigUInt64LE(BigInt(one.length));
  await put('nan.safetensors', Buffer.concat([head, one, Buffer.alloc(16, 0xff)]));
  await page.getByRole('alert').filter({ hasText: 'Not quantized: K of page 0: tensor: values must be finite, got NaN' }).waitFor({ timeout: 5000 });
  expect(await page.textContent('#file-name')).toContain('nan.safetensors: 1 layer, 1 token');
  expect(await page.locator('.card').count()).toBe(0);
  expect(await page.locator('#summary').isVisible()).toBe(false);
  await choose(page, () => put('again.safetensors', bytes));
  expect(await page.getByRole('alert').isVisible()).toBe(false);
  expect(await page.textContent('#file-name')).toContain('again.safetensors, SmolLM2-135M-Instruct: 3 layers, 83 tokens');
  expect(complaints).toEqual([]);
  await page.close();
});

test('a dropped file is opened', async () => {
  const { page, complaints } = await open();
  const bytes = readFileSync(small).toString('base64');
  const transfer = await page.evaluateHandle((content) => {
    const data = new DataTransfer();
    data.items.add(new File([Uint8Array.from(atob(content), (byte) => byte.charCodeAt(0))], 'dropped.safetensors'));
    return data;
  }, bytes);
  await page.dispatchEvent('body', 'dragenter', { dataTransfer: transfer });
  expect(await page.locator('#drop').isVisible()).toBe(true);
  await choose(page, () => page.dispatchEvent('body', 'drop', { dataTransfer: transfer }));
  expect(await page.locator('#drop').isVisible()).toBe(false);
  expect(await page.textContent('#file-name')).toContain('dropped.safetensors');
  expect(complaints).toEqual([]);
  await page.close();
});

test('saves a file that the library reads', async () => {
  const { page } = await open();
  const download = page.waitForEvent('download');
  await page.getByRole('button', { name: 'Save cache.kvpages.pb' }).click();
  const path = await (await download).path();
  const cache = (await load()).parse(readFileSync(path));
  expect(cache.tokens).toBe(83);
  expect(cache.pages.every((entry) => entry.key.kind === 'encoded')).toBe(true);
  await page.close();
});

test.each([
  ['phone', { viewport: { width: 360, height: 740 }, deviceScaleFactor: 2 }],
  ['dark', { colorScheme: 'dark' }],
] as Array<[string, BrowserContextOptions]>)('works on a small or dark screen: %s', async (name, options) => {
  const { page, complaints } = await open(options);
  expect(await page.evaluate(() => document.documentElement.scrollWidth <= document.documentElement.clientWidth)).toBe(true);
  await page.screenshot({ path: join(root, 'build', `demo-${name}.png`) });
  expect(complaints).toEqual([]);
  await page.close();
});
