#!/usr/bin/env node
// npm run test:gpu: builds the kernels and runs the suites of tests/gpu on this machine's GPU: every spec against the reference
// byte for byte, all 2^16 bf16 numbers through every type, attention, caches; then under compute-sanitizer where that is on PATH, and the
// JavaScript on it. Closes with "N passed, N failed, N skipped". Without a GPU it says so, and everything is skipped.
import { mkdirSync, rmSync } from 'node:fs';
import { build, buildPreset } from './build.mjs';
import { capture, inRoot, isMain, read, say, script, which } from './lib.mjs';
import { setup } from './setup.mjs';

const sanitizer = 'compute-sanitizer';
// Slow under a sanitizer: one of each kind of kernel.
const sample = 'CudaCodec.LargerPayloads:CudaCodec.EveryPreset*:CudaAttention.*:DeviceCache.EveryPreset*:DeviceCache.Many*';

/** Runs the program of a preset and counts its tests. */
export async function runSuite(program, args = [], wrapper = []) {
  const report = inRoot('build', 'gpu-report.json');
  mkdirSync(inRoot('build'), { recursive: true });
  rmSync(report, { force: true });
  const [first, ...rest] = [...wrapper, program, ...args, `--gtest_output=json:${report}`];
  const { status, text } = await capture(first, rest, { shown: true, env: { ...process.env, GTEST_COLOR: 'no' } });
  const tests = JSON.parse(read(report) || '{"testsuites":[]}').testsuites.flatMap((suite) => suite.testsuite);
  const skipped = tests.filter((test) => test.result === 'SKIPPED');
  const failed = tests.filter((test) => test.failures).length;
  return {
    passed: tests.length - skipped.length - failed,
    failed: status !== 0 && failed === 0 ? 1 : failed,
    skipped: skipped.length,
    why: text.match(/: Skipped\n(.*)/)?.[1] ?? '',
  };
}

/** The same checksum of codes and scales as on the CPU. */
async function runChecksums() {
  await build();
  const lines = [];
  for (const backend of ['native', 'cuda']) {
    const { status, text } = await capture(process.execPath, [inRoot('scripts', 'checksum.mjs'), backend]);
    process.stdout.write(text);
    lines.push(status === 0 ? text.split(' ')[0] : `failed on ${backend}`);
  }
  const good = lines[0] === lines[1];
  return { passed: good ? 1 : 0, failed: good ? 0 : 1, skipped: 0 };
}

/** The tests of the JavaScript API that work on tensors and caches. */
async function runJavaScript() {
  const report = inRoot('build', 'gpu-vitest.json');
  rmSync(report, { force: true });
  const { status } = await capture(
    process.execPath,
    [inRoot('node_modules', 'vitest', 'vitest.mjs'), 'run', '--project', 'node-cuda', '--reporter=default', '--reporter=json',
      `--outputFile.json=${report}`],
    { shown: true, env: { ...process.env, CI: 'true', NO_COLOR: '1', KVP_TEST_GPU: '1' } },
  );
  const { numPassedTests = 0, numFailedTests = 0, numPendingTests = 0 } = JSON.parse(read(report) || '{}');
  return { passed: numPassedTests, failed: status !== 0 && numFailedTests === 0 ? 1 : numFailedTests, skipped: numPendingTests };
}

if (isMain(import.meta)) {
  await script(async () => {
    await setup();
    buildPreset('gpu', ['kvpages_gpu_tests']);
    const program = inRoot('build', 'gpu', 'tests', 'kvpages_gpu_tests');
    const results = [await runSuite(program)];
    if (results[0].passed + results[0].failed === 0) {
      say(`no GPU was found (${results[0].why}): nothing was tested`);
      results[0].skipped += 2; // the checksums and the JavaScript
    } else {
      if (which(sanitizer)) {
        for (const tool of ['memcheck', 'racecheck', 'synccheck']) {
          say(`${sanitizer} ${tool}`);
          results.push(await runSuite(program, [`--gtest_filter=${sample}`], [sanitizer, '--tool', tool, '--error-exitcode', '9']));
        }
      } else {
        say(`no ${sanitizer} on PATH: not run`);
      }
      results.push(await runChecksums(), await runJavaScript());
    }
    const sum = (key) => results.reduce((total, result) => total + result[key], 0);
    process.stdout.write(`${sum('passed')} passed, ${sum('failed')} failed, ${sum('skipped')} skipped\n`);
    if (sum('failed') > 0) process.exitCode = 1;
  });
}
