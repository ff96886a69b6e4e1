// SPDX-License-Identifier: Apache-2.0
// Numbers and tables as the command line prints them.

/** Columns of text; those whose heading starts with `>` are aligned to the right. */
export function table(headings: readonly string[], rows: ReadonlyArray<readonly string[]>): string {
  const names = headings.map((heading) => heading.replace(/^>/, ''));
  const widths = names.map((name, i) => Math.max(name.length, ...rows.map((row) => row[i]?.length ?? 0)));
  const line = (cells: readonly string[]) =>
    cells
      .map((cell, i) => (headings[i]!.startsWith('>') ? cell.padStart(widths[i]!) : cell.padEnd(widths[i]!)))
      .join('  ')
      .trimEnd();
  return [line(names), ...rows.map(line)].map((text) => `${text}\n`).join('');
}

export function errorText(value: number): string {
  if (value === 0 || !Number.isFinite(value)) return String(value);
  return value >= 0.001 && value < 1000 ? value.toPrecision(4) : value.toExponential(2);
}

export function plural(count: number, noun: string): string {
  return `${count} ${noun}${count === 1 ? '' : 's'}`;
}

export const shape = (dims: readonly number[]): string => `[${dims.join(', ')}]`;
