// SPDX-License-Identifier: Apache-2.0
// The A/B study: a model in full precision writes or reads a text, then reads it once per scheme, with keys and values that the
// scheme's cache gives back; what that does to the distribution of each next token is measured.
//
// A chunk of the text ends where a page ends. Its tokens see each other dense and all pages before it encoded, which is what a
// model sees that reads token by token: page p is encoded for token i iff p ends before the page of i begins (`keepRecent` tokens before
// it, where the scheme has them). Schemes whose pages end at the same places run side by side with a dense f32 cache that gets the same calls; it is what they are held against.
import { KvPagesError } from '../errors.js';
import type { KvPages } from '../kv-pages.js';
import type { ModelCache } from '../model-cache.js';
import type { Engine } from './engine.js';
import { mostLikely, Reference } from './measure.js';
import { codeBits } from './scheme.js';
import type { Scheme } from './scheme.js';

/** A text to read, or a prompt to go on from. */
export interface Sequence {
  readonly name: string;
  readonly ids: readonly number[];
  /** Tokens to write after `ids`, which are then computed at once; 0 to read `ids` alone. */
  readonly generate: number;
}

export interface StudyOptions {
  readonly kv: KvPages;
  readonly engine: Engine;
  readonly schemes: readonly Scheme[];
  readonly sequences: readonly Sequence[];
  /** Name of the scheme that others are held against. */
  readonly baseline?: string;
  /** Tokens that end a text. */
  readonly stop?: readonly number[];
  readonly signal?: AbortSignal;
  readonly onProgress?: (progress: StudyProgress) => void;
}

export interface StudyProgress {
  readonly sequence: number;
  readonly sequences: number;
  readonly step: 'writing' | 'comparing';
  readonly done: number;
  readonly total: number;
  /** Of the whole study, as far as can be told. */
  readonly secondsLeft: number;
}

/** Divergence from the dense model. */
export interface Divergence {
  readonly positions: number;
  /** Share of positions with the same most likely token, 0 to 1. */
  readonly top1: number;
  /** Mean over positions of KL(dense || scheme), nats. */
  readonly kl: number;
  readonly maxKl: number;
}

export interface SequenceResult extends Divergence {
  /** exp of the mean negative log-likelihood of the text's tokens; of texts that are read. */
  readonly perplexity?: number;
}

export interface SchemeResult extends Divergence {
  readonly name: string;
  /** Specs with every part spelt out, one per layer where they differ. */
  readonly key: string | readonly string[];
  readonly value: string | readonly string[];
  /** First tokens that stay dense. */
  readonly kept: number;
  /** How far behind the end a page is encoded. */
  readonly recent: number;
  readonly pageTokens: number;
  /** Bits per element of encoded pages, all counted; 0 where none was. */
  readonly bits: number;
  /** How many times smaller than 16-bit keys and values: by the INT4/INT3 study's formula, and of all bytes at the end of the texts. */
  readonly ratio: { readonly study?: number; readonly exact: number };
  /** Root of the mean squared error of encoded keys and values. */
  readonly keyRmse: number;
  readonly valueRmse: number;
  /** 1 - kl / (kl of the baseline); absent for the baseline. */
  readonly klBelowBaseline?: number;
  readonly perplexity?: number;
  /** By number of tokens in the cache, `from` included, `to` not. */
  readonly byLength: ReadonlyArray<Divergence & { readonly from: number; readonly to: number }>;
  readonly byLayer: ReadonlyArray<{ readonly keyRmse: number; readonly valueRmse: number }>;
  readonly bySequence: readonly SequenceResult[];
  /** Mean KL of each 16 positions, `null` where none was measured. */
  readonly curve: ReadonlyArray<number | null>;
  /** Bytes of the largest cache at its end. */
  readonly cacheBytes: number;
}

export interface StudyResult {
  readonly engine: 'attend' | 'thaw';
  readonly baseline: string;
  readonly sequences: ReadonlyArray<{
    readonly name: string;
    readonly kind: 'prompt' | 'text';
    readonly tokens: number;
    readonly written: number;
    readonly positions: number;
    /** Of the dense model, for texts. */
    readonly perplexity?: number;
  }>;
  readonly perplexity?: number;
  readonly schemes: readonly SchemeResult[];
}

const curveStep = 16;
/** The first position that is measured in a text: before it no scheme has encoded anything. */
const firstPosition = 16;
const lengthEnds = [128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, Infinity];

/** Sums of divergences over positions. */
class Tally {
  positions = 0;
  same = 0;
  kl = 0;
  maxKl = 0;
  nll = 0;
  add({ kl, same, nll }: { kl: number; same: boolean; nll: number }): void {
    ++this.positions;
    this.same += same ? 1 : 0;
    this.kl += kl;
    this.maxKl = Math.max(this.maxKl, kl);
    this.nll += nll;
  }
  get divergence(): Divergence {
    const count = Math.max(1, this.positions);
    return { positions: this.positions, top1: this.same / count, kl: this.kl / count, maxKl: this.maxKl };
  }
  get perplexity(): number {
    return Math.exp(this.nll / Math.max(1, this.positions));
  }
}

/** Sums of one scheme over all sequences. */
class Sums {
  readonly all = new Tally();
  readonly texts = new Tally();
  readonly sequences: SequenceResult[] = [];
  readonly lengths = lengthEnds.map(() => new Tally());
  readonly curve: Tally[] = [];
  readonly layers: Array<Record<'key' | 'value', { squares: number; elements: number }>>;
  encodedBytes = 0;
  encodedElements = 0;
  bytes = 0;
  denseBytes = 0;
  cacheBytes = 0;
  specs: { key: string[]; value: string[]; kept: number; recent: number; pageTokens: number } | undefined;

  constructor(
    readonly scheme: Scheme,
    layers: number,
  ) {
    this.layers = Array.from({ length: layers }, () => ({ key: { squares: 0, elements: 0 }, value: { squares: 0, elements: 0 } }));
  }

  /** What the cache of a sequence says at its end. */
  take(cache: ModelCache): void {
    const stats = cache.stats();
    const { codes, scales, zeros, globals, centers } = stats.bytes;
    this.encodedBytes += codes + scales + zeros + globals + centers;
    this.encodedElements += stats.key.elements + stats.value.elements;
    this.bytes += stats.byteLength;
    this.cacheBytes = Math.max(this.cacheBytes, stats.byteLength);
    cache.layers.forEach((info, layer) => {
      this.denseBytes += 2 * info.kvHeads * (info.key.headDim + info.value.headDim) * cache.tokensOf(layer);
      for (const page of cache.pages(layer)) {
        for (const side of ['key', 'value'] as const) {
          const { rmse } = page[side];
          if (rmse === undefined) continue;
          const elements = page.length * info.kvHeads * info[side].headDim;
          this.layers[layer]![side].squares += rmse * rmse * elements;
          this.layers[layer]![side].elements += elements;
        }
      }
    });
    this.specs ??= {
      key: cache.layers.map(({ key }) => key.spec),
      value: cache.layers.map(({ value }) => value.spec),
      kept: cache.keepFirst,
      recent: cache.keepRecent,
      pageTokens: cache.pageTokens,
    };
  }

  rmse(side: 'key' | 'value', layers = this.layers): number {
    const squares = layers.reduce((sum, layer) => sum + layer[side].squares, 0);
    return Math.sqrt(squares / Math.max(1, layers.reduce((sum, layer) => sum + layer[side].elements, 0)));
  }
}

/**
 * Runs the study.
 * @throws KvPagesError `ERR_SPEC`, `ERR_SHAPE`, ... naming the scheme where a cache cannot be made of it, before anything runs;
 *   `ERR_ARGUMENT` where a sequence is too short for one page, a text before anything runs; `ERR_ABORTED`
 */
export async function runStudy(options: StudyOptions): Promise<StudyResult> {
  const { kv, engine, schemes, sequences, stop = [], signal, onProgress } = options;
  if (sequences.length === 0) throw new KvPagesError('ERR_ARGUMENT', 'sequences: must be one or more, got 0', { argument: 'sequences' });
  const layers = engine.shape.layers;
  const sums = schemes.map((scheme) => new Sums(scheme, layers));
  const groups = groupsOf(engine, sums);
  // Before minutes of computing: what is too short even where the model writes as much as it may.
  for (const { name, ids, generate } of sequences) checkLength(kv, engine, sums, name, ids.length + generate, generate > 0 ? ids.length : 0);
  const clock = new Clock(sequences, groups, (progress) => onProgress?.(progress));
  const denseTexts = new Tally();
  const described: Array<StudyResult['sequences'][number]> = [];

  for (const [index, sequence] of sequences.entries()) {
    clock.begin(index);
    const ids = sequence.generate > 0 ? await writeOn(engine, sequence, stop, () => clock.tick('writing', 1), signal) : [...sequence.ids];
    const start = sequence.generate > 0 ? sequence.ids.length : 0;
    checkLength(kv, engine, sums, sequence.name, ids.length, start);
    clock.compare(ids.length - start);
    const dense = new Tally();
    for (const [groupIndex, group] of groups.entries()) {
      const own = group.sums.map(() => new Tally());
      await compare(engine, group, own, groupIndex === 0 ? dense : undefined, ids, start, clock, signal);
      own.forEach((tally, i) => {
        const read = sequence.generate === 0;
        group.sums[i]!.sequences.push({ ...tally.divergence, ...(read ? { perplexity: tally.perplexity } : {}) });
        if (read) group.sums[i]!.texts.nll += tally.nll;
        if (read) group.sums[i]!.texts.positions += tally.positions;
      });
    }
    const read = sequence.generate === 0;
    if (read) {
      denseTexts.nll += dense.nll;
      denseTexts.positions += dense.positions;
    }
    described.push({
      name: sequence.name,
      kind: read ? 'text' : 'prompt',
      tokens: ids.length,
      written: ids.length - (read ? ids.length : sequence.ids.length),
      positions: dense.positions,
      ...(read ? { perplexity: dense.perplexity } : {}),
    });
  }
  clock.end();

  const baseline = sums.find(({ scheme }) => scheme.name === (options.baseline ?? 'nvfp4')) ?? sums[0]!;
  return {
    engine: engine.kind,
    baseline: baseline.scheme.name,
    sequences: described,
    ...(denseTexts.positions > 0 ? { perplexity: denseTexts.perplexity } : {}),
    schemes: sums.map((one) => resultOf(kv, one, baseline)),
  };
}

function resultOf(kv: KvPages, one: Sums, baseline: Sums): SchemeResult {
  const { key, value, kept, recent, pageTokens } = one.specs!;
  const same = (specs: readonly string[]) => (specs.every((spec) => spec === specs[0]) ? specs[0]! : specs);
  const bits = codeBits(kv, [...key, ...value]);
  const divergence = one.all.divergence;
  return {
    name: one.scheme.name,
    key: same(key),
    value: same(value),
    kept,
    recent,
    pageTokens,
    bits: (8 * one.encodedBytes) / Math.max(1, one.encodedElements),
    ratio: { ...(bits === undefined ? {} : { study: kv.memoryRatio(bits) }), exact: one.denseBytes / one.bytes },
    keyRmse: one.rmse('key'),
    valueRmse: one.rmse('value'),
    ...divergence,
    ...(one === baseline || baseline.all.kl === 0 ? {} : { klBelowBaseline: 1 - divergence.kl / baseline.all.divergence.kl }),
    ...(one.texts.positions > 0 ? { perplexity: one.texts.perplexity } : {}),
    byLength: one.lengths.flatMap((tally, i) =>
      tally.positions === 0 ? [] : [{ from: i === 0 ? 0 : lengthEnds[i - 1]!, to: lengthEnds[i]!, ...tally.divergence }],
    ),
    byLayer: one.layers.map((layer) => ({ keyRmse: one.rmse('key', [layer]), valueRmse: one.rmse('value', [layer]) })),
    bySequence: one.sequences,
    curve: Array.from(one.curve, (tally) => (tally === undefined || tally.positions === 0 ? null : tally.divergence.kl)),
    cacheBytes: one.cacheBytes,
  };
}

/** Schemes whose pages end, and are encoded, at the same places. */
interface Group {
  readonly keepFirst: number;
  readonly pageTokens: number;
  /** Tokens of a later page until one is encoded, 0 where it waits for whole pages. */
  readonly late: number;
  readonly sums: Sums[];
}

function groupsOf(engine: Engine, sums: readonly Sums[]): Group[] {
  const groups: Group[] = [];
  for (const one of sums) {
    const cache = create(engine, one.scheme);
    const { keepFirst, pageTokens, keepRecent } = cache;
    const late = keepRecent % pageTokens;
    cache.dispose();
    const group = groups.find((other) => other.keepFirst === keepFirst && other.pageTokens === pageTokens && other.late === late);
    if (group) group.sums.push(one);
    else groups.push({ keepFirst, pageTokens, late, sums: [one] });
  }
  return groups;
}

/** A cache of a scheme; its name goes into what is thrown. */
function create(engine: Engine, scheme: Scheme): ModelCache {
  try {
    return engine.createCache(scheme.cache);
  } catch (error) {
    if (!(error instanceof KvPagesError)) throw error;
    const { name: _, message, stack: __, code, cause: ___, ...fields } = error;
    throw new KvPagesError(code, `scheme ${scheme.name}: ${message}`, fields, { cause: error });
  }
}

function checkLength(kv: KvPages, engine: Engine, sums: readonly Sums[], name: string, tokens: number, start: number): void {
  if (tokens - start < 2) {
    const found = start > 0 ? `the model wrote ${tokens - start}` : `got ${tokens}`;
    throw new KvPagesError('ERR_ARGUMENT', `${name}: must have two tokens or more to compare, ${found}`, { argument: name, actual: String(tokens - start) });
  }
  for (const { scheme } of sums) {
    // The last token sees the pages before it: one must be encoded by then.
    const { pages } = kv.estimateBytes({ ...scheme.cache, ...engine.shape, tokens: Math.max(0, tokens - 1) });
    if (pages.frozen > 0) continue;
    throw new KvPagesError('ERR_ARGUMENT', `${name}: must be long enough that a page of scheme ${scheme.name} is encoded before its end, got ${tokens} tokens`, {
      argument: name,
      actual: `${tokens} tokens`,
    });
  }
}

const denseCache = { preset: 'f32', hot: 'f32', keepFirst: 0 } as const;

/**
 * A prompt and the model's own continuation in full precision, token by token; without the token that ended it.
 * @param sequence `generate` says how many tokens at most
 */
export async function writeOn(engine: Engine, sequence: Sequence, stop: readonly number[] = [], onToken?: () => void, signal?: AbortSignal): Promise<number[]> {
  const ids = [...sequence.ids];
  const cache = engine.createCache(denseCache);
  try {
    let logits = await engine.forward(cache, ids, 'last', signal);
    for (let made = 0; made < sequence.generate; ++made) {
      const token = mostLikely(logits);
      if (stop.includes(token)) break;
      ids.push(token);
      onToken?.();
      if (made + 1 < sequence.generate) logits = await engine.forward(cache, [token], 'last', signal);
    }
    return ids;
  } finally {
    cache.dispose();
  }
}

/** One pass of a group over a sequence. */
async function compare(
  engine: Engine,
  group: Group,
  own: readonly Tally[],
  dense: Tally | undefined,
  ids: readonly number[],
  start: number,
  clock: Clock,
  signal: AbortSignal | undefined,
): Promise<void> {
  const caches: ModelCache[] = [];
  const { pageTokens } = group;
  try {
    caches.push(engine.createCache({ ...denseCache, pageTokens }));
    for (const { scheme } of group.sums) caches.push(create(engine, scheme));
    // Every last token predicts one beyond the text, so it is not computed.
    const end = ids.length - 1;
    for (let at = 0; at < end; ) {
      const next = at < start ? start : Math.min(end, nextEnd(at, group));
      const prompt = at < start;
      const chunk = ids.slice(at, next);
      const wanted = prompt ? ('none' as const) : ('all' as const);
      let reference: Reference | undefined;
      for (const [i, cache] of caches.entries()) {
        const logits = await engine.forward(cache, chunk, wanted, signal);
        if (!prompt) {
          const vocabulary = logits.length / chunk.length;
          reference ??= new Reference(logits, vocabulary);
          for (let row = 0; row < chunk.length; ++row) {
            const position = at + row;
            if (position < firstPosition) continue;
            if (i === 0 && dense === undefined) continue;
            const figures = reference.compare(row, logits.subarray(row * vocabulary, (row + 1) * vocabulary), ids[position + 1]!);
            if (i === 0) dense!.add(figures);
            else record(group.sums[i - 1]!, own[i - 1]!, position, figures);
          }
        }
        clock.tick('comparing', prompt ? 0 : chunk.length);
      }
      at = next;
    }
    group.sums.forEach((one, i) => {
      const cache = caches[i + 1]!;
      cache.freeze();
      one.take(cache);
    });
  } finally {
    for (const cache of caches) cache.dispose();
  }
}

function record(one: Sums, own: Tally, position: number, figures: { kl: number; same: boolean; nll: number }): void {
  own.add(figures);
  one.all.add(figures);
  one.lengths[lengthEnds.findIndex((end) => position < end)]!.add(figures);
  (one.curve[Math.floor(position / curveStep)] ??= new Tally()).add(figures);
}

/** Where the page of position `at` ends, or before that one is encoded. */
function nextEnd(at: number, { keepFirst, pageTokens, late }: Group): number {
  if (at < keepFirst) return keepFirst;
  const inPage = (at - keepFirst) % pageTokens;
  return at - inPage + (inPage < late ? late : pageTokens);
}

/** Progress, and the time that is left from what the steps took so far. */
class Clock {
  #index = 0;
  #done = 0;
  #total = 0;
  #last = performance.now();
  readonly #seconds = { writing: 0, comparing: 0 };
  readonly #units = { writing: 0, comparing: 0 };
  readonly #runs: number;

  constructor(
    private readonly sequences: readonly Sequence[],
    groups: readonly Group[],
    private readonly report: (progress: StudyProgress) => void,
  ) {
    this.#runs = groups.reduce((sum, group) => sum + group.sums.length + 1, 0);
  }
  begin(index: number): void {
    this.#index = index;
    this.#last = performance.now();
    this.#done = 0;
    this.#total = this.sequences[index]!.generate;
  }
  compare(tokens: number): void {
    this.#done = 0;
    this.#total = tokens * this.#runs;
    this.#last = performance.now();
  }
  tick(step: 'writing' | 'comparing', units: number): void {
    const now = performance.now();
    this.#seconds[step] += (now - this.#last) / 1000;
    this.#units[step] += units;
    this.#last = now;
    this.#done = Math.min(this.#total, this.#done + units);
    this.report({ sequence: this.#index + 1, sequences: this.sequences.length, step, done: this.#done, total: this.#total, secondsLeft: this.#left(step) });
  }
  end(): void {
    const count = this.sequences.length;
    this.report({ sequence: count, sequences: count, step: 'comparing', done: this.#total, total: this.#total, secondsLeft: 0 });
  }
  #left(step: 'writing' | 'comparing'): number {
    const rest = this.sequences.slice(this.#index + 1);
    const left = {
      writing: rest.reduce((sum, { generate }) => sum + generate, step === 'writing' ? this.#total - this.#done : 0),
      comparing:
        rest.reduce((sum, { ids, generate }) => sum + (generate || ids.length) * this.#runs, 0) +
        (step === 'comparing' ? this.#total - this.#done : this.sequences[this.#index]!.generate * this.#runs),
    };
    const rate = (name: 'writing' | 'comparing') => (this.#units[name] > 0 ? this.#seconds[name] / this.#units[name] : undefined);
    // Until one has been measured: a token among 16 costs about half of one alone.
    const comparing = rate('comparing') ?? (rate('writing') ?? 0) / 2;
    return left.writing * (rate('writing') ?? comparing * 2) + left.comparing * comparing;
  }
}
