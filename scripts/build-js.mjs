#!/usr/bin/env node
// Bundles js/ into dist/ (ES modules and CommonJS) and writes the types. Nothing is minified: what ships can be read.
import { cpSync, existsSync, mkdirSync, readFileSync, readdirSync, renameSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { inRoot, isMain, run, say, script, seconds } from './lib.mjs';

const license = '/*! kvpages, SPDX-License-Identifier: Apache-2.0 */';

// In CommonJS there is no import.meta; the loaders look for their files beside the script.
const url = "const kvpages_url = require('node:url').pathToFileURL(__filename).href;";

/** Output name -> source, platform, formats. A source that is not there yet is left out. */
const entries = [
  { name: 'index.node', source: 'js/index.ts', platform: 'node', formats: ['esm', 'cjs'] },
  { name: 'index.browser', source: 'js/index.ts', platform: 'browser', formats: ['esm'] },
  { name: 'safetensors', source: 'js/safetensors.ts', platform: 'neutral', formats: ['esm', 'cjs'] },
  { name: 'ort', source: 'js/ort.ts', platform: 'neutral', formats: ['esm', 'cjs'] },
  { name: 'runner', source: 'js/runner.ts', platform: 'neutral', formats: ['esm', 'cjs'] },
  { name: 'transformers', source: 'js/transformers.ts', platform: 'neutral', formats: ['esm', 'cjs'] },
  { name: 'study', source: 'js/study.ts', platform: 'neutral', formats: ['esm', 'cjs'] },
  { name: 'worker.browser', source: 'js/worker.ts', platform: 'browser', formats: ['esm'] },
  { name: 'worker.node', source: 'js/worker.ts', platform: 'node', formats: ['esm'] },
  { name: 'cli', source: 'js/cli.ts', platform: 'node', formats: ['esm'], bin: true },
];

export async function buildJs() {
  if (!existsSync(inRoot('js', 'index.ts'))) {
    say('dist: js/index.ts is not there yet');
    return;
  }
  const began = Date.now();
  const { build } = await import('esbuild');
  // Built aside and moved file by file, so that a reader never meets an empty folder.
  const fresh = inRoot('build', `dist-${process.pid}`);
  rmSync(fresh, { recursive: true, force: true });
  mkdirSync(fresh, { recursive: true });
  try {
    for (const { name, source, platform, formats, bin } of entries) {
      if (!existsSync(inRoot(source))) continue;
      for (const format of formats) {
        const outfile = join(fresh, `${name}${format === 'cjs' ? '.cjs' : '.js'}`);
        await build({
          absWorkingDir: inRoot(),
          entryPoints: [source],
          outfile,
          bundle: true,
          platform,
          format,
          // The oldest that the package supports: Node 20 and browsers with WebAssembly SIMD.
          target: platform === 'node' ? ['node20'] : ['chrome96', 'firefox95', 'safari16.4', 'node20'],
          banner: { js: [...(format === 'cjs' && platform === 'node' ? [url] : []), license].join('\n') },
          define: format === 'cjs' && platform === 'node' ? { 'import.meta.url': 'kvpages_url' } : {},
          conditions: [platform === 'node' ? 'node' : 'browser'],
          packages: 'external',
          legalComments: 'none',
          logLevel: 'warning',
        });
        if (bin) {
          const text = readFileSync(outfile, 'utf8').replace(/^#!.*\n/, '');
          writeFileSync(outfile, `#!/usr/bin/env node\n${text}`, { mode: 0o755 });
        }
      }
    }
    writeTypes(join(fresh, 'types'));
    publish(fresh, inRoot('dist'));
  } finally {
    rmSync(fresh, { recursive: true, force: true });
  }
  say(`dist built in ${seconds(began)}`);
}

function writeTypes(folder) {
  const roots = [...new Set(entries.map(({ source }) => source))].filter((source) => existsSync(inRoot(source)) && source !== 'js/cli.ts');
  const config = { extends: inRoot('tsconfig.json'), files: roots.map((source) => inRoot(source)), include: [],
    compilerOptions: { noEmit: false, declaration: true, emitDeclarationOnly: true, stripInternal: true, rootDir: inRoot('js'), outDir: folder } };
  mkdirSync(folder, { recursive: true });
  const path = inRoot('build', `tsconfig-${process.pid}.json`);
  writeFileSync(path, JSON.stringify(config));
  try {
    run(process.execPath, [inRoot('node_modules', 'typescript', 'bin', 'tsc'), '-p', path]);
  } finally {
    rmSync(path);
  }
  // CommonJS users need .d.cts files that refer to one another; the text is the same.
  for (const file of files(folder)) {
    const text = readFileSync(join(folder, file), 'utf8');
    writeFileSync(join(folder, file.replace(/\.d\.ts$/, '.d.cts')), text.replace(/(['"]\.{1,2}\/[^'"]*)\.js(['"])/g, '$1.cjs$2'));
  }
}

function files(folder, prefix = '') {
  return readdirSync(join(folder, prefix), { withFileTypes: true }).flatMap((entry) =>
    entry.isDirectory() ? files(folder, join(prefix, entry.name)) : [join(prefix, entry.name)]);
}

function publish(from, to) {
  mkdirSync(to, { recursive: true });
  const made = files(from);
  for (const file of made) {
    mkdirSync(join(to, file, '..'), { recursive: true });
    cpSync(join(from, file), join(to, `${file}.new`));
    renameSync(join(to, `${file}.new`), join(to, file));
  }
  // What an earlier build left and this one did not make; the .wasm is another's.
  for (const file of files(to)) if (!made.includes(file) && !file.endsWith('.wasm') && statSync(join(to, file)).isFile()) rmSync(join(to, file));
}

if (isMain(import.meta)) await script(buildJs);
