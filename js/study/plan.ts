// SPDX-License-Identifier: Apache-2.0
// Bits by layer and side under one budget: what each costs the model is measured with all else dense, then the budget goes where a
// bit saves most. Divergences of independent errors add up, nearly; a study of the plan says how nearly.
import { KvPagesError } from '../errors.js';
import type { KvPages } from '../kv-pages.js';
import type { HeadDim } from '../model-cache.js';
import type { Engine } from './engine.js';
import type { Plan, Scheme } from './scheme.js';
import { runStudy } from './study.js';
import type { Sequence, StudyResult } from './study.js';

type Side = 'key' | 'value';
const sides = ['key', 'value'] as const;

/** What one spec in one place takes and does. */
export interface SpecCost {
  readonly layer: number;
  readonly side: Side;
  readonly spec: string;
  /** Bits per element. */
  readonly bits: number;
  /** Mean KL where all else is bf16, less that of bf16 alone. */
  readonly kl: number;
}

export interface PlanOptions {
  readonly kv: KvPages;
  readonly engine: Engine;
  /** Texts to measure on; none may ask for tokens to be written (`writeOn` writes them). */
  readonly sequences: readonly Sequence[];
  /** Mean bits per element of encoded pages that the plan may have. */
  readonly bits: number;
  /** Specs to choose from. */
  readonly specs: Readonly<Record<Side, readonly string[]>>;
  readonly keepFirst?: number;
  /** Further schemes that the plan is held against. */
  readonly against?: readonly Scheme[];
  readonly name?: string;
  readonly signal?: AbortSignal;
  readonly onProgress?: (progress: PlanProgress) => void;
}

export interface PlanProgress {
  readonly done: number;
  readonly total: number;
  readonly secondsLeft: number;
}

export interface PlanResult {
  readonly plan: Plan;
  /** Mean bits per element of the plan. */
  readonly bits: number;
  /** Sum of the KL that its specs have by themselves. */
  readonly expectedKl: number;
  readonly costs: readonly SpecCost[];
  /** The plan and the schemes that it is held against, on the same texts. */
  readonly study: StudyResult;
}

/** @throws KvPagesError `ERR_ARGUMENT` where the budget is below the smallest specs, and what `runStudy` throws */
export async function makePlan(options: PlanOptions): Promise<PlanResult> {
  const { kv, engine, sequences, specs, keepFirst = 4, against = [], signal, onProgress } = options;
  const { layers } = engine.shape;
  const sizes = bitsOf(kv, engine, specs);
  // Before hours of measuring.
  const least = meanBits(engine, smallest(layers, specs, sizes));
  if (!(options.bits >= least)) {
    throw new KvPagesError('ERR_ARGUMENT', `bits: must be ${least.toFixed(2)} or more, which the smallest specs take, got ${options.bits}`, { argument: 'bits', actual: String(options.bits) });
  }
  const dense = (spec: string, layer: number, own: number) => (layer === own ? spec : 'bf16');
  const began = performance.now();
  const total = layers + 1;
  const costs: SpecCost[] = [];
  for (let layer = 0; layer < layers; ++layer) {
    const tried = sides.flatMap((side) => specs[side].map((spec) => ({ side, spec })));
    const schemes: Scheme[] = tried.map(({ side, spec }) => ({
      name: `${side} ${spec}`,
      cache: {
        key: Array.from({ length: layers }, (_, i) => dense(side === 'key' ? spec : 'bf16', i, layer)),
        value: Array.from({ length: layers }, (_, i) => dense(side === 'value' ? spec : 'bf16', i, layer)),
        keepFirst,
      },
    }));
    const floor: Scheme = { name: 'bf16 alone', cache: { preset: 'bf16', keepFirst } };
    const { schemes: results } = await runStudy({ kv, engine, sequences, schemes: [floor, ...schemes], ...(signal && { signal }) });
    tried.forEach(({ side, spec }, i) =>
      costs.push({ layer, side, spec, bits: sizes.get(`${side} ${spec}`)![layer]!, kl: Math.max(0, results[i + 1]!.kl - results[0]!.kl) }),
    );
    const seconds = (performance.now() - began) / 1000;
    onProgress?.({ done: layer + 1, total, secondsLeft: (seconds / (layer + 1)) * (total - layer - 1) });
  }
  const chosen = choose(engine, costs, options.bits);
  const plan: Plan = {
    format: 'kvpages.plan.v1',
    name: options.name ?? `plan-${options.bits}`,
    cache: {
      key: chosen.filter(({ side }) => side === 'key').map(({ spec }) => spec),
      value: chosen.filter(({ side }) => side === 'value').map(({ spec }) => spec),
      keepFirst,
    },
  };
  const study = await runStudy({ kv, engine, sequences, schemes: [{ name: plan.name!, cache: plan.cache }, ...against], ...(signal && { signal }) });
  onProgress?.({ done: total, total, secondsLeft: 0 });
  return { plan, bits: meanBits(engine, chosen), expectedKl: chosen.reduce((sum, { kl }) => sum + kl, 0), costs, study };
}

/** Bits per element of every spec in every layer, of caches long enough that what stands once does not count. */
function bitsOf(kv: KvPages, engine: Engine, specs: PlanOptions['specs']): Map<string, number[]> {
  const tokens = 1 << 16;
  const { layers } = engine.shape;
  const sizes = new Map<string, number[]>();
  for (const side of sides) {
    for (const spec of specs[side]) {
      const perLayer = Array.from({ length: layers }, (_, layer) => {
        const { kvHeads, headDim } = shapeAt(engine, layer);
        return kv.estimateBytes({ layers: 1, kvHeads, headDim, preset: 'bf16', [side]: spec, tokens }).bits[side];
      });
      sizes.set(`${side} ${spec}`, perLayer);
    }
  }
  return sizes;
}

function shapeAt(engine: Engine, layer: number): { kvHeads: number; headDim: { key: number; value: number } } {
  const { kvHeads, headDim } = engine.shape;
  const heads = typeof kvHeads === 'number' ? kvHeads : kvHeads[layer]!;
  const dim = (Array.isArray(headDim) ? (headDim as readonly HeadDim[])[layer] : headDim) as HeadDim;
  return { kvHeads: heads, headDim: typeof dim === 'number' ? { key: dim, value: dim } : dim };
}

/** Share of a place among all elements. */
function weight(engine: Engine, { layer, side }: Pick<SpecCost, 'layer' | 'side'>): number {
  const elements = (at: number, of: Side) => {
    const { kvHeads, headDim } = shapeAt(engine, at);
    return kvHeads * headDim[of];
  };
  let all = 0;
  for (let at = 0; at < engine.shape.layers; ++at) for (const of of sides) all += elements(at, of);
  return elements(layer, side) / all;
}

type Sized = Pick<SpecCost, 'layer' | 'side' | 'bits'>;

function meanBits(engine: Engine, chosen: readonly Sized[]): number {
  return chosen.reduce((sum, cost) => sum + cost.bits * weight(engine, cost), 0);
}

function smallest(layers: number, specs: PlanOptions['specs'], sizes: ReadonlyMap<string, number[]>): Sized[] {
  return Array.from({ length: layers }, (_, layer) =>
    sides.map((side) => ({ layer, side, bits: Math.min(...specs[side].map((spec) => sizes.get(`${side} ${spec}`)![layer]!)) })),
  ).flat();
}

/**
 * One spec for each place, in order. Places begin with their smallest spec; the step that saves most KL for its bits is taken
 * while the budget has room for one. Only specs on the lower hull of (bits, KL) can be such a step.
 */
function choose(engine: Engine, costs: readonly SpecCost[], budget: number): SpecCost[] {
  const places = new Map<string, SpecCost[]>();
  for (const cost of costs) {
    const name = `${cost.layer} ${cost.side}`;
    places.set(name, [...(places.get(name) ?? []), cost]);
  }
  const hulls = [...places.values()].map((list) => hull(list));
  const at = hulls.map(() => 0);
  const chosen = () => hulls.map((list, i) => list[at[i]!]!);
  for (let left = budget - meanBits(engine, chosen()); ; ) {
    let best = -1;
    let gain = 0;
    hulls.forEach((list, i) => {
      const [from, to] = [list[at[i]!]!, list[at[i]! + 1]];
      if (to === undefined) return;
      const size = (to.bits - from.bits) * weight(engine, from);
      if (size > left + 1e-9 || (from.kl - to.kl) / size <= gain) return;
      best = i;
      gain = (from.kl - to.kl) / size;
    });
    if (best < 0) return chosen();
    left -= (hulls[best]![at[best]! + 1]!.bits - hulls[best]![at[best]!]!.bits) * weight(engine, hulls[best]![at[best]!]!);
    ++at[best]!;
  }
}

/** The specs that no other and no mixture of others beats, by bits. */
function hull(list: readonly SpecCost[]): SpecCost[] {
  const sorted = [...list].sort((a, b) => a.bits - b.bits || a.kl - b.kl);
  const out: SpecCost[] = [];
  const slope = (a: SpecCost, b: SpecCost) => (b.kl - a.kl) / (b.bits - a.bits);
  for (const cost of sorted) {
    if (out.length > 0 && cost.kl >= out.at(-1)!.kl) continue;
    if (out.length > 0 && cost.bits === out.at(-1)!.bits) out.pop();
    while (out.length > 1 && slope(out.at(-2)!, out.at(-1)!) >= slope(out.at(-1)!, cost)) out.pop();
    out.push(cost);
  }
  return out;
}
