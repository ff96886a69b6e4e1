// SPDX-License-Identifier: Apache-2.0
// Draws one side of one page: a token's channels as a curve (original) with dots (restored), and below it the whole
// head as two pictures, tokens down and channels across.
import { errorText, ticks } from './numbers.js';
import type { SideResult } from './protocol.js';

interface Theme {
  ink: string;
  faint: string;
  grid: string;
  original: string;
  restored: string;
  zero: [number, number, number];
  negative: [number, number, number];
  positive: [number, number, number];
}

function theme(element: Element): Theme {
  const style = getComputedStyle(element);
  const text = (name: string) => style.getPropertyValue(name).trim();
  const color = (name: string) => text(name).split(' ').map(Number) as [number, number, number];
  return {
    ink: text('--ink'),
    faint: text('--faint'),
    grid: text('--grid'),
    original: text('--original'),
    restored: text('--restored'),
    zero: color('--map-zero'),
    negative: color('--map-negative'),
    positive: color('--map-positive'),
  };
}

/** A canvas of CSS size width x height at the screen's density, cleared. */
function surface(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D | null {
  const density = Math.min(3, window.devicePixelRatio || 1);
  canvas.width = Math.round(width * density);
  canvas.height = Math.round(height * density);
  canvas.style.height = `${height}px`;
  const context = canvas.getContext('2d');
  context?.scale(density, density);
  return context;
}

const plot = { left: 58, right: 6, top: 8, bottom: 18 };

/** Channels of one token. `range` is shared by all tokens of the page, so that they can be compared. */
export function drawCurve(canvas: HTMLCanvasElement, side: SideResult, token: number, range: [number, number]): void {
  const width = canvas.clientWidth;
  const height = 132;
  const context = surface(canvas, width, height);
  if (!context || width === 0) return;
  const colors = theme(canvas);
  const dim = side.headDim;
  const [low, high] = range;
  const x = (channel: number) => plot.left + ((channel + 0.5) / dim) * (width - plot.left - plot.right);
  const y = (value: number) => plot.top + ((high - value) / (high - low)) * (height - plot.top - plot.bottom);

  context.font = `11px ${getComputedStyle(canvas).fontFamily}`;
  context.textBaseline = 'middle';
  context.textAlign = 'right';
  context.lineWidth = 1;
  for (const tick of ticks(low, high, 5)) {
    const line = Math.round(y(tick)) + 0.5;
    context.strokeStyle = colors.grid;
    context.beginPath();
    context.moveTo(plot.left, line);
    context.lineTo(width - plot.right, line);
    context.stroke();
    context.fillStyle = colors.faint;
    context.fillText(String(Number(tick.toPrecision(6))), plot.left - 6, line);
  }
  context.textAlign = 'center';
  context.textBaseline = 'alphabetic';
  for (const channel of ticks(0, dim - 1, Math.max(2, Math.floor(width / 90)))) {
    if (Number.isInteger(channel)) context.fillText(String(channel), x(channel), height - 4);
  }

  const row = token * dim;
  context.strokeStyle = colors.restored;
  context.beginPath();
  for (let i = 0; i < dim; ++i) {
    context.moveTo(x(i), y(side.original[row + i]!));
    context.lineTo(x(i), y(side.restored[row + i]!));
  }
  context.stroke();
  context.strokeStyle = colors.original;
  context.lineWidth = 1.25;
  context.lineJoin = 'round';
  context.beginPath();
  for (let i = 0; i < dim; ++i) context.lineTo(x(i), y(side.original[row + i]!));
  context.stroke();
  context.fillStyle = colors.restored;
  const radius = Math.min(2.4, Math.max(1.4, (width / dim) * 0.35));
  for (let i = 0; i < dim; ++i) {
    context.beginPath();
    context.arc(x(i), y(side.restored[row + i]!), radius, 0, 2 * Math.PI);
    context.fill();
  }
}

/** Original above restored, one cell per token and channel; the chosen token is framed. */
export function drawMaps(canvas: HTMLCanvasElement, side: SideResult, tokens: number, token: number, limit: number): void {
  const width = canvas.clientWidth;
  const cell = tokens > 24 ? 3 : 5;
  const gap = 6;
  const mapHeight = tokens * cell;
  const height = 2 * mapHeight + gap;
  const context = surface(canvas, width, height);
  if (!context || width === 0) return;
  const colors = theme(canvas);
  const dim = side.headDim;
  const left = plot.left;
  const mapWidth = width - left - plot.right;
  const image = new ImageData(dim, tokens);
  const maps: Array<[Float32Array<ArrayBuffer>, string]> = [
    [side.original, 'original'],
    [side.restored, 'restored'],
  ];
  context.imageSmoothingEnabled = false;
  context.font = `11px ${getComputedStyle(canvas).fontFamily}`;
  context.textAlign = 'right';
  context.textBaseline = 'middle';
  const cells = document.createElement('canvas');
  cells.width = dim;
  cells.height = tokens;
  maps.forEach(([values, name], index) => {
    for (let i = 0; i < tokens * dim; ++i) {
      const value = values[i]!;
      const strength = Math.sqrt(Math.min(1, Math.abs(value) / limit));
      const end = value < 0 ? colors.negative : colors.positive;
      for (let c = 0; c < 3; ++c) image.data[4 * i + c] = colors.zero[c]! + strength * (end[c]! - colors.zero[c]!);
      image.data[4 * i + 3] = 255;
    }
    cells.getContext('2d')?.putImageData(image, 0, 0);
    const top = index * (mapHeight + gap);
    context.drawImage(cells, left, top, mapWidth, mapHeight);
    context.strokeStyle = colors.ink;
    context.lineWidth = 1;
    context.strokeRect(left + 0.5, top + token * cell - 0.5, mapWidth - 1, cell + 1);
    context.fillStyle = colors.faint;
    context.fillText(name, left - 6, top + mapHeight / 2);
  });
}

/** Token at a height of the pictures drawn by drawMaps. */
export function tokenAt(y: number, tokens: number): number {
  const cell = tokens > 24 ? 3 : 5;
  const within = y < tokens * cell + 3 ? y : y - tokens * cell - 6;
  return Math.min(tokens - 1, Math.max(0, Math.floor(within / cell)));
}

/** Range of the values of a side with a little room, and their largest magnitude. */
export function extent(side: SideResult): { range: [number, number]; limit: number } {
  let low = Infinity;
  let high = -Infinity;
  for (const values of [side.original, side.restored]) {
    for (const value of values) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  const limit = Math.max(Math.abs(low), Math.abs(high)) || 1;
  const room = (high - low || 1) * 0.04;
  return { range: [low - room, high + room], limit };
}

export function describe(name: string, side: SideResult, tokens: number): string {
  return `${name}, ${tokens} tokens of ${side.headDim} channels, original and restored; RMSE ${errorText(side.rmse)}, largest error ${errorText(side.maxError)}`;
}
