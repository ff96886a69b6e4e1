// SPDX-License-Identifier: Apache-2.0
// Models of onnxruntime with a past: which of their inputs and outputs hold keys and values, and the way of both between them and
// a ModelCache. Public as `kvpages/ort`.
import { KvPagesError } from './errors.js';
import type { HeadDim, ModelCache } from './model-cache.js';
import { denseType, requireObject, requireOptions, requireString, wrongType } from './tensor.js';
import type { TensorLike } from './tensor.js';

/** As much of a tensor of onnxruntime or transformers.js as is used. */
export interface OrtTensor {
  readonly type: string;
  readonly dims: readonly number[];
  readonly data: unknown;
  readonly location?: string;
}

/** What a session says about an input or output. */
export interface OrtMetadata {
  readonly name: string;
  readonly isTensor: boolean;
  readonly type?: string;
  /** Numbers, and names of what is only known at run time. */
  readonly shape?: ReadonlyArray<number | string>;
}

/** As much of an `InferenceSession` as is used. */
export interface OrtSession {
  readonly inputNames: readonly string[];
  readonly outputNames: readonly string[];
  readonly inputMetadata?: readonly OrtMetadata[];
  readonly outputMetadata?: readonly OrtMetadata[];
  // The types of onnxruntime's packages differ in what they take; each takes its own tensors.
  // eslint-disable-next-line @typescript-eslint/no-explicit-any
  run(feeds: any, ...more: any[]): Promise<any>;
  release(): Promise<void>;
}

/** A module of onnxruntime: `onnxruntime-node`, `onnxruntime-web` or another one with the same API. */
export interface Ort {
  readonly InferenceSession: {
    // eslint-disable-next-line @typescript-eslint/no-explicit-any
    create(model: any, options?: any): Promise<OrtSession>;
  };
  // eslint-disable-next-line @typescript-eslint/no-explicit-any
  readonly Tensor: new (type: any, data: any, dims: any) => OrtTensor;
}

/** How a model names its past and present. `{layer}` stands for a number, `{side}` for the words of `key` and `value`. */
export interface PastNames {
  /** Names of inputs, `past_key_values.{layer}.{side}` for example. */
  readonly past: string;
  /** Names of outputs, `present.{layer}.{side}` for example. */
  readonly present: string;
  /** What stands for `{side}`: `key` and `value` by default. */
  readonly key?: string;
  readonly value?: string;
}

export interface OrtPastOptions {
  /** Where the model does not use one of the usual names. */
  readonly names?: PastNames;
  /** What outputs hold: `all` tokens, past and new (the default), or the `new` ones alone. */
  readonly presentHolds?: 'all' | 'new';
  /** KV heads and head_dim, where the model's file does not say them. */
  readonly kvHeads?: number | readonly number[];
  readonly headDim?: HeadDim | readonly HeadDim[];
}

/** Names that exporters use; the first that fits is taken. */
const usualNames: readonly PastNames[] = [
  { past: 'past_key_values.{layer}.{side}', present: 'present.{layer}.{side}' },
  { past: 'past_key_values.{layer}.{side}', present: 'present_key_values.{layer}.{side}' },
  { past: 'past_key_values.{layer}.decoder.{side}', present: 'present.{layer}.decoder.{side}' },
  { past: 'past.{layer}.{side}', present: 'present.{layer}.{side}' },
  { past: 'past_{side}_{layer}', present: 'present_{side}_{layer}' },
  { past: 'past_{side}s_{layer}', present: 'present_{side}s_{layer}' },
  { past: 'past_{layer}_{side}', present: 'present_{layer}_{side}' },
  { past: 'past_{side}_self_{layer}', present: 'present_{side}_self_{layer}' },
];

const sides = ['key', 'value'] as const;

interface Side {
  readonly past: string;
  readonly present: string;
  readonly type: 'f32' | 'f16';
  readonly kvHeads: number;
  readonly headDim: number;
}
interface Layer {
  /** The number in the names, which may leave some out. */
  readonly number: number;
  readonly key: Side;
  readonly value: Side;
}

/**
 * Past and present of one session.
 *
 * ```js
 * const past = new OrtPast(ort, session);
 * const cache = kv.createCache({ ...past.shape, preset: 'kv4' });
 * const outputs = await session.run({ input_ids, attention_mask, position_ids, ...past.feeds(cache) });
 * past.append(cache, outputs);
 * ```
 */
export class OrtPast {
  readonly #ort: Pick<Ort, 'Tensor'>;
  readonly #layers: readonly Layer[];
  readonly #holds: 'all' | 'new';

  /**
   * @throws KvPagesError `ERR_UNSUPPORTED` where the model has no past, or one of a type that is not f32 or f16; `ERR_MISMATCH`
   *   where inputs and outputs do not belong together
   */
  constructor(ort: Pick<Ort, 'Tensor'>, session: OrtSession, options: OrtPastOptions = {}) {
    if (typeof ort?.Tensor !== 'function') throw wrongType('ort', 'must be a module of onnxruntime', ort);
    requireObject(session, 'session');
    requireOptions(options, 'options', ['names', 'presentHolds', 'kvHeads', 'headDim']);
    const { presentHolds = 'all' } = options;
    if (presentHolds !== 'all' && presentHolds !== 'new') throw wrongType('presentHolds', "must be 'all' or 'new'", presentHolds);
    this.#ort = ort;
    this.#holds = presentHolds;
    this.#layers = findLayers(session, options);
  }

  /** What `kv.createCache` needs to know of the model. */
  get shape(): { readonly layers: number; readonly kvHeads: number[]; readonly headDim: Array<{ readonly key: number; readonly value: number }> } {
    return {
      layers: this.#layers.length,
      kvHeads: this.#layers.map(({ key }) => key.kvHeads),
      headDim: this.#layers.map(({ key, value }) => ({ key: key.headDim, value: value.headDim })),
    };
  }
  /** Names of the inputs that `feeds` fills, key before value, by layer. */
  get inputs(): readonly string[] {
    return this.#layers.flatMap(({ key, value }) => [key.past, value.past]);
  }
  /** Names of the outputs that `append` reads, for the second argument of `session.run`. */
  get fetches(): readonly string[] {
    return this.#layers.flatMap(({ key, value }) => [key.present, value.present]);
  }

  /**
   * The cache thawed into tensors of the model's inputs, in the type that each has. Their memory is the caller's: a run that is
   * over needs them no more.
   * @param cache a ModelCache of the model's layers, or undefined for an empty past
   */
  feeds(cache?: ModelCache): Record<string, OrtTensor> {
    if (cache !== undefined) this.#check(cache);
    const feeds: Record<string, OrtTensor> = {};
    this.#layers.forEach(({ key, value }, index) => {
      const tokens = cache?.tokensOf(index) ?? 0;
      const room = ({ type, kvHeads, headDim }: Side) => new (type === 'f32' ? Float32Array : Uint16Array)(kvHeads * tokens * headDim);
      const out = { key: room(key), value: room(value) };
      if (cache !== undefined && tokens > 0) {
        if (key.type === value.type) cache.read(index, { type: key.type, out });
        else for (const side of sides) out[side].set(cache.read(index, { type: side === 'key' ? key.type : value.type })[side].data as Float32Array);
      }
      for (const side of sides) {
        const { past, type, kvHeads, headDim } = side === 'key' ? key : value;
        feeds[past] = new this.#ort.Tensor(type === 'f32' ? 'float32' : 'float16', out[side], [1, kvHeads, tokens, headDim]);
      }
    });
    return feeds;
  }

  /**
   * Appends what is new in the outputs of a run to the cache, and encodes the pages that are full. All layers or none.
   * @returns how many tokens that were
   * @throws KvPagesError `ERR_SHAPE`, `ERR_UNSUPPORTED` (not on the CPU), `ERR_MISMATCH`, `ERR_NON_FINITE` with `layer` and `side`
   */
  append(cache: ModelCache, outputs: Readonly<Record<string, OrtTensor>>): number {
    this.#check(cache);
    requireObject(outputs, 'outputs');
    const before = cache.tokens;
    const parts = this.#layers.map((layer, index) => {
      const part = (side: 'key' | 'value') => {
        const { present, kvHeads, headDim } = layer[side];
        return newTokens(outputs[present], `outputs['${present}']`, { layer: index, side }, kvHeads, headDim, this.#holds === 'all' ? cache.tokensOf(index) : 0);
      };
      return { key: part('key'), value: part('value') };
    });
    appendLayers(cache, parts, before);
    return parts[0]!.key.dims[1]!;
  }

  #check(cache: ModelCache): void {
    const { layers } = cache;
    const model = this.#layers;
    if (layers.length !== model.length) {
      throw new KvPagesError('ERR_MISMATCH', `cache: must have the model's ${model.length} layers, got ${layers.length}`, {
        argument: 'cache',
        expected: `${model.length} layers`,
        actual: `${layers.length} layers`,
      });
    }
    layers.forEach((layer, index) => {
      for (const side of sides) {
        const want = model[index]![side];
        if (layer.kvHeads === want.kvHeads && layer[side].headDim === want.headDim) continue;
        const expected = `${want.kvHeads} heads of ${want.headDim}`;
        const actual = `${layer.kvHeads} heads of ${layer[side].headDim}`;
        throw new KvPagesError('ERR_MISMATCH', `cache: layer ${index} must have the model's ${expected} for the ${side}, got ${actual}`, {
          argument: 'cache',
          layer: index,
          side,
          expected,
          actual,
        });
      }
    });
  }
}

/** New tokens of one side of one layer, `[kv_heads, tokens, head_dim]`, contiguous. */
export interface NewTokens extends TensorLike {
  readonly type: string;
  readonly dims: readonly [kvHeads: number, tokens: number, headDim: number];
}

/** Cuts the tokens behind `past` out of a present tensor; not copied where the past is empty.
 * @internal */
export function newTokens(
  tensor: OrtTensor | undefined,
  argument: string,
  where: { readonly layer?: number; readonly side?: 'key' | 'value' },
  kvHeads: number,
  headDim: number,
  past: number,
): NewTokens {
  if (tensor === undefined) throw new KvPagesError('ERR_MISMATCH', `${argument}: must be among the outputs, got none of that name`, { argument, ...where });
  requireObject(tensor, argument);
  const { dims, type, location } = tensor;
  if (location !== undefined && location !== 'cpu' && location !== 'cpu-pinned') {
    throw new KvPagesError('ERR_UNSUPPORTED', `${argument}: must hold its data on the CPU, got one on ${location}`, {
      argument,
      ...where,
      expected: 'cpu',
      actual: location,
    });
  }
  const [batch = 0, heads = 0, total = 0, width = 0] = dims;
  if (dims.length !== 4 || batch !== 1 || heads !== kvHeads || width !== headDim) {
    throw new KvPagesError('ERR_SHAPE', `${argument}: must be [1, ${kvHeads}, tokens, ${headDim}], got [${dims.join(', ')}]`, {
      argument,
      ...where,
      expected: `[1, ${kvHeads}, tokens, ${headDim}]`,
      actual: `[${dims.join(', ')}]`,
    });
  }
  if (total < past) {
    throw new KvPagesError('ERR_MISMATCH', `${argument}: must hold the ${past} tokens of the cache and the new ones, got ${total}`, {
      argument,
      ...where,
      expected: `${past} tokens or more`,
      actual: `${total} tokens`,
    });
  }
  const data = tensor.data as Float32Array;
  if (past === 0) return { type, dims: [kvHeads, total, headDim], data };
  const tokens = total - past;
  const rows = new (data.constructor as Float32ArrayConstructor)(kvHeads * tokens * headDim);
  for (let head = 0; head < kvHeads; ++head) {
    rows.set(data.subarray((head * total + past) * headDim, (head + 1) * total * headDim), head * tokens * headDim);
  }
  return { type, dims: [kvHeads, tokens, headDim], data: rows };
}

/** Appends to all layers or to none, then encodes the pages that are full: the run that made these tokens has attended them.
 * @internal */
export function appendLayers(cache: ModelCache, parts: ReadonlyArray<{ readonly key: NewTokens; readonly value: NewTokens }>, before: number): void {
  try {
    parts.forEach(({ key, value }, layer) => cache.append(layer, key, value));
  } catch (error) {
    cache.truncate(before);
    throw error;
  }
  cache.freeze();
}

function findLayers(session: OrtSession, options: OrtPastOptions): Layer[] {
  const { names } = options;
  if (names !== undefined) {
    requireOptions(names, 'names', ['past', 'present', 'key', 'value']);
    for (const name of ['past', 'present'] as const) {
      if (!/\{layer\}/.test(requireString(names[name], `names.${name}`)) || !/\{side\}/.test(names[name])) {
        throw new KvPagesError('ERR_ARGUMENT', `names.${name}: must hold {layer} and {side}, got '${names[name]}'`, { argument: `names.${name}` });
      }
    }
  }
  const tried = names === undefined ? usualNames : [names];
  for (const candidate of tried) {
    const numbers = layerNumbers(session.inputNames, candidate);
    if (numbers.length === 0) continue;
    if (names === undefined && !session.outputNames.includes(fill(candidate.present, candidate, numbers[0]!, 'key'))) continue;
    return numbers.map((number, index) => ({
      number,
      key: sideOf(session, candidate, options, number, index, 'key'),
      value: sideOf(session, candidate, options, number, index, 'value'),
    }));
  }
  const expected = names === undefined ? 'past_key_values.{layer}.{side}' : names.past;
  const actual = session.inputNames.join(', ');
  throw new KvPagesError(
    'ERR_UNSUPPORTED',
    `session: must have inputs for past keys and values, named ${expected}, got ${actual}; a model exported without a cache cannot be ` +
      'used, other names are given as names: { past, present }',
    { argument: 'session', expected, actual },
  );
}

function fill(pattern: string, names: PastNames, layer: number | string, side: 'key' | 'value'): string {
  return pattern.replaceAll('{layer}', String(layer)).replaceAll('{side}', names[side] ?? side);
}

/** Numbers of the layers whose key has an input, ascending. */
function layerNumbers(inputs: readonly string[], names: PastNames): number[] {
  const escaped = fill(names.past, names, '\0', 'key').replace(/[.*+?^${}()|[\]\\]/g, '\\$&');
  const pattern = new RegExp(`^${escaped.replace('\0', '(\\d{1,6})').replaceAll('\0', '\\1')}$`);
  return inputs.flatMap((name) => pattern.exec(name)?.[1] ?? []).map(Number).sort((a, b) => a - b);
}

function sideOf(session: OrtSession, names: PastNames, options: OrtPastOptions, number: number, layer: number, side: 'key' | 'value'): Side {
  const past = fill(names.past, names, number, side);
  const present = fill(names.present, names, number, side);
  for (const [name, list, kind] of [[past, session.inputNames, 'input'], [present, session.outputNames, 'output']] as const) {
    if (list.includes(name)) continue;
    throw new KvPagesError('ERR_MISMATCH', `session: must have the ${kind} ${name}, got ${list.join(', ')}`, {
      argument: 'session',
      layer,
      side,
      expected: name,
    });
  }
  const metadata = session.inputMetadata?.find(({ name }) => name === past);
  const type = denseType(metadata?.type ?? 'float32');
  if (type !== 'f32' && type !== 'f16') {
    throw new KvPagesError('ERR_UNSUPPORTED', `session: must have ${past} in float32 or float16, got ${metadata?.type}`, {
      argument: 'session',
      layer,
      side,
      expected: 'float32 float16',
      actual: String(metadata?.type),
    });
  }
  const shape = metadata?.shape ?? [];
  if (shape.length !== 0 && shape.length !== 4) {
    throw new KvPagesError('ERR_UNSUPPORTED', `session: must have ${past} as [batch, kv_heads, tokens, head_dim], got [${shape.join(', ')}]`, {
      argument: 'session',
      layer,
      side,
      expected: '[batch, kv_heads, tokens, head_dim]',
      actual: `[${shape.join(', ')}]`,
    });
  }
  const given = (list: unknown): unknown => (Array.isArray(list) ? list[layer] : list);
  const headDim = given(options.headDim);
  const size = (name: string, wanted: unknown, found: number | string | undefined): number => {
    const value = wanted ?? found;
    if (typeof value === 'number' && Number.isSafeInteger(value) && value > 0) return value;
    throw new KvPagesError('ERR_ARGUMENT', `${name}: must be given, the model's file does not say it (${past} is [${shape.join(', ')}])`, {
      argument: name,
      layer,
      side,
    });
  };
  return {
    past,
    present,
    type,
    kvHeads: size('kvHeads', given(options.kvHeads), shape[1]),
    headDim: size('headDim', typeof headDim === 'object' ? (headDim as { key: number; value: number })[side] : headDim, shape[3]),
  };
}

/**
 * The onnxruntime that is installed: `onnxruntime-node` in Node, else `onnxruntime-web`. Nothing else of this package loads it.
 * @throws KvPagesError `ERR_BACKEND` with the command that installs it
 */
export async function importOrt(name: string = isNode() ? 'onnxruntime-node' : 'onnxruntime-web'): Promise<Ort> {
  let module: { readonly default?: Ort } & Partial<Ort>;
  try {
    module = (await import(/* @vite-ignore */ /* webpackIgnore: true */ name)) as typeof module;
  } catch (cause) {
    throw new KvPagesError('ERR_BACKEND', `${name} does not load here; install it with: npm install ${name} (or give the module itself, as ort)`, { argument: 'ort', expected: name }, { cause });
  }
  return module.InferenceSession === undefined ? module.default! : (module as Ort);
}

function isNode(): boolean {
  return typeof process === 'object' && process.versions?.node !== undefined;
}

