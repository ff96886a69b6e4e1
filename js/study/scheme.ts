// SPDX-License-Identifier: Apache-2.0
// The schemes of a study: what a word of its list says about a cache.
import { KvPagesError } from '../errors.js';
import type { KvPages } from '../kv-pages.js';
import type { CacheOptions } from '../runner.js';
import type { DenseTypeWord } from '../tensor.js';

/** A way to keep keys and values. */
export interface Scheme {
  readonly name: string;
  readonly cache: CacheOptions;
}

/** A plan as `kvpages plan` writes it: specs by layer. `createCache` takes `cache` beside the model's shape. */
export interface Plan {
  readonly format: 'kvpages.plan.v1';
  readonly name?: string;
  readonly cache: CacheOptions & { readonly key: readonly string[]; readonly value: readonly string[] };
}

/**
 * What is compared without a list: full precision, what others do, what this package has.
 */
export const defaultSchemes: readonly string[] = [
  'bf16', 'nvfp4', 'nvfp4-headdim-f32scale', 'int4-kivi', 'int3-kivi', 'q8_0', 'q4_0', 'kivi4', 'kivi2', 'kv8', 'kv4', 'kv3',
];

/**
 * `[NAME=]KEY[:VALUE][@KEPT[+RECENT]]`: a preset or spec, or one for each side, how many first tokens stay dense, and how far behind
 * the end a page must lie to be encoded (`keepFirst`, `keepRecent`). Without `@KEPT` the first tokens are 4 for this package's own
 * presets (`kv4` ...), 0 for all others.
 */
export function parseScheme(kv: KvPages, text: string): Scheme {
  const match = /^(?:([^=]*)=)?([^:@=]+)(?::([^:@=]+))?(?:@(\d{1,6})(?:\+(\d{1,6}))?)?$/.exec(text.trim());
  if (match === null) throw new KvPagesError('ERR_SPEC', `scheme: must be [NAME=]KEY[:VALUE][@KEPT[+RECENT]], got ${text}`, { argument: 'scheme', actual: text });
  const [, name = text.trim(), key = '', value = key, kept, recent] = match;
  const dense = kv.formats().types.filter(({ family }) => family === 'dense').map(({ name: word }) => word);
  const own = value === key && /^kv\d/.test(key);
  return {
    name,
    cache: {
      key,
      value,
      // A dense scheme is dense throughout: its pages that fill and its pages that are full have one type.
      ...(dense.includes(key) && dense.includes(value) ? { hot: (key === value ? key : 'f32') as DenseTypeWord } : {}),
      ...(kept !== undefined ? { keepFirst: Number(kept) } : own ? {} : { keepFirst: 0 }),
      ...(recent === undefined ? {} : { keepRecent: Number(recent) }),
    },
  };
}

/** Further options that a plan's cache may have, by the type of their value. */
const planOptions: Readonly<Record<string, string>> = { keepFirst: 'number', keepRecent: 'number', residual: 'number', pageTokens: 'number', maxBytes: 'number', hot: 'string' };

/** @throws KvPagesError `ERR_MISMATCH` where the value is no plan, or what it says of the cache has other names or types */
export function planScheme(value: unknown, name: string): Scheme {
  const plan = value as Partial<Plan> | null;
  const specs = (list: unknown) => Array.isArray(list) && list.length > 0 && list.every((spec) => typeof spec === 'string');
  const refuse = (rule: string): never => {
    throw new KvPagesError('ERR_MISMATCH', `${name}: must be a plan with ${rule}`, { argument: name, expected: 'kvpages.plan.v1' });
  };
  if (plan?.format !== 'kvpages.plan.v1' || !specs(plan.cache?.key) || !specs(plan.cache?.value)) {
    return refuse('format kvpages.plan.v1 and specs by layer in cache.key and cache.value');
  }
  if (!['undefined', 'string'].includes(typeof plan.name)) refuse('a name that is a text');
  for (const [option, setting] of Object.entries(plan.cache!)) {
    if (option !== 'key' && option !== 'value' && typeof setting !== planOptions[option]) {
      refuse(option in planOptions ? `cache.${option} of type ${planOptions[option]}` : `${Object.keys(planOptions).join(', ')} beside key and value, got cache.${option}`);
    }
  }
  return { name: plan.name ?? name, cache: plan.cache! };
}

/** Bits of a code, mean of all layers and sides, without scales; undefined for dense types. */
export function codeBits(kv: KvPages, specs: readonly string[]): number | undefined {
  const { types } = kv.formats();
  const found = specs.map((spec) => types.find(({ name }) => name === /^[^/+]*/.exec(spec)![0]));
  if (found.some((type) => type === undefined || type.family === 'dense')) return undefined;
  return found.reduce((sum, type) => sum + type!.bits, 0) / specs.length;
}
