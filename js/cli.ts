#!/usr/bin/env node
// SPDX-License-Identifier: Apache-2.0
// The command line: finds the command, turns what it throws into a message and an exit code.
import { readFileSync } from 'node:fs';
import { ab } from './cli/ab.js';
import { commandHelp, generalHelp, parse, UsageError } from './cli/args.js';
import type { Command } from './cli/args.js';
import { compare } from './cli/compare.js';
import { inspect } from './cli/inspect.js';
import { Failure, writeStdout } from './cli/io.js';
import { plan } from './cli/plan.js';
import { quantize } from './cli/quantize.js';
import { KvPagesError } from './index.js';

const { version } = JSON.parse(readFileSync(new URL('../package.json', import.meta.url), 'utf8')) as { version: string };
const commands: readonly Command[] = [inspect, quantize, compare, ab, plan];

async function main(args: readonly string[]): Promise<void> {
  const [word, ...rest] = args;
  if (word === '--version' || word === '-v') return writeStdout(`${version}\n`);
  if (word === '--help' || word === '-h' || (word === 'help' && rest.length === 0)) return writeStdout(generalHelp(commands, version));
  if (word === undefined) throw new UsageError('a command is missing');
  const command = commands.find((candidate) => candidate.name === (word === 'help' ? rest[0] : word));
  if (!command) throw new UsageError(`there is no command ${word === 'help' ? rest[0] : word}`);
  const parsed = word === 'help' ? 'help' : parse(command, rest);
  if (parsed === 'help') return writeStdout(commandHelp(command));
  await command.run(parsed);
}

function usage(message: string, command?: string): number {
  process.stderr.write(`kvpages: ${message}\nTry: kvpages ${command === undefined ? '' : `${command} `}--help\n`);
  return 2;
}

function exitCode(error: unknown): number {
  if (error instanceof UsageError) return usage(error.message, error.command);
  if (error instanceof KvPagesError) {
    // A spec comes from the command line, nowhere else.
    if (error.code === 'ERR_SPEC') return usage(error.message);
    const where = error.byteOffset === undefined ? '' : ` (at byte ${error.byteOffset})`;
    process.stderr.write(`kvpages: ${error.message}${error.message.includes('byte') ? '' : where} [${error.code}]\n`);
  } else if (error instanceof Failure) {
    process.stderr.write(`kvpages: ${error.message}\n`);
  } else {
    process.stderr.write(`kvpages: this should not happen, please report it: ${error instanceof Error ? (error.stack ?? error.message) : String(error)}\n`);
  }
  return 1;
}

// The reader of a pipe may stop early (`| head`).
process.stdout.on('error', (error: NodeJS.ErrnoException) => {
  if (error.code !== 'EPIPE') throw error;
});
process.exitCode = await main(process.argv.slice(2)).then(() => 0, exitCode);
