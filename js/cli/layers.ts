// SPDX-License-Identifier: Apache-2.0
// The keys and values in a safetensors file, and what encoding them by pages gives.
import type { DenseType, Figures, KvPages, QuantizedTensor } from '../index.js';
import { keyValueLayers } from '../key-value-layers.js';
import type { KeyValueLayer } from '../key-value-layers.js';
import { readSafetensors, safetensorsHeaderBytes } from '../safetensors.js';
import { Failure, placed } from './io.js';

export type File = ReturnType<typeof readSafetensors>;
export type Layer = KeyValueLayer<File['tensors'] extends ReadonlyMap<string, infer T> ? T : never>;

/** Whether bytes begin like a safetensors file: a length that fits, then a JSON object. */
export function isSafetensors(bytes: Uint8Array): boolean {
  try {
    return bytes[8] === 0x7b && safetensorsHeaderBytes(bytes) <= bytes.byteLength;
  } catch {
    return false;
  }
}

/** Keys and values of a file that must have some. */
export function readLayers(bytes: Uint8Array, name: string): Layer[] {
  if (!isSafetensors(bytes)) throw new Failure(`${name} is no safetensors file`);
  const layers = placed(name, () => keyValueLayers(readSafetensors(bytes)));
  const other = layers.flatMap(({ key, value }) => [key, value]).find(({ type }) => !['f32', 'f16', 'bf16', 'f64'].includes(type));
  if (other) throw new Failure(`${name}: keys and values must be f32, f16, bf16 or f64, got ${other.name} of ${other.type}`);
  if (layers.length === 0) throw new Failure(`${name} holds no keys and values: no two tensors are named like past_key_values.0.key and past_key_values.0.value`);
  return layers;
}

export function layerNumbers(layers: readonly Layer[]): string {
  return layers.map((layer) => layer.layer).join(', ');
}

/** Sums of squared errors over pages, layers, heads. */
export class Total {
  bytes = 0;
  elements = 0;
  maxError = 0;
  #squares = 0;

  add(figures: Figures, byteLength: number): void {
    this.bytes += byteLength;
    this.elements += figures.elements;
    this.maxError = Math.max(this.maxError, figures.maxError);
    this.#squares += figures.rmse * figures.rmse * figures.elements;
  }
  get rmse(): number {
    return Math.sqrt(this.#squares / Math.max(1, this.elements));
  }
  get bits(): number {
    return (8 * this.bytes) / Math.max(1, this.elements);
  }
}

/** Encodes a dense tensor, measures it, and gives both. */
export function encode(kv: KvPages, source: QuantizedTensor, spec: string, side: 'key' | 'value'): { encoded: QuantizedTensor; figures: Figures } {
  const dense = { type: source.spec as DenseType, dims: source.dims, data: source.data };
  const encoded = kv.quantize(dense, { spec, side });
  return { encoded, figures: encoded.measure(dense) };
}
