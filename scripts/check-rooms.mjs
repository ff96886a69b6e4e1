#!/usr/bin/env node
// Fails where a file includes or imports what its room must not know. Each rule below is one line.
import { existsSync, readFileSync, readdirSync } from 'node:fs';
import { join, relative, sep } from 'node:path';
import { inRoot, isMain, root } from './lib.mjs';

/** Rooms of src/: what each may include from the others. A path ending in / is a whole room. */
const mayInclude = {
  formats: ['formats/', 'core/'],
  core: ['core/', 'formats/', 'backends/backend.h', 'profile/', 'metrics/'],
  backends: ['backends/', 'formats/', 'core/'],
  profile: ['profile/', 'core/', 'formats/', 'backends/backend.h'],
  metrics: ['metrics/', 'core/', 'formats/', 'profile/'],
  attention: ['attention/', 'core/', 'formats/', 'backends/backend.h'],
  wire: ['wire/', 'core/', 'formats/'],
  abi: ['abi/', 'core/', 'formats/', 'kvpages.h'],
  '': ['abi/', 'core/', 'formats/', 'backends/backend.h', 'backends/devices.h', 'backends/cuda/driver.h', 'wire/', 'profile/', 'metrics/', 'attention/', 'kvpages.h'],
};

/** Headers from outside: pattern, where it may be included, why. */
const outside = [
  [/^(napi|node_api|js_native_api)/, /^node\//, 'only node/ knows Node'],
  [/^(node|v8|uv)\.h$/, /^$/, 'the addon uses Node-API alone'],
  [/^emscripten/, /^src\/kvpages\.h$/, 'only the export macro knows Emscripten'],
  [/^(cuda(?!\/)|nv|cublas)/, /^tests\/device\//, 'the driver is declared in backends/cuda/api.h, so that no build needs CUDA'],
  [/^hwy\//, /^(src\/backends\/simd\/|src\/attention\/simd|tests\/)/, 'only the vector kernels know Highway'],
  [/^google\/protobuf\/|\.pb\.h$/, /^(src\/wire\/|tests\/)/, 'only wire/ knows protobuf'],
  [/^(gtest|gmock)\//, /^tests\//, 'only tests know GoogleTest'],
  [/^format$/, /^$/, 'g++ 12 has no <format>'],
  [/^iostream$/, /^(tests\/)/, 'the core prints nothing, and its static constructors cost 100 kB in WebAssembly'],
];

function* filesUnder(folder, pattern) {
  const path = inRoot(folder);
  if (!existsSync(path)) return;
  for (const entry of readdirSync(path, { withFileTypes: true })) {
    if (entry.name === 'node_modules' || entry.name === 'dist') continue;
    const name = `${folder}/${entry.name}`;
    if (entry.isDirectory()) yield* filesUnder(name, pattern);
    else if (pattern.test(entry.name)) yield name;
  }
}

export function checkRooms() {
  const broken = [];
  let files = 0;
  const complain = (file, line, text) => broken.push(`${file}:${line}: ${text}`);
  const lines = (file) => {
    files += 1;
    return readFileSync(inRoot(file), 'utf8').split('\n').map((text, i) => [i + 1, text]);
  };

  for (const folder of ['src', 'node', 'wasm', 'tests']) {
    for (const file of filesUnder(folder, /\.(h|cc|cu|cuh|S)$/)) {
      const room = folder === 'src' ? (file.split('/').length > 2 ? file.split('/')[1] : '') : undefined;
      for (const [line, text] of lines(file)) {
        const include = text.match(/^\s*#\s*include\s*([<"])([^>"]+)[>"]/);
        if (!include) continue;
        const [, quote, path] = include;
        for (const [pattern, place, reason] of outside) {
          if (pattern.test(path) && !place.test(file)) complain(file, line, `includes ${path}: ${reason}`);
        }
        if (quote === '"' && path.includes('..')) complain(file, line, `includes ${path}: write it from src/`);
        if (room !== undefined && quote === '"' && !path.endsWith('.pb.h') && !/^hwy\//.test(path)) {
          const allowed = mayInclude[room];
          if (!allowed) complain(file, line, `src/${room} is a new room: say in scripts/check-rooms.mjs what it may include`);
          else if (!allowed.some((start) => (start.endsWith('/') ? path.startsWith(start) : path === start))) {
            complain(file, line, `src/${room || '*'} may not include ${path}`);
          }
        }
        if (folder === 'node' && quote === '"' && !['kvpages.h', 'abi/describe.h'].includes(path) && existsSync(inRoot('src', path))) {
          complain(file, line, `node/ may not include ${path}: the binder sees kvpages.h and abi/describe.h`);
        }
      }
    }
  }

  // A new function of kvpages.h must need no change in a binder. Those it needs to read the list are the exception.
  const bootstrap = /^kvp_(describe|last_error|blob_size|blob_read|release)$/;
  const listed = [...readFileSync(inRoot('src', 'kvpages.h'), 'utf8').matchAll(/^\s*F\((kvp_\w+)\)/gm)].map((match) => match[1]);
  for (const file of [...filesUnder('node', /\.(cc|h)$/), ...filesUnder('js', /^bind.*\.ts$/)]) {
    for (const [line, text] of lines(file)) {
      for (const [name] of text.matchAll(/\bkvp_\w+/g)) {
        if (listed.includes(name) && !bootstrap.test(name)) complain(file, line, `names ${name}: binders are generic`);
      }
    }
  }

  const nodeAllowed = /^js\/(load-node|cli|cli\/.*|worker-node|.*\.node)\.ts$/;
  for (const file of filesUnder('js', /\.(ts|mts|js)$/)) {
    for (const [line, text] of lines(file)) {
      const path = text.match(/\bfrom\s+['"]([^'"]+)['"]/)?.[1] ?? text.match(/\bimport\(?\s*['"]([^'"]+)['"]/)?.[1];
      if (!path) continue;
      const target = path.startsWith('.') ? relative(root, join(inRoot(file), '..', path)).split(sep).join('/') : '';
      if (target && !target.startsWith('js/')) complain(file, line, `imports ${path}: js/ imports from js/ alone`);
      if (path.startsWith('node:') && !nodeAllowed.test(file)) complain(file, line, `imports ${path}: it must run in browsers`);
      if (!path.startsWith('.') && !path.startsWith('node:') && !path.startsWith('#')) complain(file, line, `imports ${path}: the package has no dependencies`);
    }
  }
  for (const file of filesUnder('web-demo', /\.(ts|js|html)$/)) {
    for (const [line, text] of lines(file)) {
      const path = text.match(/\bfrom\s+['"]([^'"]+)['"]/)?.[1];
      if (path && /(^|\/)\.\.\/(\.\.\/)*(js|src|dist)\//.test(path) && !/config/.test(file)) {
        complain(file, line, `imports ${path}: the demo uses the package's public name`);
      }
    }
  }
  return { files, broken };
}

if (isMain(import.meta)) {
  const { files, broken } = checkRooms();
  for (const text of broken) process.stdout.write(`${text}\n`);
  process.stdout.write(broken.length ? `${broken.length} broken rules\n` : `rooms: ${files} files keep the rules\n`);
  process.exitCode = broken.length ? 1 : 0;
}
