// SPDX-License-Identifier: Apache-2.0
// The README is true: its code runs and prints what it says, its commands work, its tables are the library's.
import { execFileSync, spawnSync } from 'node:child_process';
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { describe, expect, test } from 'vitest';
import { load } from 'kvpages';

const root = fileURLToPath(new URL('../..', import.meta.url));
const readme = readFileSync(join(root, 'README.md'), 'utf8');
const documents = ['README.md', 'CONTRIBUTING.md', 'docs/formats.md', 'docs/attention.md', 'docs/envelope.md', 'docs/models.md', 'docs/results.md', 'docs/schemes-study.md', 'src/formats/README.md', 'scripts/README.md', 'tests/data/README.md', 'tests/vectors/README.md'];

const blocks = (language: string) => [...readme.matchAll(new RegExp(`^\`\`\`${language}\n([\\s\\S]*?)^\`\`\`$`, 'gm'))].map((match) => match[1]!);

/** Rows of the first table after a marker. */
function table(marker: string): string[][] {
  const after = readme.slice(readme.indexOf(`<!-- ${marker}:`));
  const lines = /(?:^\|.*\n)+/m.exec(after)![0].trim().split('\n');
  return lines.slice(2).map((line) => line.split('|').slice(1, -1).map((cell) => cell.trim()));
}
const words = (cell: string) => [...cell.matchAll(/`([^`]+)`/g)].map((match) => match[1]!);

/** Runs a script where `kvpages` is found as in a project that depends on it. */
function run(code: string, backend: string, cwd?: string): string {
  const folder = join(root, 'build', 'readme');
  mkdirSync(folder, { recursive: true });
  const file = join(folder, `${backend}.mjs`);
  writeFileSync(file, code);
  return execFileSync(process.execPath, [file], { cwd: cwd ?? folder, encoding: 'utf8', env: { ...process.env, KVPAGES_BACKEND: backend } });
}

describe.each(['native', 'wasm'])('code, %s', (backend) => {
  test('the first lines print what the text says', () => {
    const printed = /The last line prints `([^`]+)`/.exec(readme)![1];
    expect(run(blocks('js')[0]!, backend).trim()).toBe(printed);
  });
  test('the second example prints its table', () => {
    expect(run(blocks('js')[1]!, backend)).toBe(blocks('text')[0]!);
  });
  test('the third example prints its line', () => {
    expect(run(blocks('js')[2]!, backend)).toBe(blocks('text')[1]!);
  });
});

test('transformers.js prints the line of its example', () => {
  const section = readme.slice(readme.indexOf('\n## Language models\n'));
  const [, code, printed] = /```js\n([\s\S]*?)```\n\n```text\n([\s\S]*?)```/.exec(section)!;
  // The model's folder is named as in the repository's own.
  expect(run(code!, 'native', root)).toBe(printed);
});

test('the commands work', { timeout: 300_000 }, () => {
  const folder = mkdtempSync(join(tmpdir(), 'kvpages-readme-'));
  try {
    mkdirSync(join(folder, 'tests'));
    symlinkSync(join(root, 'tests', 'data'), join(folder, 'tests', 'data'));
    const lines = blocks('sh')[0]!.trim().split('\n');
    expect(lines.length).toBeGreaterThan(2);
    for (const line of lines) {
      const [npx, program, ...args] = line.split(/ +/);
      expect([npx, program]).toEqual(['npx', 'kvpages']);
      const { status, stderr } = spawnSync(process.execPath, [join(root, 'dist', 'cli.js'), ...args], { cwd: folder, encoding: 'utf8' });
      expect({ line, status, stderr: status === 0 ? '' : stderr }).toEqual({ line, status: 0, stderr: '' });
    }
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
});

test('the tables are those of kv.formats()', async () => {
  const { types, presets } = (await load()).formats();
  const listed = table('types').flatMap(([names, , bits]) => {
    const widths = [...new Set(words(names!).map((name) => types.find((type) => type.name === name)?.bits))];
    expect({ names, bits }).toEqual({ names, bits: widths.join(', ') });
    return words(names!);
  });
  expect(listed.toSorted()).toEqual(types.map((type) => type.name).toSorted());
  const rows = table('presets').flatMap(([names, key, value]) => words(names!).map((name) => ({ name, key: words(key!)[0] ?? name, value: words(value!)[0] ?? name })));
  const byName = (a: { name: string }, b: { name: string }) => (a.name < b.name ? -1 : 1);
  expect(rows.toSorted(byName)).toEqual([...presets].map(({ name, key, value }) => ({ name, key, value })).toSorted(byName));
});

test('links lead to files of the repository', () => {
  for (const document of documents) {
    const text = readFileSync(join(root, document), 'utf8');
    for (const [, target] of text.matchAll(/\]\((?!https?:|#)([^)#]+)/g)) {
      expect({ document, target, there: existsSync(join(root, dirname(document), target!)) }).toEqual({ document, target, there: true });
    }
  }
});
