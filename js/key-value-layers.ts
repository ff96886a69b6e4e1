// SPDX-License-Identifier: Apache-2.0
// Finds keys and values by their names in a file of tensors. Public through `kvpages/safetensors`.

/** The keys and values of one layer. */
export interface KeyValueLayer<T> {
  readonly layer: number;
  readonly key: T;
  readonly value: T;
}

/**
 * Pairs of tensors whose names end in a layer's number and `key` or `value` (also `keys`, `values`, `k`, `v`), as exported models
 * name them: `past_key_values.0.key`, `present.0.value`, `layers.0.k`. Sorted by layer; a tensor without its partner is left out.
 */
export function keyValueLayers<T extends { readonly name: string }>(file: { readonly tensors: ReadonlyMap<string, T> }): Array<KeyValueLayer<T>> {
  const found = new Map<number, { key?: T; value?: T }>();
  for (const tensor of file.tensors.values()) {
    const match = /(?:^|[._/])(\d{1,6})[._/](k|v|keys?|values?)$/.exec(tensor.name);
    if (!match) continue;
    const number = Number(match[1]);
    const layer = found.get(number) ?? {};
    found.set(number, layer);
    layer[match[2]!.startsWith('k') ? 'key' : 'value'] = tensor;
  }
  return [...found]
    .sort(([a], [b]) => a - b)
    .flatMap(([layer, { key, value }]) => (key && value ? [{ layer, key, value }] : []));
}
