#!/usr/bin/env node
// npm run build [addon] [wasm] [js] [dev] [asan] [fuzz]: sets up, then builds those (without words: addon, wasm, js).
import { existsSync, writeFileSync } from 'node:fs';
import { buildJs } from './build-js.mjs';
import { Failure, inRoot, isMain, jobs, read, run, say, script, seconds, which } from './lib.mjs';
import { setup } from './setup.mjs';

const presets = { addon: 'release', wasm: 'wasm', dev: 'dev', asan: 'asan', fuzz: 'fuzz' };

/** Configures where needed and builds one CMake preset. */
export function buildPreset(preset, targets = []) {
  const began = Date.now();
  // CMake configures again by itself when its files or the folders' contents change, but not for a change of the presets.
  const stamp = inRoot('build', preset, 'configured.txt');
  const wanted =
    read(inRoot('CMakePresets.json')) + read(inRoot('.toolchain', 'emscripten-root')) + read(inRoot('.toolchain', 'cuda', '.stamp')) +
    [process.env.KVPAGES_CUDA, process.env.CUDACXX, which('nvcc')].join(' ');
  if (read(stamp) !== wanted || !existsSync(inRoot('build', preset, 'build.ninja'))) {
    run('cmake', ['--preset', preset]);
    writeFileSync(stamp, wanted);
  }
  run('cmake', ['--build', '--preset', preset, '-j', jobs, ...(targets.length ? ['--target', ...targets] : [])], {
    env: { ...process.env, NINJA_STATUS: `[${preset} %f/%t] ` },
  });
  say(`${preset} built in ${seconds(began)}`);
}

export async function build(words = ['addon', 'wasm', 'js']) {
  for (const word of words) {
    if (word === 'js') await buildJs();
    else if (presets[word]) buildPreset(presets[word], word === 'addon' ? ['kvpages_addon'] : []);
    else throw new Failure(`build: no such part: ${word} (${[...Object.keys(presets), 'js'].join(' ')})`);
  }
}

if (isMain(import.meta)) {
  await script(async () => {
    const words = process.argv.slice(2);
    const tests = words.some((word) => ['dev', 'asan', 'fuzz'].includes(word));
    await setup({ tests });
    await build(words.length ? words : undefined);
  });
}
