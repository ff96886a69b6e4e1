// SPDX-License-Identifier: Apache-2.0
// Chooses tokens from logits.
import { KvPagesError } from './errors.js';
import { requireNumber } from './tensor.js';

export interface SamplingOptions {
  /** 0 (the default) takes the most likely token always. */
  readonly temperature?: number;
  /** Only the so many most likely tokens; 0 (the default) for all. */
  readonly topK?: number;
  /** Only the most likely tokens that have this much probability together; 1 (the default) for all. */
  readonly topP?: number;
  /** Of the random numbers: the same seed gives the same tokens. Another one each time by default. */
  readonly seed?: number;
}

/** @internal */
export function atLeast(value: unknown, least: number, argument: string): number {
  const number = requireNumber(value, argument);
  if (Number.isSafeInteger(number) && number >= least) return number;
  throw new KvPagesError('ERR_ARGUMENT', `${argument}: must be an integer, ${least} or more, got ${number}`, { argument, actual: String(number) });
}

/** What chooses a token from logits.
 * @internal */
export function sampler(options: SamplingOptions): (logits: Float32Array) => number {
  const { temperature = 0, topP = 1 } = options;
  const topK = atLeast(options.topK ?? 0, 0, 'topK');
  const inRange = (value: number, argument: string, end: number) => {
    if (requireNumber(value, argument) >= 0 && value <= end) return;
    throw new KvPagesError('ERR_ARGUMENT', `${argument}: must be from 0 to ${end}, got ${value}`, { argument, actual: String(value) });
  };
  inRange(temperature, 'temperature', 100);
  inRange(topP, 'topP', 1);
  const random = options.seed === undefined ? Math.random : seeded(atLeast(options.seed, 0, 'seed'));
  if (temperature === 0) return largest;
  return (logits) => {
    const top = logits[largest(logits)]!;
    const weights = new Float64Array(logits.length);
    for (let i = 0; i < logits.length; ++i) weights[i] = Math.exp((logits[i]! - top) / temperature);
    let tokens = candidates(weights, topK, topP);
    if (topK > 0) tokens = tokens.slice(0, topK);
    const all = topK === 0 ? sumOf(weights) : tokens.reduce((sum, token) => sum + weights[token]!, 0);
    // The first tokens that reach topP together, at least one.
    let kept = 0;
    let sum = 0;
    do sum += weights[tokens[kept++]!]!;
    while (kept < tokens.length && (topP === 1 || sum < topP * all));
    let left = random() * sum;
    for (let i = 0; i < kept; ++i) if ((left -= weights[tokens[i]!]!) < 0) return tokens[i]!;
    return tokens[kept - 1] ?? largest(logits);
  };
}

/** The tokens among which topK and topP choose, most likely first. Sorting a whole vocabulary takes longer than attention does. */
function candidates(weights: Float64Array, topK: number, topP: number): number[] {
  if (topK === 0 && topP === 1) return [...weights.keys()];
  const wanted = topP * sumOf(weights);
  for (let bound = 1 / 16; ; bound = bound > 1e-30 ? bound / 256 : 0) {
    const tokens: number[] = [];
    let sum = 0;
    for (let token = 0; token < weights.length; ++token) {
      if (!(weights[token]! >= bound)) continue;
      tokens.push(token);
      sum += weights[token]!;
    }
    if (bound === 0 || (topK > 0 ? tokens.length >= topK : sum > wanted)) return tokens.sort((a, b) => weights[b]! - weights[a]! || a - b);
  }
}

function sumOf(weights: Float64Array): number {
  let sum = 0;
  for (let i = 0; i < weights.length; ++i) sum += weights[i]!;
  return sum;
}

function largest(logits: Float32Array): number {
  let best = 0;
  for (let i = 1; i < logits.length; ++i) if (logits[i]! > logits[best]!) best = i;
  return best;
}

/** Numbers from 0 to 1: a counter of odd steps whose bits are mixed by multiplications and shifts. */
function seeded(seed: number): () => number {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x9e3779b9) >>> 0;
    let bits = Math.imul(state ^ (state >>> 16), 0x85ebca6b);
    bits = Math.imul(bits ^ (bits >>> 13), 0xc2b2ae35);
    return ((bits ^ (bits >>> 16)) >>> 0) / 2 ** 32;
  };
}
