#!/usr/bin/env node
// What a user gets: packs the package, installs the tarball offline into an empty project, and uses it there from ES
// modules, CommonJS, TypeScript, the command line, and from a page bundled by Vite in Chromium.
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { brotliCompressSync } from 'node:zlib';
import { capture, inRoot, isMain, say, script, which } from './lib.mjs';

// A page of 2 tokens of which one is valid, K to int4 and V to uint4, saved, read, restored to f16 and bf16: the line is the backend,
// the codes, and the bits of the restored values.
const body = `
  const page = (first) => ({ type: 'f32', dims: [1, 1, 2, 4], data: new Float32Array([...first, NaN, NaN, NaN, NaN]) });
  const dense = kv.createPagedCache([{ length: 1, key: page([-1.3, -0.4, 0.3, 1.2]), value: page([-0.8, -0.3, 0.2, 0.7]) }]);
  const small = kv.quantizePagedCache(dense, [0], { key: { type: 'int4', scale: 0.25 }, value: { type: 'uint4', scale: 0.125, zeroPoint: 8 } });
  const back = kv.parse(small.serialize());
  const wide = kv.quantizePagedCache(back, [0], { key: { type: 'f16' }, value: { type: 'bf16' } });
  const hex = (array) => Array.from(new Uint8Array(array.buffer, array.byteOffset, array.byteLength), (byte) => byte.toString(16).padStart(2, '0')).join('');
  const sides = [back.page(0), wide.page(0)];
  const line = [kv.backend, hex(sides[0].key.codes), hex(sides[0].value.codes), hex(sides[1].key.data), hex(sides[1].value.data)].join(' ');`;
const values = `eb510000 62ea8888 00bd00b80034003d${'00'.repeat(8)} 40bf80be803e403f${'00'.repeat(8)}`;

const typed = `
  import { KvPagesError, load } from 'kvpages';
  import type { KvPages, ModelCache } from 'kvpages';
  import { OrtPast } from 'kvpages/ort';
  import type { Ort, OrtSession } from 'kvpages/ort';
  import { SplitModel } from 'kvpages/runner';
  import { QuantizedCache } from 'kvpages/transformers';
  export async function g(kv: KvPages, ort: Ort, session: OrtSession): Promise<ModelCache> {
    const past = new OrtPast(ort, session);
    past.append(kv.createCache({ ...past.shape, preset: 'kv4' }), await session.run(past.feeds()));
    new QuantizedCache(kv, { preset: 'kv4' }).update({});
    const config = { num_hidden_layers: 1, num_attention_heads: 1, head_dim: 64 };
    // @ts-expect-error: the shape is the model's
    await SplitModel.create({ kv, config, pieces: [], cacheOptions: { layers: 2 } });
    const model = await SplitModel.create({ kv, ort, config, pieces: ['a', 'b'], cacheOptions: { preset: 'kv4' } });
    for await (const token of model.generate([1, 2n], { topK: 3 })) token.toFixed();
    return model.cache;
  }
  export async function f(): Promise<number> {
    const kv: KvPages = await load({ backend: 'wasm' });
    const e: Error = new KvPagesError('ERR_SPEC', 'text');
    // @ts-expect-error: no such backend
    await load({ backend: 'abacus' });
    return kv.usedBytes + e.message.length;
  }
`;

// A little above what the README says of kvpages.wasm.
const WASM_BYTES = 700e3;
const WASM_BROTLI_BYTES = 205e3;

export async function testPackage() {
  if (!existsSync(inRoot('dist', 'index.node.js')) || !existsSync(inRoot('dist', 'kvpages.wasm'))) {
    return { passed: 0, failed: 1, skipped: 0, why: 'dist/ is not built' };
  }
  const result = { passed: 0, failed: 0, skipped: 0 };
  const check = async (name, test) => {
    try {
      await test();
      result.passed += 1;
      process.stdout.write(`package: ${name}: passed\n`);
    } catch (error) {
      result.failed += 1;
      process.stdout.write(`package: ${name}: FAILED: ${error.message}\n`);
    }
  };
  const demand = (condition, text) => {
    if (!condition) throw new Error(text);
  };

  const folder = mkdtempSync(join(tmpdir(), 'kvpages-package-'));
  const app = join(folder, 'app');
  mkdirSync(app);
  writeFileSync(join(app, 'package.json'), '{ "name": "app", "private": true, "type": "module" }\n');
  const npm = (args, cwd) => capture('npm', args, { cwd, env: { ...process.env, npm_config_audit: 'false', npm_config_fund: 'false' } });
  const node = async (args, cwd = app) => {
    const { status, text } = await capture(process.execPath, args, { cwd, env: { ...process.env, NO_COLOR: '1' } });
    demand(status === 0, `node ${args.join(' ')} ended with ${status}: ${text}`);
    return text.trim();
  };

  try {
    let packed;
    await check('npm pack', async () => {
      const { status, text } = await npm(['pack', '--json', '--silent', '--pack-destination', folder], inRoot());
      demand(status === 0, text);
      const parsed = JSON.parse(text.slice(text.search(/[[{]/)));
      [packed] = Array.isArray(parsed) ? parsed : Object.values(parsed);
      const paths = packed.files.map((file) => file.path);
      const wanted = ['LICENSE', 'package.json', 'README.md', 'dist/index.node.js', 'dist/index.node.cjs', 'dist/index.browser.js', 'dist/kvpages.wasm',
        'dist/types/index.d.ts', 'dist/types/index.d.cts', `prebuilds/${process.platform}-${process.arch}/kvpages.node`];
      const missing = wanted.filter((path) => !paths.includes(path));
      demand(missing.length === 0, `the tarball lacks ${missing.join(', ')}`);
      const stray = paths.filter((path) => !/^(LICENSE|CHANGELOG\.md|package\.json|README\.md|dist\/.*\.(js|cjs|d\.ts|d\.cts|wasm)|prebuilds\/[^/]*\/kvpages\.node)$/.test(path));
      demand(stray.length === 0, `the tarball has ${stray.join(', ')}`);
      demand(packed.size < 6e6, `the tarball has ${packed.size} bytes`);
      const { scripts = {}, dependencies = {} } = JSON.parse(readFileSync(inRoot('package.json'), 'utf8'));
      demand(!['preinstall', 'install', 'postinstall', 'prepare'].some((name) => name in scripts), 'the package has an install script');
      demand(Object.keys(dependencies).length === 0, 'the package has dependencies');
      process.stdout.write(`package: ${paths.length} files, ${packed.size} bytes packed, ${packed.unpackedSize} unpacked\n`);
    });
    if (!packed) return result;

    await check('kvpages.wasm is small', async () => {
      const bytes = readFileSync(inRoot('dist', 'kvpages.wasm'));
      const packedBytes = brotliCompressSync(bytes).length;
      process.stdout.write(`package: kvpages.wasm has ${bytes.length} bytes, ${packedBytes} with brotli\n`);
      demand(bytes.length < WASM_BYTES && packedBytes < WASM_BROTLI_BYTES,
        `it has ${bytes.length} bytes, ${packedBytes} with brotli, and the README's figures allow ${WASM_BYTES} and ${WASM_BROTLI_BYTES}. ` +
          'Look at how src/CMakeLists.txt compiles each file, at templates of kernels, and at what comes from libc (printf, strtod)');
    });

    const addon = inRoot('prebuilds', `${process.platform}-${process.arch}`, 'kvpages.node');
    if (process.platform === 'linux') {
      await check('the addon asks for no CUDA library', async () => {
        const needed = await capture('readelf', ['-d', addon]);
        const undefinedNames = await capture('nm', ['-D', '--undefined-only', addon]);
        demand(needed.status === 0 && undefinedNames.status === 0, `readelf, nm: ${needed.text}${undefinedNames.text}`);
        const libraries = [...needed.text.matchAll(/NEEDED.*\[(.*)\]/g)].map((match) => match[1]);
        demand(libraries.length > 0 && libraries.every((name) => !/cuda|nv/i.test(name)), `it needs ${libraries.join(', ')}`);
        demand(!/ cu[A-Z]\w*$/m.test(undefinedNames.text), `it calls the driver by name: ${undefinedNames.text.match(/ cu[A-Z]\w*$/m)}`);
      });
      const nvcc = process.env.CUDACXX || which('nvcc') || existsSync(inRoot('.toolchain', 'cuda', '.stamp'));
      if (process.env.KVPAGES_CUDA !== 'off' && nvcc) {
        await check('the addon holds the CUDA kernels', async () => {
          const bytes = readFileSync(addon);
          // How every fatbin begins.
          demand(bytes.includes(Buffer.from([0x50, 0xed, 0x55, 0xba])), 'they are not in it');
          process.stdout.write(`package: the addon has ${bytes.length} bytes\n`);
        });
      } else {
        process.stdout.write('package: SKIPPED: whether the addon holds the CUDA kernels (no nvcc, or KVPAGES_CUDA=off)\n');
        result.skipped += 1;
      }
    }

    await check('installs offline into an empty project', async () => {
      const { status, text } = await npm(['install', '--offline', join(folder, packed.filename)], app);
      demand(status === 0, text);
      demand(existsSync(join(app, 'node_modules', 'kvpages', 'package.json')), 'it is not in node_modules');
    });

    for (const backend of ['native', 'wasm']) {
      writeFileSync(join(app, `${backend}.mjs`), `import { load } from 'kvpages';\nconst kv = await load({ backend: '${backend}' });${body}\nconsole.log(line);\n`);
      writeFileSync(join(app, `${backend}.cjs`),
        `const { load } = require('kvpages');\nload({ backend: '${backend}' }).then((kv) => {${body}\nconsole.log(line);\n});\n`);
      for (const kind of ['mjs', 'cjs']) {
        await check(`${kind}, ${backend}`, async () => {
          const text = await node([`${backend}.${kind}`]);
          demand(text === `${backend} ${values}`, `printed ${text}`);
        });
      }
    }
    await check('takes the addon by itself, and WebAssembly where the addon is not there', async () => {
      writeFileSync(join(app, 'auto.mjs'), `import { load } from 'kvpages';\nconst kv = await load();\nconsole.log(kv.backend + ': ' + kv.reason);\n`);
      const first = await node(['auto.mjs']);
      demand(first.startsWith('native: '), `chose ${first}`);
      const addons = join(app, 'node_modules', 'kvpages', 'prebuilds');
      const saved = join(folder, 'prebuilds');
      const { renameSync } = await import('node:fs');
      renameSync(addons, saved);
      try {
        const second = await node(['auto.mjs']);
        demand(second.startsWith('wasm: ') && second.includes('does not load'), `chose ${second}`);
      } finally {
        renameSync(saved, addons);
      }
    });
    await check('subpaths', async () => {
      writeFileSync(join(app, 'paths.mjs'), `
        import { readFileSync } from 'node:fs';
        import { createRequire } from 'node:module';
        import { KvPagesError } from 'kvpages';
        import * as esm from 'kvpages/safetensors';
        const require = createRequire(import.meta.url);
        const cjs = require('kvpages/safetensors');
        const bytes = readFileSync(require.resolve('kvpages/kvpages.wasm'));
        const refused = (reader) => { try { reader(new Uint8Array(3)); } catch (error) { return error instanceof KvPagesError && error.code; } };
        const same = [['kvpages/safetensors', 'readSafetensors'], ['kvpages/ort', 'OrtPast'], ['kvpages/runner', 'SplitModel'], ['kvpages/transformers', 'QuantizedCache'], ['kvpages/study', 'runStudy']];
        const equal = await Promise.all(same.map(async ([path, name]) => {
          const [one, other] = [await import(path), require(path)];
          return typeof one[name] === 'function' && Object.keys(one).sort().join() === Object.keys(other).sort().join();
        }));
        const session = { inputNames: ['input_ids'], outputNames: ['logits'] };
        const codes = await Promise.all([import('kvpages/ort'), require('kvpages/ort')].map(async (ort) => {
          const { OrtPast, importOrt } = await ort;
          try { new OrtPast({ Tensor: class {} }, session); } catch (error) { return error instanceof KvPagesError && error.code + ' ' + (await importOrt().catch((cause) => cause.message)).includes('npm install onnxruntime-node'); }
        }));
        console.log(refused(esm.readSafetensors), refused(cjs.readSafetensors), WebAssembly.validate(bytes), equal.join(), codes.join(), require('kvpages/package.json').name);
      `);
      const text = await node(['paths.mjs']);
      demand(text === 'ERR_CORRUPT ERR_CORRUPT true true,true,true,true,true ERR_UNSUPPORTED true,ERR_UNSUPPORTED true kvpages', `printed ${text}`);
    });
    await check('command line', async () => {
      const { version } = JSON.parse(readFileSync(inRoot('package.json'), 'utf8'));
      const { status, text } = await capture(join(app, 'node_modules', '.bin', 'kvpages'), ['--version'], { cwd: app });
      demand(status === 0 && text.includes(version), `kvpages --version ended with ${status}: ${text}`);
      const kvpages = async (...args) => {
        const made = await capture(join(app, 'node_modules', '.bin', 'kvpages'), args, { cwd: app });
        demand(made.status === 0, `kvpages ${args.join(' ')} ended with ${made.status}: ${made.text}`);
        return made.text;
      };
      await kvpages('quantize', inRoot('tests', 'data', 'smollm2-small.safetensors'), 'layer.pb', '--layer', '0');
      const words = await kvpages('inspect', 'layer.pb');
      demand(words.includes('a PagedCacheProto of 6 pages, 83 tokens'), `kvpages inspect says ${words}`);
    });

    for (const [file, module, resolution] of [['esm.mts', 'nodenext', 'nodenext'], ['common.cts', 'nodenext', 'nodenext'], ['bundled.ts', 'esnext', 'bundler']]) {
      await check(`types, ${file}`, async () => {
        writeFileSync(join(app, file), typed);
        await node([inRoot('node_modules', 'typescript', 'bin', 'tsc'), '--noEmit', '--strict', '--target', 'es2022', '--lib', 'es2024,dom,esnext.disposable',
          '--module', module, '--moduleResolution', resolution, '--types', '', file]);
      });
    }

    await check('publint', async () => {
      const { publint } = await import('publint');
      const { formatMessage } = await import('publint/utils');
      const pkg = JSON.parse(readFileSync(inRoot('package.json'), 'utf8'));
      const { messages } = await publint({ pkgDir: join(app, 'node_modules', 'kvpages'), level: 'warning', pack: false });
      demand(messages.length === 0, messages.map((message) => formatMessage(message, pkg, { color: false })).join('\n'));
    });

    const { chromium } = await import('playwright-core');
    /** Opens a page and gives the title that its script leaves. */
    const titleOf = async (address) => {
      const browser = await chromium.launch({
        executablePath: process.env.KVP_CHROMIUM ?? '/usr/bin/chromium',
        args: ['--no-sandbox', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
      });
      try {
        const tab = await browser.newPage();
        await tab.goto(address);
        await tab.waitForFunction(() => document.title !== 'waiting', undefined, { timeout: 20000 });
        return await tab.title();
      } finally {
        await browser.close();
      }
    };

    await check('bundled by esbuild with the address of the module, in Chromium', async () => {
      const page = join(app, 'esbuild');
      mkdirSync(page);
      writeFileSync(join(page, 'index.html'), '<!doctype html><title>waiting</title><script type="module" src="./out/main.js"></script>\n');
      writeFileSync(join(page, 'main.js'), `
        import { load } from 'kvpages';
        import wasm from 'kvpages/kvpages.wasm';
        try {
          const kv = await load({ wasm: new URL(wasm, import.meta.url) });${body}
          document.title = line;
        } catch (error) {
          document.title = 'failed: ' + error;
        }
      `);
      const { build } = await import('esbuild');
      await build({ absWorkingDir: page, entryPoints: ['main.js'], outdir: 'out', bundle: true, format: 'esm', target: 'es2022', loader: { '.wasm': 'file' }, logLevel: 'error' });
      const { serveFolder } = await import('./demo-run.mjs');
      const server = await serveFolder(page, 0);
      try {
        const title = await titleOf(`http://127.0.0.1:${server.address().port}/`);
        demand(title === `wasm ${values}`, `the page says ${title}`);
      } finally {
        server.closeAllConnections();
        server.close();
      }
    });

    await check('bundled by Vite, in Chromium', async () => {
      const page = join(app, 'page');
      mkdirSync(page);
      writeFileSync(join(page, 'index.html'), '<!doctype html><title>waiting</title><script type="module" src="./main.js"></script>\n');
      writeFileSync(join(page, 'main.js'), `
        import { load } from 'kvpages';
        try {
          const kv = await load();${body}
          document.title = line;
        } catch (error) {
          document.title = 'failed: ' + error;
        }
      `);
      const { build, preview } = await import('vite');
      await build({ root: page, configFile: false, logLevel: 'warn', build: { target: 'es2022', outDir: 'dist', assetsInlineLimit: 0 } });
      const server = await preview({ root: page, configFile: false, logLevel: 'warn', preview: { host: '127.0.0.1', port: 0 } });
      try {
        const address = server.resolvedUrls?.local[0] ?? `http://127.0.0.1:${server.httpServer.address().port}/`;
        const title = await titleOf(address);
        demand(title === `wasm ${values}`, `the page says ${title}`);
      } finally {
        await server.close();
      }
    });
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
  return result;
}

if (isMain(import.meta)) {
  await script(async () => {
    const { passed, failed, why } = await testPackage();
    if (why) say(why);
    process.stdout.write(`${passed} passed, ${failed} failed\n`);
    process.exitCode = failed ? 1 : 0;
  });
}
