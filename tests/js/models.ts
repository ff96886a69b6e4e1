// SPDX-License-Identifier: Apache-2.0
// The model of tests/data/models/tiny, and the onnxruntime of the place that a test runs in: -node in Node, -web in Chromium.
import type { Ort, OrtSession, OrtTensor } from '../../js/ort.js';
import type { SplitModelConfig } from '../../js/runner.js';
import { inBrowser, readRepositoryFile } from './support.js';

const folder = 'tests/data/models/tiny';

export async function loadOrt(): Promise<Ort> {
  if (!inBrowser) {
    const ort = await import('onnxruntime-node');
    return ort.InferenceSession === undefined ? (ort as unknown as { default: Ort }).default : ort;
  }
  const ort = await import('onnxruntime-web/wasm');
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = '/node_modules/onnxruntime-web/dist/';
  return ort;
}

export async function readConfig(): Promise<SplitModelConfig> {
  return JSON.parse(new TextDecoder().decode(await readRepositoryFile(`${folder}/config.json`))) as SplitModelConfig;
}

export const piece = (index: number) => readRepositoryFile(`${folder}/onnx/split_int8_${index}.onnx`);

/** The tests of several files run at once. */
export const oneThread = { intraOpNumThreads: 1, interOpNumThreads: 1 };

export async function openWhole(ort: Ort): Promise<OrtSession> {
  return ort.InferenceSession.create(await readRepositoryFile(`${folder}/onnx/model_int8.onnx`), oneThread);
}

/** Inputs of the whole model beside the past. */
export function inputsOf(ort: Ort, ids: readonly number[], past: number): Record<string, OrtTensor> {
  const row = (length: number, f: (i: number) => number) => new ort.Tensor('int64', BigInt64Array.from({ length }, (_, i) => BigInt(f(i))), [1, length]);
  return {
    input_ids: row(ids.length, (i) => ids[i]!),
    attention_mask: row(past + ids.length, () => 1),
    position_ids: row(ids.length, (i) => past + i),
  };
}

/** Tokens of a fixed sequence. */
export function someIds(count: number): number[] {
  let state = 7;
  return Array.from({ length: count }, () => (state = (Math.imul(state, 1103515245) + 12345) >>> 1) % 2048);
}
