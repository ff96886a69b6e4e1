// SPDX-License-Identifier: Apache-2.0
// Writes small ONNX files, as protobuf bytes by hand, for models that a test wants and nobody exports.

type Bytes = number[];

const varint = (value: number): Bytes => (value < 128 ? [value] : [(value % 128) | 128, ...varint(Math.floor(value / 128))]);
const number = (field: number, value: number): Bytes => [...varint(field * 8), ...varint(value)];
const message = (field: number, value: Bytes): Bytes => [...varint(field * 8 + 2), ...varint(value.length), ...value];
const text = (field: number, value: string): Bytes => message(field, [...new TextEncoder().encode(value)]);

const types = { float32: 1, int8: 3, int64: 7, float16: 10 } as const;

export interface ValueOfGraph {
  readonly name: string;
  readonly type: keyof typeof types;
  /** A text is the name of a size that is only known at run time. */
  readonly shape: ReadonlyArray<number | string>;
}

/** A node with attributes that are integers or lists of them. */
export interface NodeOfGraph {
  readonly op: string;
  readonly inputs: readonly string[];
  readonly output: string;
  readonly attributes?: Readonly<Record<string, number | readonly number[]>>;
}

const value = (field: number, { name, type, shape }: ValueOfGraph): Bytes => {
  const dims = shape.flatMap((dim) => message(1, typeof dim === 'number' ? number(1, dim) : text(2, dim)));
  return message(field, [...text(1, name), ...message(2, message(1, [...number(1, types[type]), ...message(2, dims)]))]);
};

const node = ({ op, inputs, output, attributes = {} }: NodeOfGraph): Bytes =>
  message(1, [
    ...inputs.flatMap((name) => text(1, name)),
    ...text(2, output),
    ...text(4, op),
    ...Object.entries(attributes).flatMap(([name, i]) =>
      message(5, [...text(1, name), ...(typeof i === 'number' ? [...number(3, i), ...number(20, 2)] : [...i.flatMap((one) => number(8, one)), ...number(20, 7)])]),
    ),
  ]);

/** A file of opset 21. */
export function onnxFile(graph: { inputs: readonly ValueOfGraph[]; nodes: readonly NodeOfGraph[]; outputs: readonly ValueOfGraph[] }): Uint8Array<ArrayBuffer> {
  const body = [
    ...graph.nodes.flatMap(node),
    ...text(2, 'graph'),
    ...graph.inputs.flatMap((input) => value(11, input)),
    ...graph.outputs.flatMap((output) => value(12, output)),
  ];
  return Uint8Array.from([...number(1, 10), ...message(7, body), ...message(8, number(2, 21))]);
}

/** A model that only carries its past on: `present = concat(past, new)` for the keys and values of some layers. */
export function carrier(options: {
  readonly layers: readonly number[];
  readonly past: (layer: number, side: 'key' | 'value') => string;
  readonly present: (layer: number, side: 'key' | 'value') => string;
  readonly type?: ValueOfGraph['type'];
  readonly shape?: ValueOfGraph['shape'];
  readonly without?: string;
}): Uint8Array<ArrayBuffer> {
  const { layers, past, present, type = 'float32', shape = ['batch', 2, 'past', 8], without } = options;
  const sides = layers.flatMap((layer) => (['key', 'value'] as const).map((side) => ({ layer, side })));
  const fresh = (layer: number, side: string) => `new.${layer}.${side}`;
  const axis = shape.indexOf('past');
  const longer = (name: string) => shape.map((dim, i) => (i === axis ? name : dim));
  const kept = <T extends { name: string }>(list: T[]) => list.filter(({ name }) => name !== without);
  return onnxFile({
    inputs: sides.flatMap(({ layer, side }) => [
      { name: past(layer, side), type, shape },
      { name: fresh(layer, side), type, shape: longer('tokens') },
    ]),
    nodes: sides.map(({ layer, side }) => ({ op: 'Concat', inputs: [past(layer, side), fresh(layer, side)], output: present(layer, side), attributes: { axis } })),
    outputs: kept(sides.map(({ layer, side }) => ({ name: present(layer, side), type, shape: longer('total') }))),
  });
}

/**
 * A whole language model of one layer, all in f16: 2 KV heads of 8, 8 words. Its keys and values are the ids of the tokens, its logits these
 * times the mean value.
 */
export function halfModel(): Uint8Array<ArrayBuffer> {
  const past = (side: string): ValueOfGraph => ({ name: `past_key_values.0.${side}`, type: 'float16', shape: ['batch', 2, 'past', 8] });
  const present = (side: string): ValueOfGraph => ({ name: `present.0.${side}`, type: 'float16', shape: ['batch', 2, 'total', 8] });
  const list = (name: string, values: readonly number[]): NodeOfGraph => ({ op: 'Constant', inputs: [], output: name, attributes: { value_ints: values } });
  return onnxFile({
    inputs: [{ name: 'input_ids', type: 'int64', shape: ['batch', 'tokens'] }, past('key'), past('value')],
    nodes: [
      list('axes 1 3', [1, 3]),
      list('axis 1', [1]),
      list('axis 2', [2]),
      list('axes 1 2', [1, 2]),
      list('ramp of int64', [1, 2, 3, 4, 5, 6, 7, 8]),
      { op: 'Cast', inputs: ['ramp of int64'], output: 'ramp', attributes: { to: types.float16 } },
      { op: 'Cast', inputs: ['input_ids'], output: 'ids', attributes: { to: types.float16 } },
      { op: 'Unsqueeze', inputs: ['ids', 'axes 1 3'], output: 'one head' },
      { op: 'Concat', inputs: ['one head', 'one head'], output: 'heads', attributes: { axis: 1 } },
      // A ramp over head_dim, so that values have something to lose.
      { op: 'Div', inputs: ['heads', 'ramp'], output: 'new' },
      ...(['key', 'value'] as const).map((side) => ({ op: 'Concat', inputs: [past(side).name, 'new'], output: present(side).name, attributes: { axis: 2 } })),
      { op: 'ReduceMean', inputs: ['present.0.value', 'axes 1 2'], output: 'mean', attributes: { keepdims: 0 } },
      { op: 'Unsqueeze', inputs: ['mean', 'axis 1'], output: 'means' },
      { op: 'Unsqueeze', inputs: ['ids', 'axis 2'], output: 'columns' },
      { op: 'Mul', inputs: ['columns', 'means'], output: 'logits' },
    ],
    outputs: [{ name: 'logits', type: 'float16', shape: ['batch', 'tokens', 8] }, present('key'), present('value')],
  });
}
