// SPDX-License-Identifier: Apache-2.0
// kvpages ab: what a model loses when it runs on a quantized cache.
import { KvPagesError } from '../index.js';
import { defaultSchemes, isIds, parseScheme, planScheme, runStudy } from '../study.js';
import type { SchemeResult, Scheme, Sequence, StudyResult, Text } from '../study.js';
import type { Arguments, Command } from './args.js';
import { studyChart } from './chart.js';
import { checkOutput, Failure, Progress, readInput, writeOutput, writeStdout } from './io.js';
import { backendOptions, loadFrom } from './load.js';
import { duration, modelOptions, openModel, outOfMemory, parseJson, readTextFile } from './model.js';
import type { Model } from './model.js';
import { defaultPrompts } from './prompts.js';
import { errorText, plural, table } from './text.js';

export const ab: Command = {
  name: 'ab',
  summary: 'Run a language model on quantized caches: what each scheme costs and saves',
  operands: [],
  options: [
    ...modelOptions,
    { name: 'schemes', value: 'LIST', help: `[NAME=]KEY[:VALUE][@KEPT[+RECENT]] or plan files, separated by commas (${defaultSchemes.join(',')})` },
    { name: 'hot', value: 'WORD', help: 'type of the tokens whose page is not full: bf16, f16 or f32 (bf16); with f32 both engines agree to their rounding' },
    { name: 'baseline', value: 'NAME', help: 'scheme that others are held against (nvfp4)' },
    { name: 'prompts', value: 'FILES', help: 'prompts that the model goes on from: text, or JSON with texts, chats or token ids (three that are built in)' },
    { name: 'max-new', value: 'N', help: 'most tokens that it writes after each prompt (384)' },
    { name: 'text', value: 'FILES', help: 'texts that it reads, for perplexity; without --prompts nothing is written then' },
    { name: 'text-tokens', value: 'N', help: 'tokens of each text (all)' },
    { name: 'layers', help: 'also the errors of every layer' },
    { name: 'plot', value: 'OUT.svg', help: 'draw error by layer and KL by position' },
    { name: 'json', help: 'everything as JSON' },
    { name: 'quiet', help: 'no progress' },
    ...backendOptions,
  ],
  notes: [
    'The model writes after each prompt in full precision. Then it reads the text once per scheme: pages are encoded when they are full,\nthe page being filled is bf16, keys and values come from the cache. KL is that of the next token, dense f32 cache to scheme, in nats.',
    'kept: first tokens that stay dense; 0 for others\' schemes, 4 for kv4, kv3, kv8, or as said behind @; after a + how far behind the end a page is encoded.\nratio (study) is 2 / (bits / 8 + 1 / 16), ratio counts all bytes of the caches at the end of the texts, dense pages too.',
  ],
  async run(args) {
    const maxNew = args.count('max-new', 1) ?? 384;
    const textTokens = args.count('text-tokens', 1);
    const hot = args.oneOf('hot', ['bf16', 'f16', 'f32']);
    const began = performance.now();
    const progress = new Progress(args.flag('quiet'));
    // Files first: a wrong name is found before a model is loaded.
    const [prompts, texts, named] = await Promise.all([filesOf(args, 'prompts'), filesOf(args, 'text'), schemeFiles(args)]);
    const plot = args.text('plot');
    await checkOutput(plot);
    const kv = await loadFrom(args);
    const schemes = named
      .map((entry) => (typeof entry === 'string' ? parseScheme(kv, entry) : entry))
      .map((scheme) => ({ ...scheme, cache: { ...(hot && { hot }), ...scheme.cache } }));
    checkNames(args, schemes);
    const model = await openModel(args, kv, (text) => progress.show(text));
    try {
      const sequences = await sequencesOf(model, prompts.length + texts.length === 0 ? builtIn() : prompts, maxNew, texts, textTokens);
      const baseline = args.text('baseline');
      const result = await running(
        runStudy({
          kv,
          engine: model.engine,
          schemes,
          sequences,
          stop: model.stop,
          ...(baseline === undefined ? {} : { baseline }),
          onProgress: ({ sequence, sequences: count, step, done, total, secondsLeft }) =>
            progress.show(`${sequence} of ${count}, ${step}: ${done} of ${total} tokens, about ${duration(secondsLeft)} left`, secondsLeft === 0),
        }),
      );
      const run = {
        seconds: Math.round((performance.now() - began) / 100) / 10,
        peakBytes: process.resourceUsage().maxRSS * 1024,
        denseBytes: model.engine.denseBytes,
      };
      if (plot !== undefined) await writeOutput(plot, new TextEncoder().encode(studyChart(model.name, result)));
      if (args.flag('json')) {
        await writeStdout(`${JSON.stringify({ model: model.name, backend: kv.backend, kernels: kv.kernels, ...result, run }, null, 2)}\n`);
        return;
      }
      await writeStdout(report(model, result, args.flag('layers')));
      if (!args.flag('quiet')) {
        const thawed = model.engine.kind === 'thaw' ? `keys and values beside the cache ${megabytes(run.denseBytes)}, ` : 'nothing thawed beside the cache, ';
        process.stderr.write(`${duration(run.seconds)}; ${thawed}process at its peak ${megabytes(run.peakBytes)}\n`);
      }
    } finally {
      progress.close();
      await model.engine.dispose();
    }
  },
};

const megabytes = (bytes: number): string => `${(bytes / 1e6).toFixed(bytes < 1e7 ? 2 : 0)} MB`;

export interface Named {
  readonly name: string;
  readonly text: Text;
}

const builtIn = (): Named[] => defaultPrompts.map((text, i) => ({ name: `prompt ${i + 1}`, text }));

export async function filesOf(args: Arguments, option: string): Promise<Named[]> {
  const files = args.text(option)?.split(',') ?? [];
  const texts = await Promise.all(
    files.map(async (file) => {
      const list = await readTextFile(file);
      return list.map((text, i) => ({ name: list.length > 1 ? `${file} ${i + 1}` : file, text }));
    }),
  );
  return texts.flat();
}

/** Words of the list; a plan in place of its file's name. */
async function schemeFiles(args: Arguments): Promise<Array<string | Scheme>> {
  const words = args.text('schemes')?.split(',') ?? defaultSchemes;
  return Promise.all(words.map((word) => (/\.json$/i.test(word) ? planFile(word) : word)));
}

async function planFile(file: string): Promise<Scheme> {
  const scheme = planScheme(parseJson(new TextDecoder().decode(await readInput(file)), file), file);
  return scheme.name === file ? { ...scheme, name: file.replace(/^.*\/|\.json$/gi, '') } : scheme;
}

function checkNames(args: Arguments, schemes: readonly Scheme[]): void {
  const names = schemes.map(({ name }) => name);
  const twice = names.find((name, i) => names.indexOf(name) < i);
  if (twice !== undefined) args.fail(`--schemes names ${twice} twice: NAME= in front of one of them tells them apart`);
  const baseline = args.text('baseline');
  if (baseline !== undefined && !names.includes(baseline)) args.fail(`--baseline must be one of the schemes, got ${baseline}`);
}

async function sequencesOf(model: Model, prompts: readonly Named[], maxNew: number, texts: readonly Named[], textTokens: number | undefined): Promise<Sequence[]> {
  const ids = await idsOf(model, [...prompts, ...texts], prompts.length);
  return [
    ...prompts.map(({ name }, i) => ({ name, ids: ids[i]!, generate: maxNew })),
    ...texts.map(({ name }, i) => ({ name, ids: ids[prompts.length + i]!.slice(0, textTokens), generate: 0 })),
  ];
}

/** Token ids of texts; the tokenizer is only needed where one is not such a list. The model is to go on after the first `prompts` of them. */
export async function idsOf(model: Model, texts: readonly Named[], prompts: number): Promise<Array<readonly number[]>> {
  const tokenizer = texts.every(({ text }) => isIds(text)) ? undefined : await model.tokenizer();
  return texts.map(({ name, text }, i) => {
    const ids = isIds(text) ? text : tokenizer!.encode(text, i < prompts);
    const beyond = ids.find((id) => id >= model.vocabulary);
    if (beyond === undefined) return ids;
    throw new Failure(`${name}: must have token ids below the model's ${model.vocabulary}, got ${beyond}`);
  });
}

/** Errors of onnxruntime and of the JavaScript engine that are no bugs here. */
export async function running<T>(work: Promise<T>): Promise<T> {
  try {
    return await work;
  } catch (error) {
    if (error instanceof KvPagesError || !(error instanceof Error)) throw error;
    if (outOfMemory(error)) throw new Failure(`out of memory: ${error.message}`);
    if (error instanceof TypeError) throw error;
    throw new Failure(`the model failed: ${error.message}`);
  }
}

/** First tokens that stay dense, and how many at the end where a scheme keeps those. */
export const keptText = ({ kept, recent }: SchemeResult): string => `${kept}${recent === 0 ? '' : `+${recent}`}`;

function report(model: Model, result: StudyResult, layers: boolean): string {
  const { schemes, baseline, sequences } = result;
  const { layers: count, kvHeads, headDim } = model.engine.shape;
  const width = [headDim].flat().map((dim) => (typeof dim === 'number' ? dim : dim.key))[0];
  const positions = sequences.reduce((sum, sequence) => sum + sequence.positions, 0);
  const texts = schemes.some(({ perplexity }) => perplexity !== undefined);
  const percent = (value: number) => `${(100 * value).toFixed(2)} %`;
  const below = ({ klBelowBaseline }: SchemeResult) => (klBelowBaseline === undefined ? '' : `${klBelowBaseline > 0 ? '-' : '+'}${Math.abs(100 * klBelowBaseline).toFixed(1)} %`);
  let text =
    `${model.name}: ${plural(count, 'layer')}, ${plural([kvHeads].flat()[0]!, 'KV head')} of ${width}; engine ${result.engine}\n` +
    sequences
      .map(({ name, kind, tokens, written, perplexity }) =>
        `  ${name}: ${plural(tokens, 'token')}${kind === 'prompt' ? `, ${written} written` : `, perplexity ${perplexity!.toFixed(3)} dense`}\n`)
      .join('') +
    `  ${plural(positions, 'position')} compared\n\n`;
  text += table(
    ['scheme', '>kept', '>bits', '>ratio (study)', '>ratio', '>K RMSE', '>V RMSE', '>top-1', '>KL', `>KL to ${baseline}`, ...(texts ? ['>perplexity'] : [])],
    schemes.map((scheme) => [
      scheme.name,
      keptText(scheme),
      scheme.bits.toFixed(2),
      scheme.ratio.study?.toFixed(2) ?? '',
      scheme.ratio.exact.toFixed(2),
      errorText(scheme.keyRmse),
      errorText(scheme.valueRmse),
      percent(scheme.top1),
      errorText(scheme.kl),
      below(scheme),
      ...(texts ? [scheme.perplexity?.toFixed(3) ?? ''] : []),
    ]),
  );
  if (sequences.length > 1) {
    text += `\nKL of each text\n${table(
      ['scheme', ...sequences.map(({ name }) => `>${name}`)],
      schemes.map((scheme) => [scheme.name, ...scheme.bySequence.map(({ kl }) => errorText(kl))]),
    )}`;
  }
  const lengths = schemes[0]?.byLength ?? [];
  if (lengths.length > 1) {
    text += `\nKL by tokens in the cache\n${table(
      ['scheme', ...lengths.map(({ from, to }) => `>${from}-${Number.isFinite(to) ? to : ''}`)],
      schemes.map((scheme) => [scheme.name, ...scheme.byLength.map(({ kl }) => errorText(kl))]),
    )}`;
  }
  if (layers) {
    for (const [heading, side] of [['K RMSE', 'keyRmse'], ['V RMSE', 'valueRmse']] as const) {
      text += `\n${heading} by layer\n${table(
        ['>layer', ...schemes.map(({ name }) => `>${name}`)],
        schemes[0]!.byLayer.map((_, layer) => [String(layer), ...schemes.map(({ byLayer }) => errorText(byLayer[layer]![side]))]),
      )}`;
    }
  }
  return text;
}
