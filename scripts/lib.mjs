// What the scripts share: the project's root, running a program, saying what happens.
import { spawn, spawnSync } from 'node:child_process';
import { existsSync, readFileSync } from 'node:fs';
import { availableParallelism } from 'node:os';
import { delimiter, dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

export const root = dirname(dirname(fileURLToPath(import.meta.url)));
export const toolchain = join(root, '.toolchain');
export const inRoot = (...parts) => join(root, ...parts);
export const jobs = String(process.env.KVP_JOBS || availableParallelism());

export class Failure extends Error {}

export function say(text) {
  process.stdout.write(`== ${text}\n`);
}

export function seconds(since) {
  return `${((Date.now() - since) / 1000).toFixed(1)} s`;
}

/** Runs a program with its output shown; throws Failure unless it ends with 0. */
export function run(program, args, options = {}) {
  const result = spawnSync(program, args, { cwd: root, stdio: ['ignore', 'inherit', 'inherit'], ...options });
  if (result.error) throw new Failure(`${program}: ${result.error.message}`);
  if (result.status !== 0) {
    throw new Failure(`${[program, ...args].join(' ')} ended with ${result.signal ?? result.status}`);
  }
}

/** Runs a program and returns what it printed and its status; `shown` copies the output as it comes. */
export function capture(program, args, { shown = false, ...options } = {}) {
  return new Promise((resolve) => {
    const child = spawn(program, args, { cwd: root, stdio: ['ignore', 'pipe', 'pipe'], ...options });
    let text = '';
    const take = (chunk) => {
      text += chunk;
      if (shown) process.stdout.write(chunk);
    };
    child.stdout.setEncoding('utf8').on('data', take);
    child.stderr.setEncoding('utf8').on('data', take);
    child.on('error', (error) => resolve({ status: 127, text: `${text}${error.message}\n` }));
    child.on('close', (status, signal) => resolve({ status: signal ? 128 : status, text }));
  });
}

/** First line (or all) that a quick program prints, '' when it is not there or fails. */
export function output(program, args, options = {}) {
  const result = spawnSync(program, args, { encoding: 'utf8', stdio: ['ignore', 'pipe', 'ignore'], ...options });
  return result.status === 0 ? result.stdout.trim() : '';
}

export function which(program) {
  for (const folder of (process.env.PATH ?? '').split(delimiter)) {
    if (folder && existsSync(join(folder, program))) return join(folder, program);
  }
  return '';
}

export function read(path) {
  return existsSync(path) ? readFileSync(path, 'utf8') : '';
}

/** Runs main of a script; a Failure is one line, anything else keeps its stack. */
export async function script(main) {
  try {
    await main();
  } catch (error) {
    process.stderr.write(error instanceof Failure ? `\nFailed: ${error.message}\n` : `${error.stack}\n`);
    process.exitCode = 1;
  }
}

export const isMain = (meta) => process.argv[1] && fileURLToPath(meta.url) === process.argv[1];
