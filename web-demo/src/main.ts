// SPDX-License-Identifier: Apache-2.0
// The page: controls, cards, errors. All computing is in the worker; what it sends is drawn as it comes.
import bundledUrl from '../../tests/data/smollm2-small.safetensors?url';
import { describe, drawCurve, drawMaps, extent, tokenAt } from './draw.js';
import { bytesText, errorText, ranges, totals } from './numbers.js';
import type { FileInfo, FormatChoice, PageResult, Reply, Request, SideResult } from './protocol.js';

const get = <T extends HTMLElement>(id: string) => document.getElementById(id) as T;
const layer = get<HTMLSelectElement>('layer');
const head = get<HTMLSelectElement>('head');
const pageTokens = get<HTMLSelectElement>('page-tokens');
const keyFormat = get<HTMLSelectElement>('key-format');
const valueFormat = get<HTMLSelectElement>('value-format');
const chips = get<HTMLDivElement>('pages');
const cards = get<HTMLDivElement>('cards');
const status = get<HTMLParagraphElement>('status');
const save = get<HTMLButtonElement>('save');
const fileInput = get<HTMLInputElement>('file');

/** Pages quantized when a file opens; more are a click away. */
const firstPages = 6;
const maxFileBytes = 2 ** 30;

let file: FileInfo | null = null;
let formats: FormatChoice[] = [];
let requestId = 0;
let results: PageResult[] = [];
let saved: ArrayBuffer | null = null;
const chosenToken = new Map<number, number>();

const worker = new Worker(new URL('./worker.ts', import.meta.url), { type: 'module', name: 'kvpages' });
const send = (request: Request, transfer: Transferable[] = []) => worker.postMessage(request, transfer);
worker.addEventListener('error', (event) => fail(`The worker stopped: ${event.message || 'it could not be loaded'}.`));

function fail(sentence: string): void {
  const box = get('error');
  box.textContent = sentence;
  box.hidden = false;
  status.textContent = '';
  document.body.dataset['state'] = 'failed';
}

function clearError(): void {
  get('error').hidden = true;
}

// ---- Opening a file ----

async function open(name: string, read: () => Promise<ArrayBuffer>): Promise<void> {
  clearError();
  document.body.dataset['state'] = 'opening';
  status.textContent = `Reading ${name}`;
  const id = ++requestId;
  try {
    const bytes = await read();
    if (id === requestId) send({ type: 'open', id, name, bytes }, [bytes]);
  } catch (error) {
    if (id === requestId) fail(`${name} could not be read: ${error instanceof Error ? error.message : String(error)}.`);
  }
}

function openFile(chosen: File): void {
  if (chosen.size > maxFileBytes) fail(`${chosen.name} has ${bytesText(chosen.size)}; this page takes files up to ${bytesText(maxFileBytes)}.`);
  else void open(chosen.name, () => chosen.arrayBuffer());
}

function openBundled(): void {
  void open('smollm2-small.safetensors', async () => {
    const response = await fetch(bundledUrl);
    if (!response.ok) throw new Error(`the server answered ${response.status}`);
    return response.arrayBuffer();
  });
}

// ---- Controls ----

function options(select: HTMLSelectElement, entries: Array<[value: string, text: string]>, chosen: string): void {
  select.replaceChildren(...entries.map(([value, text]) => new Option(text, value, false, value === chosen)));
  select.disabled = false;
}

function formatOptions(select: HTMLSelectElement, chosen: string): void {
  const groups = new Map<string, HTMLOptGroupElement>();
  select.replaceChildren();
  for (const format of formats) {
    let group = groups.get(format.group);
    if (!group) {
      group = document.createElement('optgroup');
      group.label = format.group;
      groups.set(format.group, group);
      select.append(group);
    }
    group.append(new Option(format.label, format.spec, false, format.spec === chosen));
  }
  select.disabled = false;
}

const currentLayer = () => file?.layers.find((entry) => String(entry.layer) === layer.value) ?? file?.layers[0];

function showPages(keep: boolean): void {
  const entry = currentLayer();
  if (!entry) return;
  const before = keep ? new Set(selectedPages()) : null;
  const size = Number(pageTokens.value);
  const count = Math.ceil(entry.tokens / size);
  chips.replaceChildren(
    ...Array.from({ length: count }, (_, page) => {
      const length = Math.min(size, entry.tokens - page * size);
      const label = document.createElement('label');
      label.className = 'chip';
      const box = document.createElement('input');
      box.type = 'checkbox';
      box.value = String(page);
      box.checked = before ? before.has(page) : page < firstPages;
      label.append(box, length < size ? `${page} (${counted(length, 'token')})` : String(page));
      label.title = `Tokens ${page * size} to ${page * size + length - 1}`;
      return label;
    }),
  );
}

const selectedPages = () =>
  [...chips.querySelectorAll('input')].filter((box) => box.checked).map((box) => Number(box.value));

const counted = (count: number, word: string) => `${count} ${word}${count === 1 ? '' : 's'}`;

function showFile(opened: FileInfo): void {
  file = opened;
  get('file-name').textContent = `${opened.name}${opened.model ? `, ${opened.model}` : ''}: ${counted(opened.layers.length, 'layer')}, ${counted(opened.layers[0]?.tokens ?? 0, 'token')}`;
  options(layer, opened.layers.map((entry) => [String(entry.layer), String(entry.layer)]), String(opened.layers[0]?.layer));
  pageTokens.disabled = false;
  showHeads();
  showPages(false);
}

function showHeads(): void {
  const heads = currentLayer()?.kvHeads ?? 0;
  const chosen = Number(head.value) < heads ? head.value || '0' : '0';
  options(head, Array.from({ length: heads }, (_, i) => [String(i), String(i)]), chosen);
}

// ---- Running ----

function clearResults(): void {
  cards.replaceChildren();
  get('summary').hidden = true;
  get('legend').hidden = true;
}

function run(): void {
  if (!file || formats.length === 0) return;
  clearError();
  results = [];
  saved = null;
  save.disabled = true;
  const pages = selectedPages();
  const id = ++requestId;
  if (pages.length === 0) {
    clearResults();
    status.textContent = 'Choose a page to see what quantization does to it.';
    document.body.dataset['state'] = 'idle';
    return;
  }
  document.body.dataset['state'] = 'running';
  status.textContent = `Quantizing pages ${ranges(pages)}`;
  send({
    type: 'run',
    id,
    run: {
      layer: Number(layer.value),
      head: Number(head.value),
      pageTokens: Number(pageTokens.value),
      pages,
      key: keyFormat.value,
      value: valueFormat.value,
    },
  });
}

worker.addEventListener('message', ({ data: reply }: MessageEvent<Reply>) => {
  if (reply.type === 'ready') {
    formats = reply.formats;
    formatOptions(keyFormat, 'int4/channel/16');
    formatOptions(valueFormat, 'uint4/token');
    get('engine').textContent = reply.engine;
    run();
    return;
  }
  if (reply.id !== requestId) return;
  if (reply.type === 'opened') {
    showFile(reply.file);
    run();
  } else if (reply.type === 'page') {
    if (results.length === 0) cards.replaceChildren();
    results.push(reply.result);
    addCard(reply.result);
    showTotals();
  } else if (reply.type === 'done') {
    saved = reply.file;
    save.disabled = saved === null;
    get('sum-file').textContent = reply.checked;
    status.textContent = `${results.length} of ${chips.childElementCount} pages quantized in ${Math.max(1, Math.round(reply.milliseconds))} ms.`;
    document.body.dataset['state'] = 'done';
  } else {
    // What still stands there would be taken for the result of this run.
    if (results.length === 0) clearResults();
    fail(reply.sentence);
  }
});

// ---- Cards ----

function showTotals(): void {
  const sum = totals(results);
  get('summary').hidden = false;
  get('legend').hidden = false;
  get('sum-before').textContent = bytesText(sum.before);
  get('sum-after').textContent = `${bytesText(sum.after)} (${Math.round((100 * sum.after) / sum.before)} %)`;
  get('sum-bits').textContent = sum.bits.toFixed(2);
  get('sum-key').textContent = errorText(sum.keyRmse);
  get('sum-value').textContent = errorText(sum.valueRmse);
  get('sum-file').textContent = '';
  get('bar').style.width = `${Math.min(100, (100 * sum.after) / sum.before)}%`;
}

function element<K extends keyof HTMLElementTagNameMap>(tag: K, text = '', className = ''): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

const redraws = new WeakMap<Element, () => void>();

function addSide(card: HTMLElement, page: PageResult, name: string, side: SideResult, redraw: () => void): () => void {
  const box = element('div', '', 'side');
  const title = element('h3', `${name} `);
  title.append(element('code', side.spec));
  const figures = element('p', '', 'figures');
  figures.append(
    element('b', `${bytesText(side.bytesBefore)} to ${bytesText(side.bytesAfter)}`),
    ` · RMSE ${errorText(side.rmse)} · max error ${errorText(side.maxError)}`,
  );
  const curve = element('canvas', '', 'curve');
  const maps = element('canvas', '', 'maps');
  curve.setAttribute('role', 'img');
  curve.setAttribute('aria-label', `${describe(name, side, page.length)}: channels of the chosen token`);
  maps.tabIndex = 0;
  maps.setAttribute('role', 'slider');
  maps.setAttribute('aria-orientation', 'vertical');
  maps.setAttribute('aria-label', `Token shown, page ${page.page}, ${name}`);
  maps.setAttribute('aria-valuemin', String(page.start));
  maps.setAttribute('aria-valuemax', String(page.start + page.length - 1));
  box.append(title, figures, curve, maps);
  card.append(box);

  const choose = (token: number) => {
    chosenToken.set(page.page, Math.min(page.length - 1, Math.max(0, token)));
    redraw();
  };
  maps.addEventListener('click', (event) => choose(tokenAt(event.offsetY, page.length)));
  maps.addEventListener('keydown', (event) => {
    const token = chosenToken.get(page.page) ?? 0;
    const moves: Record<string, number> = { ArrowUp: token - 1, ArrowLeft: token - 1, ArrowDown: token + 1, ArrowRight: token + 1, Home: 0, End: page.length - 1 };
    const target = moves[event.key];
    if (target === undefined) return;
    event.preventDefault();
    choose(target);
  });
  const { range, limit } = extent(side);
  return () => {
    const token = Math.min(page.length - 1, chosenToken.get(page.page) ?? 0);
    maps.setAttribute('aria-valuenow', String(page.start + token));
    drawCurve(curve, side, token, range);
    drawMaps(maps, side, page.length, token, limit);
  };
}

function addCard(page: PageResult): void {
  const card = element('article', '', 'card');
  const title = element('h2', `Page ${page.page} `);
  const note = element('small');
  title.append(note);
  const sides = element('div', '', 'sides');
  card.append(title, sides);
  const draws: Array<() => void> = [];
  const redraw = () => {
    const token = page.start + Math.min(page.length - 1, chosenToken.get(page.page) ?? 0);
    note.textContent = `tokens ${page.start} to ${page.start + page.length - 1}, KV head ${head.value}, curve: token ${token}`;
    for (const draw of draws) draw();
  };
  draws.push(addSide(sides, page, 'K', page.key, redraw), addSide(sides, page, 'V', page.value, redraw));
  cards.append(card);
  redraws.set(card, redraw);
  redraw();
}

function redrawAll(): void {
  for (const card of cards.children) redraws.get(card)?.();
}

// ---- Events ----

let lastWidth = 0;
new ResizeObserver(([entry]) => {
  const width = entry?.contentRect.width ?? 0;
  if (width !== lastWidth) {
    lastWidth = width;
    redrawAll();
  }
}).observe(cards);
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redrawAll);

get('controls').addEventListener('submit', (event) => event.preventDefault());
get('choose').addEventListener('click', () => fileInput.click());
get('bundled').addEventListener('click', openBundled);
fileInput.addEventListener('change', () => {
  const chosen = fileInput.files?.[0];
  if (chosen) openFile(chosen);
  fileInput.value = '';
});
layer.addEventListener('change', () => {
  showHeads();
  showPages(true);
  run();
});
pageTokens.addEventListener('change', () => {
  showPages(false);
  chosenToken.clear();
  run();
});
for (const control of [head, keyFormat, valueFormat, chips]) control.addEventListener('change', run);
const selectAll = (checked: boolean) => {
  for (const box of chips.querySelectorAll('input')) box.checked = checked;
  run();
};
get('all-pages').addEventListener('click', () => selectAll(true));
get('no-pages').addEventListener('click', () => selectAll(false));
save.addEventListener('click', () => {
  if (!saved) return;
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([saved], { type: 'application/octet-stream' }));
  link.download = 'cache.kvpages.pb';
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
});

let dragDepth = 0;
const drop = get('drop');
window.addEventListener('dragenter', (event) => {
  event.preventDefault();
  drop.hidden = ++dragDepth === 0;
});
window.addEventListener('dragover', (event) => event.preventDefault());
window.addEventListener('dragleave', () => {
  drop.hidden = --dragDepth <= 0;
});
window.addEventListener('drop', (event) => {
  event.preventDefault();
  dragDepth = 0;
  drop.hidden = true;
  const dropped = event.dataTransfer?.files[0];
  if (dropped) openFile(dropped);
});

openBundled();
