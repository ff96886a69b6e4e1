// SPDX-License-Identifier: Apache-2.0
// The command line's grammar: commands are tables, from which parsing and every --help are made.
import { parseArgs } from 'node:util';

export interface Option {
  readonly name: string;
  /** Word for the value in the help text; a switch has none. */
  readonly value?: string;
  readonly help: string;
}

export interface Command {
  readonly name: string;
  readonly summary: string;
  /** Names of the positional arguments, all required. */
  readonly operands: readonly string[];
  readonly options: readonly Option[];
  /** Paragraphs after the options. */
  readonly notes?: readonly string[];
  run(args: Arguments): Promise<void>;
}

/** Wrong usage: exit code 2. `command` says whose help to point to. */
export class UsageError extends Error {
  constructor(
    message: string,
    readonly command?: string,
  ) {
    super(message);
  }
}

export class Arguments {
  constructor(
    private readonly command: string,
    private readonly operands: readonly string[],
    private readonly values: Readonly<Record<string, string | boolean | undefined>>,
  ) {}

  operand(index: number): string {
    return this.operands[index]!;
  }
  flag(name: string): boolean {
    return this.values[name] === true;
  }
  text(name: string): string | undefined {
    const value = this.values[name];
    return typeof value === 'string' ? value : undefined;
  }
  /** A whole number >= `least`. */
  count(name: string, least: number): number | undefined {
    const text = this.text(name);
    if (text === undefined) return undefined;
    const number = Number(text);
    if (!/^\d+$/.test(text) || !Number.isSafeInteger(number) || number < least) this.fail(`--${name} must be a whole number from ${least} up, got ${text}`);
    return number;
  }
  oneOf<T extends string>(name: string, words: readonly T[]): T | undefined {
    const text = this.text(name);
    if (text !== undefined && !words.includes(text as T)) this.fail(`--${name} must be one of ${words.join(', ')}, got ${text}`);
    return text as T | undefined;
  }
  fail(message: string): never {
    throw new UsageError(message, this.command);
  }
}

const helpOption: Option = { name: 'help', help: 'show this text' };

/** Reads the arguments that follow the command's name. */
export function parse(command: Command, args: readonly string[]): Arguments | 'help' {
  const options = Object.fromEntries(
    [...command.options, helpOption].map((option) => [
      option.name,
      { type: option.value === undefined ? ('boolean' as const) : ('string' as const), ...(option.name === 'help' ? { short: 'h' } : {}) },
    ]),
  );
  let parsed: { values: Record<string, string | boolean | undefined>; positionals: string[] };
  try {
    parsed = parseArgs({ args: [...args], options, allowPositionals: true, strict: true }) as typeof parsed;
  } catch (error) {
    if (!(error instanceof Error && 'code' in error && String(error.code).startsWith('ERR_PARSE_ARGS'))) throw error;
    throw new UsageError(error.message.split('. ')[0]!, command.name);
  }
  if (parsed.values['help'] === true) return 'help';
  const { positionals } = parsed;
  const missing = command.operands[positionals.length];
  if (missing !== undefined) throw new UsageError(`${missing} is missing`, command.name);
  if (positionals.length > command.operands.length) {
    throw new UsageError(`one argument too many: ${positionals[command.operands.length]}`, command.name);
  }
  return new Arguments(command.name, positionals, parsed.values);
}

function columns(rows: ReadonlyArray<readonly [string, string]>): string {
  const width = Math.max(...rows.map(([name]) => name.length));
  return rows.map(([name, help]) => `  ${name.padEnd(width)}  ${help}\n`).join('');
}

export function commandHelp(command: Command): string {
  const options = [...command.options, helpOption].map(
    (option): [string, string] => [`--${option.name}${option.value === undefined ? '' : ` ${option.value}`}`, option.help],
  );
  const notes = (command.notes ?? []).map((note) => `\n${note}\n`).join('');
  return `${command.summary}\n\nUsage: kvpages ${[command.name, ...command.operands].join(' ')} [options]\n\nOptions:\n${columns(options)}${notes}`;
}

export function generalHelp(commands: readonly Command[], version: string): string {
  return (
    `kvpages ${version}: quantized pages of an LLM's KV cache\n\nUsage: kvpages COMMAND ...\n\nCommands:\n` +
    columns(commands.map((command) => [[command.name, ...command.operands].join(' '), command.summary])) +
    '\nOptions:\n' +
    columns([
      ['--help', 'show this text; after a command, its own'],
      ['--version', 'show the version'],
    ]) +
    '\nA file named - is standard input or standard output. Exit codes: 0 fine, 1 failed, 2 wrong usage.\n'
  );
}
