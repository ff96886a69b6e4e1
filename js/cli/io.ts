// SPDX-License-Identifier: Apache-2.0
// Files, standard input and output, progress on standard error.
import { randomBytes } from 'node:crypto';
import { readFile, rename, stat, unlink, writeFile } from 'node:fs/promises';
import { KvPagesError } from '../errors.js';

/** Something that failed and is not a bug: exit code 1, the message alone. */
export class Failure extends Error {}

const reasons: Readonly<Record<string, string>> = {
  ENOENT: 'there is no such file or folder',
  EISDIR: 'it is a folder',
  EACCES: 'permission denied',
  ENOSPC: 'the disk is full',
};

function reason(error: unknown): string {
  const { code, message } = error as NodeJS.ErrnoException;
  return (code !== undefined && reasons[code]) || message;
}

export const shown = (name: string, stream: string): string => (name === '-' ? stream : name);

/** All bytes of a file or of standard input; none at all is an error here. */
export async function readInput(name: string): Promise<Uint8Array> {
  let bytes: Uint8Array;
  try {
    if (name === '-') {
      const chunks: Uint8Array[] = [];
      for await (const chunk of process.stdin) chunks.push(chunk as Uint8Array);
      bytes = Buffer.concat(chunks);
    } else {
      bytes = await readFile(name);
    }
  } catch (error) {
    throw new Failure(`${shown(name, 'standard input')} could not be read: ${reason(error)}`);
  }
  if (bytes.byteLength === 0) throw new Failure(`${shown(name, 'standard input')} is empty: there is nothing in it to read`);
  return bytes;
}

/** Runs `work`; what it throws names the place, a file or a page. A spec is wrong wherever it stands. */
export function placed<T>(place: string, work: () => T): T {
  try {
    return work();
  } catch (error) {
    throw errorAt(place, error);
  }
}

/** What `placed` throws for an error. */
export function errorAt(place: string, error: unknown): unknown {
  if (!(error instanceof KvPagesError) || error.code === 'ERR_SPEC') return error;
  const at = error.byteOffset === undefined || error.message.includes('at byte') ? '' : `, at byte ${error.byteOffset}`;
  return new KvPagesError(error.code, `${place}: ${error.message}${at}`, {}, { cause: error });
}

const partOf = (name: string): string => `${name}.${randomBytes(4).toString('hex')}.part`;

/** Whether an output can be written, before the work whose result it is to hold. */
export async function checkOutput(name: string | undefined): Promise<void> {
  if (name === undefined || name === '-') return;
  const part = partOf(name);
  try {
    if ((await stat(name).catch(() => undefined))?.isDirectory()) throw Object.assign(new Error(), { code: 'EISDIR' });
    await writeFile(part, '', { flag: 'wx' });
    await unlink(part);
  } catch (error) {
    throw new Failure(`${name} could not be written: ${reason(error)}`);
  }
}

/** Writes a whole file or nothing: a failed write leaves what was there before. */
export async function writeOutput(name: string, bytes: Uint8Array): Promise<void> {
  if (name === '-') return writeStdout(bytes);
  const part = partOf(name);
  try {
    await writeFile(part, bytes, { flag: 'wx' });
    await rename(part, name);
  } catch (error) {
    await unlink(part).catch(() => undefined);
    throw new Failure(`${name} could not be written: ${reason(error)}`);
  }
}

export function writeStdout(data: string | Uint8Array): Promise<void> {
  return new Promise((resolve, reject) => {
    process.stdout.write(data, (error) => {
      // The reader of a pipe may stop early (`| head`); that is its right.
      if (!error || (error as NodeJS.ErrnoException).code === 'EPIPE') resolve();
      else reject(new Failure(`standard output could not be written: ${reason(error)}`));
    });
  });
}

/** One line on standard error: rewritten in place at a terminal, else at most one line every two seconds and the last one. */
export class Progress {
  #last = 0;
  #open = false;
  constructor(private readonly quiet: boolean) {}

  show(text: string, final = false): void {
    if (this.quiet) return;
    const now = Date.now();
    if (process.stderr.isTTY) {
      if (!final && now - this.#last < 80) return;
      process.stderr.write(`\r\u001b[K${text}${final ? '\n' : ''}`);
      this.#open = !final;
    } else if (final || now - this.#last >= 2000) {
      process.stderr.write(`${text}\n`);
    } else {
      return;
    }
    this.#last = now;
  }

  /** Ends a line that stands open, before an error is printed. */
  close(): void {
    if (this.#open) process.stderr.write('\n');
    this.#open = false;
  }
}
