#!/usr/bin/env node
// npm test: sets up, builds, and runs every check. Closes with one line "N passed, N failed, N skipped" that adds all of
// them up; ends with 0 only when nothing failed. `-- --only=dev,vitest` runs some steps, `-- --fuzz-seconds=60` fuzzes longer.
import { existsSync, mkdirSync, readFileSync, readdirSync, rmSync } from 'node:fs';
import { basename } from 'node:path';
import { build, buildPreset } from './build.mjs';
import { checkRooms } from './check-rooms.mjs';
import { capture, inRoot, jobs, say, script, seconds } from './lib.mjs';
import { setup } from './setup.mjs';

const argument = (name, otherwise) =>
  process.argv.map((text) => text.match(new RegExp(`^--${name}=(.*)$`))?.[1]).find((value) => value !== undefined) ?? otherwise;

const fuzzSeconds = argument('fuzz-seconds', process.env.KVP_FUZZ_SECONDS ?? '5');

const nothing = (why) => ({ passed: 0, failed: 0, skipped: 0, why });
const one = (good, why = '') => ({ passed: good ? 1 : 0, failed: good ? 0 : 1, skipped: 0, why });

/** Programs of an earlier build must not be run when this one fails, so a failed build is the step's failure. */
async function ctest(preset) {
  buildPreset(preset);
  const report = inRoot('build', preset, 'junit.xml');
  rmSync(report, { force: true });
  const { status } = await capture(
    'ctest',
    ['--preset', preset, '-j', jobs, '--output-on-failure', '--output-junit', report, '--no-tests=ignore', '--progress'],
    { shown: true, env: { ...process.env, UBSAN_OPTIONS: 'print_stacktrace=1', GTEST_COLOR: 'no' } },
  );
  const text = existsSync(report) ? readFileSync(report, 'utf8') : '';
  const count = (name) => Number(text.match(new RegExp(`<testsuite[^>]*\\b${name}="(\\d+)"`))?.[1] ?? 0);
  const [tests, failed, skipped] = [count('tests'), count('failures'), count('skipped') + count('disabled')];
  if (status !== 0 && failed === 0) return { passed: 0, failed: 1, skipped: 0, why: `ctest ended with ${status}` };
  if (tests === 0) return nothing('no C++ tests yet');
  return { passed: tests - failed - skipped, failed, skipped };
}

function rooms() {
  const { files, broken } = checkRooms();
  for (const text of broken) process.stdout.write(`${text}\n`);
  return one(broken.length === 0, `${files} files`);
}

async function fuzz() {
  const sources = existsSync(inRoot('tests', 'fuzz')) ? readdirSync(inRoot('tests', 'fuzz')).filter((name) => name.endsWith('_fuzz.cc')) : [];
  if (sources.length === 0) return nothing('no fuzz targets yet');
  buildPreset('fuzz');
  const result = { passed: 0, failed: 0, skipped: 0 };
  for (const name of sources.map((source) => basename(source, '.cc'))) {
    // What the fuzzer finds interesting stays in the build folder, so that the next run starts from it; seeds are read only.
    const corpus = inRoot('build', 'fuzz', 'corpus', name);
    const crashes = inRoot('tests', 'fuzz', 'crashes');
    for (const folder of [corpus, crashes]) mkdirSync(folder, { recursive: true });
    const seeds = [inRoot('tests', 'fuzz', 'corpus', name)].filter(existsSync);
    const { status, text } = await capture(inRoot('build', 'fuzz', 'tests', name), [
      `-max_total_time=${fuzzSeconds}`, '-timeout=20', '-rss_limit_mb=3072', '-print_final_stats=1', `-artifact_prefix=${crashes}/`, corpus, ...seeds,
    ]);
    const runs = text.match(/number_of_executed_units:\s*(\d+)/)?.[1] ?? '?';
    process.stdout.write(status === 0 ? `${name}: ${runs} inputs, nothing found\n` : text);
    result[status === 0 ? 'passed' : 'failed'] += 1;
  }
  return result;
}

async function types() {
  if (!existsSync(inRoot('tsconfig.json'))) return nothing('no tsconfig.json yet');
  let good = true;
  for (const config of ['tsconfig.json', 'tests/js/tsconfig.json', 'tests/tsconfig.json', 'web-demo/tsconfig.json']) {
    if (!existsSync(inRoot(config))) continue;
    const { status } = await capture(process.execPath, [inRoot('node_modules', 'typescript', 'bin', 'tsc'), '--noEmit', '-p', config], { shown: true });
    good &&= status === 0;
  }
  return one(good);
}

async function vitest() {
  if (!existsSync(inRoot('vitest.config.ts'))) return nothing('no vitest.config.ts yet');
  const report = inRoot('build', 'vitest.json');
  mkdirSync(inRoot('build'), { recursive: true });
  rmSync(report, { force: true });
  const { status } = await capture(
    process.execPath,
    [inRoot('node_modules', 'vitest', 'vitest.mjs'), 'run', '--passWithNoTests', '--reporter=default', '--reporter=json', `--outputFile.json=${report}`],
    { shown: true, env: { ...process.env, CI: 'true', NO_COLOR: '1' } },
  );
  const found = existsSync(report) ? JSON.parse(readFileSync(report, 'utf8')) : { testResults: [] };
  const passed = found.numPassedTests ?? 0;
  const skipped = (found.numPendingTests ?? 0) + (found.numTodoTests ?? 0);
  // A file that does not even load has no tests, but has failed.
  const broken = found.testResults.filter((file) => file.status === 'failed' && file.assertionResults.length === 0).length;
  const failed = (found.numFailedTests ?? 0) + broken;
  return { passed, failed: status !== 0 && failed === 0 ? 1 : failed, skipped };
}

const steps = {
  build: async () => {
    await build();
    return one(true);
  },
  rooms,
  types,
  dev: () => ctest('dev'),
  vitest,
  package: async () => (await import('./test-package.mjs')).testPackage(),
  asan: () => ctest('asan'),
  fuzz,
};

await script(async () => {
  await setup();
  const only = argument('only', '').split(',').filter(Boolean);
  const results = [];
  for (const [name, step] of Object.entries(steps)) {
    if (only.length && !only.includes(name)) continue;
    const began = Date.now();
    say(name);
    let result;
    try {
      result = await step();
    } catch (error) {
      process.stdout.write(`${error.stack ?? error}\n`);
      result = { passed: 0, failed: 1, skipped: 0, why: error.message };
    }
    results.push({ name, ...result, time: seconds(began) });
  }
  process.stdout.write('\n');
  for (const { name, passed, failed, skipped, why, time } of results) {
    const empty = passed + failed + skipped === 0;
    const text = empty ? `SKIPPED: ${why}` : `${passed} passed, ${failed} failed, ${skipped} skipped${why ? ` (${why})` : ''}`;
    process.stdout.write(`== ${name.padEnd(8)} ${time.padStart(8)}  ${text}\n`);
  }
  const sum = (key) => results.reduce((total, result) => total + result[key], 0);
  if (sum('failed') > 0) process.exitCode = 1;
  process.stdout.write(`${sum('passed')} passed, ${sum('failed')} failed, ${sum('skipped')} skipped\n`);
});
