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

/** A node with attributes that are integers. */
export interface NodeOfGraph {
  readonly op: string;
  readonly inputs: readonly string[];
  readonly output: string;
  readonly attributes?: Readonly<Record<string, number>>;
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
    ...Object.entries(attributes).flatMap(([name, i]) => message(5, [...text(1, name), ...number(3, i), ...number(20, 2)])),
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
