// SPDX-License-Identifier: Apache-2.0
// A study as an SVG: error by layer of keys and of values, KL by position. One file without references, readable on any ground.
import type { SchemeResult, StudyResult } from '../study.js';

interface Line {
  readonly name: string;
  readonly points: ReadonlyArray<readonly [x: number, y: number]>;
}

/** Where a panel's plane lies. */
interface Place {
  readonly x: number;
  readonly y: number;
  readonly width: number;
  readonly height: number;
}

// Okabe and Ito's colours, which people with any colour vision tell apart; a second round is dashed.
const colors = ['#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#555555'];
const style = (index: number) => `stroke="${colors[index % colors.length]}"${index < colors.length ? '' : ` stroke-dasharray="${index < 2 * colors.length ? '6 3' : '2 3'}"`}`;

const escape = (text: string): string => text.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const round = (value: number): string => String(Math.round(value * 10) / 10);

export function studyChart(model: string, result: StudyResult): string {
  const { schemes } = result;
  const layers = schemes[0]?.byLayer.length ?? 0;
  const byLayer = (side: 'keyRmse' | 'valueRmse'): Line[] =>
    schemes.map(({ name, byLayer: rows }) => ({ name, points: rows.map((row, layer) => [layer, row[side]] as const) }));
  const last = 16 * Math.max(1, ...schemes.map(({ curve }) => curve.length));
  const body =
    panel({ x: 70, y: 70, width: 330, height: 220 }, 'K RMSE by layer', 'layer', [0, Math.max(1, layers - 1)], byLayer('keyRmse')) +
    panel({ x: 470, y: 70, width: 330, height: 220 }, 'V RMSE by layer', 'layer', [0, Math.max(1, layers - 1)], byLayer('valueRmse')) +
    panel({ x: 70, y: 360, width: 730, height: 260 }, 'KL of the next token by tokens in the cache, nats', 'tokens', [0, last], schemes.map(klLine));
  const legend = schemes
    .map(({ name }, i) => `<path d="M820 ${80 + 20 * i}h26" ${style(i)} stroke-width="2"/><text x="852" y="${84 + 20 * i}">${escape(name)}</text>\n`)
    .join('');
  const height = Math.max(680, 120 + 20 * schemes.length);
  return (
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1040 ${height}" font-family="sans-serif" font-size="12" fill="#222" role="img">\n` +
    `<title>${escape(`${model}: what quantized caches cost`)}</title>\n<rect width="1040" height="${height}" fill="#fff"/>\n` +
    `<text x="70" y="32" font-size="16">${escape(`${model}, engine ${result.engine}: what quantized caches cost`)}</text>\n${body}${legend}</svg>\n`
  );
}

/** Mean of so many positions that at most 60 points are drawn. */
function klLine({ name, curve }: SchemeResult): Line {
  const step = Math.max(1, Math.ceil(curve.length / 60));
  const points: Array<readonly [number, number]> = [];
  for (let at = 0; at < curve.length; at += step) {
    const values = curve.slice(at, at + step).filter((value) => value !== null);
    if (values.length > 0) points.push([16 * (at + step / 2), values.reduce((sum, value) => sum + value, 0) / values.length]);
  }
  return { name, points };
}

/** Lines over a logarithmic axis; zeros, which it has no place for, are left out. */
function panel({ x, y, width, height }: Place, title: string, axis: string, [from, to]: readonly [number, number], lines: readonly Line[]): string {
  const values = lines.flatMap(({ points }) => points.map((point) => point[1])).filter((value) => value > 0);
  // Six decades at most: what lies below is as good as nothing.
  const high = Math.ceil(Math.log10(values.reduce((most, value) => Math.max(most, value), 1e-6)));
  const low = Math.max(high - 6, Math.floor(Math.log10(values.reduce((least, value) => Math.min(least, value), 10 ** (high - 1)))));
  const across = (value: number) => x + (width * (value - from)) / (to - from);
  const up = (value: number) => y + height - (height * (Math.max(low, Math.log10(value)) - low)) / Math.max(1, high - low);
  const grid = Array.from({ length: high - low + 1 }, (_, i) => low + i)
    .map((exponent) => {
      const at = round(up(10 ** exponent));
      return `<path d="M${x} ${at}h${width}" stroke="#ddd"/><text x="${x - 8}" y="${Number(at) + 4}" text-anchor="end">${exponent < -3 ? `1e${exponent}` : 10 ** exponent}</text>\n`;
    })
    .join('');
  const ticks = ticksOf(from, to)
    .map((value) => `<text x="${round(across(value))}" y="${y + height + 18}" text-anchor="middle">${value}</text>\n`)
    .join('');
  const paths = lines
    .map(({ points }, i) => {
      const shown = points.filter((point) => point[1] > 0);
      if (shown.length === 0) return '';
      const d = shown.map(([px, py], k) => `${k === 0 ? 'M' : 'L'}${round(across(px))} ${round(up(py))}`).join('');
      return `<path d="${d}" fill="none" ${style(i)} stroke-width="1.6"/>\n`;
    })
    .join('');
  return `<text x="${x}" y="${y - 12}" font-size="13">${title}</text>\n${grid}${ticks}<text x="${x + width}" y="${y + height + 34}" text-anchor="end">${axis}</text>\n${paths}`;
}

/** About six round numbers. */
function ticksOf(from: number, to: number): number[] {
  const rough = (to - from) / 6;
  const unit = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
  const step = Math.max(1, [1, 2, 5, 10].map((factor) => factor * unit).find((candidate) => candidate >= rough) ?? 10 * unit);
  return Array.from({ length: Math.floor((to - from) / step) + 1 }, (_, i) => from + i * step);
}
