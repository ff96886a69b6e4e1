#!/usr/bin/env node
// npm start: sets up, builds, quantizes the KV cache of a real model in tests/data and reports on it. At a terminal it
// then serves the demo page until stopped; without one, or with --once, it ends.
import { existsSync } from 'node:fs';
import { build } from './build.mjs';
import { inRoot, run, say, script } from './lib.mjs';
import { setup } from './setup.mjs';

await script(async () => {
  await setup({ tests: false });
  await build();

  const job = inRoot('scripts', 'demo-run.mjs');
  if (existsSync(job)) run(process.execPath, [job]);
  else say('the main job (scripts/demo-run.mjs) is not there yet');

  const once = process.argv.includes('--once') || !process.stdout.isTTY || process.env.CI;
  if (once) return;
  if (!existsSync(inRoot('web-demo', 'index.html'))) {
    say('the demo page (web-demo/) is not there yet');
    return;
  }
  const { createServer } = await import('vite');
  const config = ['vite.config.ts', 'vite.config.js', 'vite.config.mjs'].map((name) => inRoot('web-demo', name)).find(existsSync);
  const server = await createServer({ root: inRoot('web-demo'), configFile: config ?? false, server: { host: '127.0.0.1' } });
  await server.listen();
  const [address] = server.resolvedUrls?.local ?? [];
  say(`demo page: ${address} (Ctrl-C ends it)`);
  await new Promise((resolve) => {
    process.once('SIGINT', resolve);
    process.once('SIGTERM', resolve);
  });
  await server.close();
});
