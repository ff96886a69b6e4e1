// SPDX-License-Identifier: Apache-2.0
// kvpages plan: bits by layer and side for a model, under one budget.
import { makePlan, parseScheme, writeOn } from '../study.js';
import type { PlanResult, Sequence } from '../study.js';
import { filesOf, idsOf, keptText, running } from './ab.js';
import type { Arguments, Command } from './args.js';
import { checkOutput, Progress, writeOutput, writeStdout } from './io.js';
import { backendOptions, loadFrom } from './load.js';
import { duration, modelOptions, openModel } from './model.js';
import { defaultPrompts } from './prompts.js';
import { errorText, table } from './text.js';

/** Two to eight bits of one family. */
const defaultSpecs = [
  'lm2/token/64/mse/e4m3+center+hadamard:lm2/token/64/mse/e4m3+hadamard',
  'lm3/token/64/mse/e4m3+center+hadamard:lm3/token/64/mse/e4m3+hadamard',
  'lm4/token/64/mse/e4m3+center+hadamard:lm4/token/64/mse/e4m3+hadamard',
  'int8/token/32/absmax/f16',
];

export const plan: Command = {
  name: 'plan',
  summary: 'Choose bits by layer and side for a model, under one budget, from measured divergence',
  operands: [],
  options: [
    ...modelOptions,
    { name: 'bits', value: 'N', help: 'mean bits per element that encoded pages may take, such as 3.5' },
    { name: 'specs', value: 'LIST', help: 'KEY[:VALUE], separated by commas, to choose from (lm2, lm3, lm4 with hadamard, int8)' },
    { name: 'against', value: 'LIST', help: 'schemes that the plan is held against at the end, as ab takes them (nvfp4,kv4,kv3)' },
    { name: 'text', value: 'FILES', help: 'texts to measure on, as ab takes them (what the model writes after three prompts that are built in)' },
    { name: 'text-tokens', value: 'N', help: 'tokens of each text (256)' },
    { name: 'out', value: 'PLAN.json', help: 'file for the plan; ab takes it as a scheme, createCache its cache' },
    { name: 'json', help: 'everything as JSON' },
    { name: 'quiet', help: 'no progress' },
    ...backendOptions,
  ],
  notes: [
    'Every spec is measured in every layer and side by itself, all else bf16, so the time is that of layers x specs x 2 passes over the texts.\nA plan is for its model. Other texts than those that it was made with say what it is worth: kvpages ab --schemes nvfp4,kv3,PLAN.json',
  ],
  async run(args) {
    const bits = budget(args);
    const tokens = args.count('text-tokens', 1) ?? 256;
    const progress = new Progress(args.flag('quiet'));
    const texts = await filesOf(args, 'text');
    const out = args.text('out');
    await checkOutput(out);
    const kv = await loadFrom(args);
    const pairs = (args.text('specs')?.split(',') ?? defaultSpecs).map((word) => parseScheme(kv, word).cache);
    const against = (args.text('against') ?? 'nvfp4,kv4,kv3').split(',').map((word) => parseScheme(kv, word));
    const model = await openModel(args, kv, (text) => progress.show(text));
    try {
      const given = texts.length > 0 ? texts : defaultPrompts.map((text, i) => ({ name: `prompt ${i + 1}`, text }));
      const ids = await idsOf(model, given, texts.length > 0 ? 0 : given.length);
      const sequences: Sequence[] = [];
      for (const [i, { name }] of given.entries()) {
        const own = ids[i]!.slice(0, tokens);
        progress.show(`reading ${name}`);
        const whole = texts.length > 0 ? own : await running(writeOn(model.engine, { name, ids: own, generate: Math.max(0, tokens - own.length) }, model.stop));
        sequences.push({ name, ids: whole, generate: 0 });
      }
      const spec = (side: 'key' | 'value') => [...new Set(pairs.map((pair) => pair[side] as string))];
      const result = await running(
        makePlan({
          kv,
          engine: model.engine,
          sequences,
          bits,
          specs: { key: spec('key'), value: spec('value') },
          against,
          onProgress: ({ done, total, secondsLeft }) =>
            progress.show(done < total ? `${done} of ${total - 1} layers measured, about ${duration(secondsLeft)} left` : 'measured', done === total),
        }),
      );
      if (out !== undefined) await writeOutput(out, new TextEncoder().encode(`${JSON.stringify({ ...result.plan, model: model.name, bits: result.bits }, null, 2)}\n`));
      await writeStdout(args.flag('json') ? `${JSON.stringify({ model: model.name, ...result }, null, 2)}\n` : report(model.name, bits, result));
    } finally {
      progress.close();
      await model.engine.dispose();
    }
  },
};

function budget(args: Arguments): number {
  const text = args.text('bits') ?? args.fail('--bits is missing');
  const bits = Number(text);
  if (!/^\d+(\.\d+)?$/.test(text) || bits <= 0) args.fail(`--bits must be a number above 0, got ${text}`);
  return bits;
}

function report(name: string, bits: number, { plan: chosen, bits: taken, expectedKl, costs, study }: PlanResult): string {
  const cost = (layer: number, side: 'key' | 'value') => costs.find((one) => one.layer === layer && one.side === side && one.spec === chosen.cache[side][layer])!;
  const rows = chosen.cache.key.map((key, layer) => [
    String(layer), key, errorText(cost(layer, 'key').kl), chosen.cache.value[layer]!, errorText(cost(layer, 'value').kl),
  ]);
  return (
    `${name}: ${taken.toFixed(3)} of ${bits} bits\n\n${table(['>layer', 'keys', '>KL', 'values', '>KL'], rows)}\n` +
    `Sum of KL ${errorText(expectedKl)}; together, on the same texts:\n` +
    table(
      ['scheme', '>kept', '>bits', '>top-1', '>KL'],
      study.schemes.map((scheme) => [scheme.name, keptText(scheme), scheme.bits.toFixed(2), `${(100 * scheme.top1).toFixed(2)} %`, errorText(scheme.kl)]),
    )
  );
}
