// SPDX-License-Identifier: Apache-2.0
// What the page and its worker say to each other. Arrays are transferred, not copied.

/** A format that the page offers: a spec string of the library and the words for it. */
export interface FormatChoice {
  spec: string;
  label: string;
  group: string;
}

/** What a file holds, as far as the controls need it. */
export interface FileInfo {
  name: string;
  model: string;
  layers: Array<{ layer: number; tokens: number; kvHeads: number; headDim: number }>;
}

export interface RunRequest {
  layer: number;
  head: number;
  pageTokens: number;
  pages: number[];
  key: string;
  value: string;
}

/** One side of one page. Values are those of the shown head, [tokens, head_dim]; figures are of all heads. */
export interface SideResult {
  original: Float32Array<ArrayBuffer>;
  restored: Float32Array<ArrayBuffer>;
  headDim: number;
  spec: string;
  elements: number;
  bytesBefore: number;
  bytesAfter: number;
  rmse: number;
  maxError: number;
}

export interface PageResult {
  page: number;
  start: number;
  length: number;
  key: SideResult;
  value: SideResult;
}

export type Request =
  | { type: 'open'; id: number; name: string; bytes: ArrayBuffer }
  | { type: 'run'; id: number; run: RunRequest };

export type Reply =
  | { type: 'ready'; engine: string; formats: FormatChoice[] }
  | { type: 'opened'; id: number; file: FileInfo }
  | { type: 'page'; id: number; result: PageResult }
  | { type: 'done'; id: number; file: ArrayBuffer | null; checked: string; milliseconds: number }
  | { type: 'failed'; id: number; sentence: string };
