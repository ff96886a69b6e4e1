#!/usr/bin/env node
// npm run bench [NAME]: every tests/bench/NAME_bench (C++, release) and tests/bench/NAME.bench.mjs, or those named.
// npm run bench soak [SECONDS]: an endless conversation, 10 minutes by default; fails where its memory grows.
import { existsSync, readdirSync } from 'node:fs';
import { build, buildPreset } from './build.mjs';
import { inRoot, run, say, script } from './lib.mjs';
import { setup } from './setup.mjs';

await script(async () => {
  await setup({ tests: false });
  await build();
  const wanted = process.argv.slice(2);
  if (wanted[0] === 'soak') {
    buildPreset('release');
    return run(inRoot('build', 'release', 'tests', 'cache_bench'), wanted);
  }
  const chosen = (name) => wanted.length === 0 || wanted.includes(name);
  const folder = inRoot('tests', 'bench');
  const names = existsSync(folder) ? readdirSync(folder).sort() : [];
  const native = names.filter((name) => name.endsWith('_bench.cc')).map((name) => name.slice(0, -'.cc'.length));
  const scripts = names.filter((name) => name.endsWith('.bench.mjs'));
  if (native.length) buildPreset('release');
  for (const name of native) {
    if (!chosen(name.replace(/_bench$/, ''))) continue;
    say(name);
    run(inRoot('build', 'release', 'tests', name), []);
  }
  const programs = ['cache', 'codec'].filter(chosen).map((name) => `${name}_bench`);
  if (programs.length) buildPreset('wasm', programs);
  for (const name of scripts) {
    if (!chosen(name.replace(/\.bench\.mjs$/, ''))) continue;
    say(name);
    run(process.execPath, ['--expose-gc', inRoot('tests', 'bench', name)]);
  }
  if (native.length + scripts.length === 0) say('tests/bench has no benchmarks yet');
});
