// SPDX-License-Identifier: Apache-2.0
// A language model on disk: which of its files are what, and the engine that runs it.
import { readdir, readFile, stat } from 'node:fs/promises';
import { basename, dirname, join, resolve } from 'node:path';
import { KvPagesError } from '../index.js';
import type { KvPages } from '../index.js';
import { importOrt } from '../ort.js';
import type { Ort } from '../ort.js';
import type { SplitModelConfig } from '../runner.js';
import { attendEngine, openTokenizer, readTexts, thawEngine } from '../study.js';
import type { Engine, Text, Tokenizer } from '../study.js';
import type { Arguments, Option } from './args.js';
import { Failure, readInput, shown } from './io.js';

export const modelOptions: readonly Option[] = [
  { name: 'model', value: 'PATH', help: 'folder of the model (config.json, tokenizer.json, onnx/), or its .onnx file' },
  { name: 'engine', value: 'WORD', help: 'attend: model in pieces, attention over the codes; thaw: whole model, fed with a thawed past (attend where there are pieces)' },
  { name: 'threads', value: 'N', help: "threads of onnxruntime (1); more may change the last digits" },
];

interface Files {
  readonly folder: string;
  readonly whole: readonly string[];
  /** Pieces of the first set, in order. */
  readonly pieces: readonly string[];
}

export interface Model {
  readonly name: string;
  readonly engine: Engine;
  /** Token ids are below it. */
  readonly vocabulary: number;
  /** Tokens that end a text. */
  readonly stop: readonly number[];
  tokenizer(): Promise<Tokenizer>;
}

/** Opens the model that the arguments name. */
export async function openModel(args: Arguments, kv: KvPages, report: (text: string) => void): Promise<Model> {
  const path = args.text('model') ?? args.fail('--model is missing');
  const wanted = args.oneOf('engine', ['attend', 'thaw']);
  const threads = args.count('threads', 1) ?? 1;
  const files = await find(path);
  const kind = wanted ?? (files.pieces.length > 0 ? 'attend' : 'thaw');
  if (kind === 'attend' && files.pieces.length === 0) throw new Failure(`${path} has no pieces for --engine attend: no files named like split_q4_0.onnx, split_q4_1.onnx`);
  if (kind === 'thaw' && files.whole.length === 0) throw new Failure(`${path} has no model for --engine thaw: no file named like model.onnx or model_q4.onnx`);
  const config = (await readJson(join(files.folder, 'config.json'), kind === 'thaw')) as Partial<SplitModelConfig>;
  const generation = (await readJson(join(files.folder, 'generation_config.json'), true)) as Pick<SplitModelConfig, 'eos_token_id'>;
  const ort = await importOrt();
  const sessionOptions = { intraOpNumThreads: threads, interOpNumThreads: 1, logSeverityLevel: 3 };
  const engine =
    kind === 'attend'
      ? await loading(files.pieces[0]!, attendEngine({
          kv,
          ort: naming(ort),
          config: config as SplitModelConfig,
          pieces: files.pieces,
          sessionOptions,
          onProgress: ({ done, total }) => report(`loading piece ${done} of ${total}`),
        }))
      : await whole(kv, ort, files.whole[0]!, sessionOptions, report);
  return {
    name: basename(resolve(files.folder)),
    engine,
    vocabulary: config.vocab_size ?? Infinity,
    stop: [generation.eos_token_id ?? config.eos_token_id ?? []].flat(),
    tokenizer: async () => {
      const [tokenizer, settings] = await Promise.all([readJson(join(files.folder, 'tokenizer.json')), readJson(join(files.folder, 'tokenizer_config.json'), true)]);
      return openTokenizer(tokenizer, settings);
    },
  };
}

async function whole(kv: KvPages, ort: Ort, file: string, sessionOptions: object, report: (text: string) => void): Promise<Engine> {
  report(`loading ${basename(file)}`);
  const session = await loading(file, ort.InferenceSession.create(file, sessionOptions));
  try {
    return thawEngine(kv, ort, session);
  } catch (error) {
    await session.release();
    if (error instanceof KvPagesError) throw new Failure(`${file}: ${error.message} [${error.code}]`);
    throw error;
  }
}

/** onnxruntime whose errors name the file. */
function naming(ort: Ort): Ort {
  return { Tensor: ort.Tensor, InferenceSession: { create: (model: unknown, options?: unknown) => loading(String(model), ort.InferenceSession.create(model, options)) } };
}

async function loading<T>(file: string, loads: Promise<T>): Promise<T> {
  try {
    return await loads;
  } catch (error) {
    if (error instanceof KvPagesError || error instanceof Failure || !(error instanceof Error)) throw error;
    throw new Failure(`${file} could not be loaded: ${outOfMemory(error) ? 'out of memory: ' : ''}${error.message}`);
  }
}

/** Of JavaScript, WebAssembly and onnxruntime, which have no code for it. */
export function outOfMemory(error: Error): boolean {
  return error instanceof RangeError || /alloc|memory/i.test(error.message);
}

async function find(path: string): Promise<Files> {
  const kind = await stat(path).catch(() => undefined);
  if (kind === undefined) throw new Failure(`${path} could not be read: there is no such file or folder`);
  const isFile = kind.isFile();
  const folders = isFile ? [dirname(path)] : [join(path, 'onnx'), path];
  const lists = await Promise.all(folders.map(async (folder) => (await readdir(folder).catch(() => [])).map((name) => join(folder, name))));
  const names = lists.flat().filter((name) => name.endsWith('.onnx'));
  if (!isFile && names.length === 0) throw new Failure(`${path} has no .onnx file, nor has its folder onnx`);
  const number = (name: string) => /^(split_.*)_(\d+)\.onnx$/.exec(basename(name));
  const set = isFile ? number(path)?.[1] : names.map(number).find((match) => match !== null)?.[1];
  const pieces = names
    .filter((name) => set !== undefined && number(name)?.[1] === set)
    .sort((a, b) => Number(number(a)![2]) - Number(number(b)![2]));
  const wholes = names.filter((name) => number(name) === null).sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
  const beside = async (folder: string) => (await stat(join(folder, 'config.json')).catch(() => undefined)) !== undefined;
  const folder = isFile ? ((await beside(dirname(path))) ? dirname(path) : dirname(dirname(path))) : path;
  return { folder, whole: isFile ? (number(path) === null ? [path] : []) : wholes, pieces: isFile && set === undefined ? [] : pieces };
}

/** Exporters write the cached model under these names; files of other types have a suffix. */
function rank(name: string): number {
  const at = ['model.onnx', 'decoder_model_merged.onnx', 'decoder_with_past_model.onnx'].indexOf(basename(name));
  return at < 0 ? 3 : at;
}

async function readJson(file: string, optional = false): Promise<object> {
  let text: string;
  try {
    text = await readFile(file, 'utf8');
  } catch (error) {
    if (optional && (error as NodeJS.ErrnoException).code === 'ENOENT') return {};
    throw new Failure(`${file} could not be read: ${(error as NodeJS.ErrnoException).code === 'ENOENT' ? 'there is no such file' : (error as Error).message}`);
  }
  return parseJson(text, file) as object;
}

export function parseJson(text: string, file: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Failure(`${file} is no JSON: ${(error as Error).message}`);
  }
}

/** Texts of a file: what `readTexts` takes from JSON, else the whole file as one text. */
export async function readTextFile(file: string): Promise<Text[]> {
  const text = new TextDecoder().decode(await readInput(file));
  const name = shown(file, 'standard input');
  if (!/\.json$/i.test(file)) return [text];
  return readTexts(parseJson(text, name), name);
}

/** Seconds as a person says them. */
export function duration(seconds: number): string {
  if (seconds < 90) return `${Math.ceil(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}
