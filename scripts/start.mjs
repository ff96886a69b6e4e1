#!/usr/bin/env node
// npm start: sets up, builds, quantizes the KV cache of a real model in tests/data and reports on it. At a terminal it
// then serves the demo page until stopped; without one, or with --once, it ends.
import { build } from './build.mjs';
import { mainJob, readOptions } from './demo-run.mjs';
import { script } from './lib.mjs';
import { setup } from './setup.mjs';

await script(async () => {
  const options = readOptions(process.argv.slice(2));
  if (!options) return;
  await setup({ tests: false });
  await build();
  await mainJob(options);
});
