// SPDX-License-Identifier: Apache-2.0
// What a worker computes in the worker test.
import type { KvPages } from '../../js/index.js';

export function work(kv: KvPages): Uint8Array {
  const data = Float32Array.from({ length: 4 * 40 * 16 }, (_, i) => Math.sin(i) * (1 + (i % 5)));
  const tensor = { type: 'f32', dims: [1, 4, 40, 16], data };
  const dense = kv.splitIntoPages(tensor, tensor);
  return dense
    .quantize([0, 2], { key: { type: 'int4', scale: 0.7 }, value: { type: 'uint8', scale: 0.04, zeroPoint: 128 } })
    .serialize();
}
