// SPDX-License-Identifier: Apache-2.0
// The demo's words and sums.
import { expect, test } from 'vitest';
import { bytesText, errorText, ranges, ticks, totals } from '../../web-demo/src/numbers.js';
import type { PageResult, SideResult } from '../../web-demo/src/protocol.js';

test('bytes and errors', () => {
  expect([0, 999, 1000, 12_345, 999_999, 1e6].map(bytesText)).toEqual(['0 B', '999 B', '1.00 kB', '12.3 kB', '1.00 MB', '1.00 MB']);
  expect([0, 0.1234, 0.00012, 12345, Infinity].map(errorText)).toEqual(['0', '0.123', '1.2e-4', '1.2e+4', 'Infinity']);
});

test('ticks lie within the range, at round numbers', () => {
  expect(ticks(-4.1, 5.2, 5)).toEqual([-4, -2, 0, 2, 4]);
  expect(ticks(0, 63, 4)).toEqual([0, 20, 40, 60]);
  expect(ticks(1, 1, 4)).toEqual([1]);
  for (const [low, high] of [[-0.003, 0.0007], [12, 1e6], [-1e-9, 1e-9]] as const) {
    const found = ticks(low, high, 5);
    expect(found.length).toBeGreaterThan(1);
    expect(found.length).toBeLessThan(8);
    for (const tick of found) expect(tick >= low && tick <= high).toBe(true);
  }
});

test('ranges', () => {
  expect(ranges([])).toBe('');
  expect(ranges([0, 1, 2, 3, 5])).toBe('0 to 3, 5');
  expect(ranges([7, 9, 10])).toBe('7, 9 to 10');
});

test('an RMSE over pages weighs each by its elements', () => {
  const side = (elements: number, rmse: number, bytesAfter: number): SideResult => ({
    original: new Float32Array(0), restored: new Float32Array(0), headDim: 1, spec: '', elements, bytesBefore: 2 * elements, bytesAfter, rmse, maxError: 0,
  });
  const page = (key: SideResult, value: SideResult): PageResult => ({ page: 0, start: 0, length: 1, key, value });
  const sum = totals([page(side(100, 1, 50), side(100, 0, 50)), page(side(300, 3, 150), side(300, 0, 150))]);
  expect(sum).toEqual({ before: 1600, after: 400, bits: 4, keyRmse: Math.sqrt((100 + 2700) / 400), valueRmse: 0 });
});
