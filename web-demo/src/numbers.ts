// SPDX-License-Identifier: Apache-2.0
// Numbers as people read them, and the sums over pages. No DOM here: tests run it in Node.
import type { PageResult, SideResult } from './protocol.js';

export function bytesText(bytes: number): string {
  if (bytes < 1000) return `${bytes} B`;
  if (bytes < 999_950) return `${(bytes / 1e3).toFixed(bytes < 1e4 ? 2 : 1)} kB`;
  return `${(bytes / 1e6).toFixed(2)} MB`;
}

export function errorText(value: number): string {
  if (value === 0) return '0';
  if (!Number.isFinite(value)) return String(value);
  return value >= 0.001 && value < 1000 ? value.toPrecision(3) : value.toExponential(1);
}

/** Ticks of a range that people would choose: 1, 2 or 5 times a power of ten apart, about `count` of them. */
export function ticks(low: number, high: number, count: number): number[] {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) ?? 10 * power;
  const first = Math.ceil(low / step);
  const last = Math.floor(high / step);
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step);
}

export interface Totals {
  before: number;
  after: number;
  bits: number;
  keyRmse: number;
  valueRmse: number;
}

/** Sums over pages; an RMSE over pages weighs each by its elements. */
export function totals(pages: readonly PageResult[]): Totals {
  const all = (side: 'key' | 'value') => pages.map((page): SideResult => page[side]);
  const sum = (sides: SideResult[], get: (side: SideResult) => number) => sides.reduce((a, s) => a + get(s), 0);
  const rmse = (sides: SideResult[]) => Math.sqrt(sum(sides, (s) => s.rmse * s.rmse * s.elements) / Math.max(1, sum(sides, (s) => s.elements)));
  const both = [...all('key'), ...all('value')];
  const after = sum(both, (s) => s.bytesAfter);
  return {
    before: sum(both, (s) => s.bytesBefore),
    after,
    bits: (8 * after) / Math.max(1, sum(both, (s) => s.elements)),
    keyRmse: rmse(all('key')),
    valueRmse: rmse(all('value')),
  };
}

/** Selected pages as people write them: "0 to 3, 5". */
export function ranges(pages: readonly number[]): string {
  const parts: string[] = [];
  for (let i = 0; i < pages.length; ) {
    let j = i;
    while (j + 1 < pages.length && pages[j + 1] === pages[j]! + 1) ++j;
    parts.push(j > i ? `${pages[i]} to ${pages[j]}` : `${pages[i]}`);
    i = j + 1;
  }
  return parts.join(', ');
}
