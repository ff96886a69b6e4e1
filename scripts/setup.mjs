#!/usr/bin/env node
// Puts everything that a build needs in place; quick when it is there already. `npm run setup`; build, start and test
// call it. On Debian packages are installed with apt-get (as root or with sudo); everything else stays in .toolchain/.
// Elsewhere it says what is missing. scripts/README.md lists what is fetched and why.
import { cpSync, existsSync, mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { Failure, inRoot, isMain, output, read, root, run, say, script, seconds, toolchain, which } from './lib.mjs';

// Pinned. Of a Debian package the upstream version must match; another Debian revision is only mentioned.
const PINS = {
  emscripten: { suite: 'trixie', upstream: '3.1.69', version: '3.1.69+dfsg-3', oldest: '3.1.58' },
  highway: { suite: 'trixie', upstream: '1.2.0', version: '1.2.0-2', oldest: '1.0.7' },
  protobuf: { upstream: '3.21.12' },
  llvm: '19',
  // nvcc, as packages of PyPI.
  cuda: { 'nvidia-cuda-nvcc': '13.5.37', 'nvidia-cuda-crt': '13.5.37', 'nvidia-cuda-runtime': '13.5.37', 'nvidia-nvvm': '13.5.37' },
};

const PACKAGES = {
  build: [
    'ca-certificates', 'ccache', 'clang-19', 'cmake', 'g++', 'lld-19', 'llvm-19', 'ninja-build',
    'protobuf-compiler', 'python3', 'xz-utils',
  ],
  test: ['brotli', 'chromium', 'libclang-rt-19-dev', 'libgtest-dev', 'libprotobuf-dev', 'nlohmann-json3-dev'],
};

const debian = Boolean(which('apt-get') && which('dpkg-query')) && process.platform === 'linux';

// ---- Debian packages

function missingPackages(names) {
  const shown = output('dpkg-query', ['-W', '-f', '${Package} ${db:Status-Status}\n']);
  const installed = new Set(shown.split('\n').filter((line) => line.endsWith(' installed')).map((line) => line.split(' ')[0]));
  return names.filter((name) => !installed.has(name));
}

function aptGet(args) {
  const asRoot = process.getuid?.() === 0;
  if (!asRoot && !which('sudo')) throw new Failure(`needs root or sudo for: apt-get ${args.join(' ')}`);
  const env = ['DEBIAN_FRONTEND=noninteractive'];
  const common = ['-qq', '-o', 'Dpkg::Use-Pty=0', '-o', 'Acquire::Retries=3', '-o', 'DPkg::Lock::Timeout=300'];
  if (asRoot) run('env', [...env, 'apt-get', ...common, ...args]);
  else run('sudo', ['env', ...env, 'apt-get', ...common, ...args]);
}

function installPackages(groups) {
  const missing = missingPackages(groups.flatMap((group) => PACKAGES[group]));
  if (missing.length === 0) return;
  say(`installing ${missing.join(' ')}`);
  // A third-party source that does not answer makes update fail; what counts is whether the packages then install.
  try {
    aptGet(['update']);
  } catch (error) {
    say(`apt-get update: ${error.message}; going on with what it has`);
  }
  aptGet(['install', '-y', '--no-install-recommends', ...missing]);
}

/** apt-get on a list of its own: one suite of the mirror that this machine uses, nothing of the system touched. */
function privateApt(suite, type) {
  const folder = join(toolchain, `apt-${type}-${suite ?? 'own'}`);
  for (const sub of ['lists/partial', 'archives/partial']) mkdirSync(join(folder, sub), { recursive: true });
  const sources = join(folder, 'list.sources');
  writeFileSync(sources, debianSource(suite, type));
  const options = [
    ['Dir::Etc::sourcelist', sources], ['Dir::Etc::sourceparts', '/dev/null'], ['Dir::State::Lists', join(folder, 'lists')],
    ['Dir::Cache', folder], ['APT::Sandbox::User', 'root'], ['Acquire::Retries', '3'], ['Acquire::Languages', 'none'],
  ].flatMap(([name, value]) => ['-o', `${name}=${value}`]);
  const get = (args, cwd = folder) => run('apt-get', [...options, '-qq', ...args], { cwd });
  get(['update']);
  return { folder, get, policy: (name) => output('apt-cache', [...options, 'policy', name]) };
}

function debianSource(suite, type) {
  const own = suite ?? read('/etc/os-release').match(/^VERSION_CODENAME=(.*)$/m)?.[1];
  const keyring = '/usr/share/keyrings/debian-archive-keyring.gpg';
  const stanza = (uri, signed) =>
    `Types: ${type}\nURIs: ${uri}\nSuites: ${own}\nComponents: main\n${signed ? `Signed-By: ${signed}\n` : ''}`;
  for (const name of readdirSync('/etc/apt/sources.list.d')) {
    if (!name.endsWith('.sources')) continue;
    for (const text of read(join('/etc/apt/sources.list.d', name)).split(/\n\s*\n/)) {
      if (!/debian-archive-keyring/.test(text) || /security/.test(text)) continue;
      const uri = text.match(/^URIs:\s*(\S+)/m)?.[1];
      if (uri) return stanza(uri, text.match(/^Signed-By:\s*(\S+)/m)?.[1]);
    }
  }
  const lists = readdirSync('/etc/apt/sources.list.d').filter((name) => name.endsWith('.list'));
  for (const path of ['/etc/apt/sources.list', ...lists.map((name) => join('/etc/apt/sources.list.d', name))]) {
    const line = read(path).match(/^deb\s+(?:\[[^\]]*\]\s+)?(\S+\/debian\/?)\s+\S+\s+.*\bmain\b/m);
    if (line) return stanza(line[1], existsSync(keyring) ? keyring : '');
  }
  throw new Failure('no Debian archive found in /etc/apt');
}

/** Downloads one .deb and returns its path. */
function fetchDeb(name, pin) {
  const apt = privateApt(pin.suite, 'deb');
  const candidate = apt.policy(name).match(/Candidate: (?:\d+:)?(\S+)/)?.[1] ?? 'none';
  if (candidate.split(/[-+~]/)[0] !== pin.upstream) {
    throw new Failure(`${name} ${pin.version} is pinned, but Debian ${pin.suite} offers ${candidate}`);
  }
  if (candidate.replace(/\+b\d+$/, '') !== pin.version) say(`${name}: pinned ${pin.version}, taking Debian's revision ${candidate}`);
  const folder = join(apt.folder, 'archives');
  for (const file of readdirSync(folder)) if (file.startsWith(`${name}_`)) rmSync(join(folder, file));
  apt.get(['download', name], folder);
  const file = readdirSync(folder).find((entry) => entry.startsWith(`${name}_`) && entry.endsWith('.deb'));
  if (!file) throw new Failure(`apt-get download ${name} left no file`);
  return join(folder, file);
}

function unpackDeb(deb, folder, excludes = []) {
  rmSync(folder, { recursive: true, force: true });
  mkdirSync(folder, { recursive: true });
  const tar = ['tar', '-x', '-C', folder, ...excludes.map((pattern) => `--exclude=${pattern}`)];
  run('bash', ['-c', 'set -o pipefail; deb=$1; shift; dpkg-deb --fsys-tarfile "$deb" | "$@"', 'unpack', deb, ...tar]);
  rmSync(deb);
}

/** Does `make` unless the stamp in `folder` already says `content`. */
function once(folder, content, make) {
  const stamp = join(folder, '.stamp');
  if (read(stamp) === content) return;
  make();
  mkdirSync(folder, { recursive: true });
  writeFileSync(stamp, content);
}

const atLeast = (version, oldest) => {
  const [a, b] = [version, oldest].map((text) => text.split('.').map(Number));
  for (let i = 0; i < 3; i++) if ((a[i] ?? 0) !== (b[i] ?? 0)) return (a[i] ?? 0) > (b[i] ?? 0);
  return true;
};

// ---- Emscripten: KVP_EMSCRIPTEN_ROOT, EMSDK, an emcc on PATH that is new enough, else Debian's package, unpacked

function emscriptenVersion(folder) {
  return read(join(folder, 'emscripten-version.txt')).replace(/["\s]/g, '').match(/^[\d.]+/)?.[0] ?? '';
}

function setUpEmscripten() {
  const note = join(toolchain, 'emscripten-root');
  const choose = (folder) => {
    if (read(note).trim() !== folder) writeFileSync(note, `${folder}\n`);
  };
  const onPath = which('emcc');
  const own = [
    process.env.KVP_EMSCRIPTEN_ROOT,
    process.env.EMSDK && join(process.env.EMSDK, 'upstream', 'emscripten'),
    onPath && output('dirname', [output('realpath', [onPath]) || onPath]),
  ].filter(Boolean);
  for (const folder of own) {
    const version = emscriptenVersion(folder);
    if (version && atLeast(version, PINS.emscripten.oldest)) {
      if (version !== PINS.emscripten.upstream) say(`Emscripten ${version} in ${folder} (tested with ${PINS.emscripten.upstream})`);
      return choose(folder);
    }
    if (version) say(`Emscripten ${version} in ${folder} is older than ${PINS.emscripten.oldest}; not used`);
  }
  if (!debian) {
    throw new Failure(
      `no Emscripten ${PINS.emscripten.oldest} or newer. Install emsdk (emsdk install ${PINS.emscripten.upstream}), ` +
        'then set EMSDK or put emcc on PATH.',
    );
  }
  const folder = join(toolchain, 'emscripten');
  const home = join(folder, 'usr', 'share', 'emscripten');
  // emcc reads the file .emscripten beside itself, so no environment variable is needed later.
  const config = [
    "LLVM_ROOT = '/usr/bin'",
    `BINARYEN_ROOT = '${inRoot('node_modules', 'binaryen')}'`,
    `NODE_JS = '${process.execPath}'`,
    'FROZEN_CACHE = True',
    `LLVM_ADD_VERSION = '${PINS.llvm}'`,
    `CLANG_ADD_VERSION = '${PINS.llvm}'`,
    '',
  ].join('\n');
  once(folder, `${PINS.emscripten.version}\n${config}`, () => {
    if (emscriptenVersion(home) !== PINS.emscripten.upstream) {
      say(`unpacking Emscripten ${PINS.emscripten.upstream} (237 MB download)`);
      unpackDeb(fetchDeb('emscripten', PINS.emscripten), folder, [
        '*/test/*', '*/lto/*', '*/thinlto/*', '*/lto-pic/*', '*/pic/*', '*asan*', '*ubsan*', '*/docs/*', './usr/share/doc*',
      ]);
    }
    writeFileSync(join(home, '.emscripten'), config);
  });
  const version = emscriptenVersion(home);
  if (version !== PINS.emscripten.upstream) throw new Failure(`Emscripten ${PINS.emscripten.upstream} is pinned, ${version} was unpacked`);
  choose(home);
}

// ---- Headers

function highwayVersion(include) {
  const text = read(join(include, 'hwy', 'base.h')) + read(join(include, 'hwy', 'highway.h'));
  return ['MAJOR', 'MINOR', 'PATCH'].map((part) => text.match(new RegExp(`define HWY_${part} (\\d+)`))?.[1] ?? '0').join('.');
}

function setUpHighway() {
  if (!debian) {
    const found = ['/usr/local/include', '/opt/homebrew/include', '/usr/include'].some(
      (include) => existsSync(join(include, 'hwy', 'highway.h')) && atLeast(highwayVersion(include), PINS.highway.oldest),
    );
    if (!found && !process.env.CMAKE_PREFIX_PATH) throw new Failure(`no Highway ${PINS.highway.oldest} or newer (brew install highway)`);
    return;
  }
  const folder = join(toolchain, 'highway');
  once(folder, `${PINS.highway.version}\n`, () => {
    say(`unpacking the headers of Highway ${PINS.highway.upstream}`);
    unpackDeb(fetchDeb('libhwy-dev', PINS.highway), folder);
    cpSync(join(folder, 'usr', 'include'), join(folder, 'include'), { recursive: true });
    rmSync(join(folder, 'usr'), { recursive: true });
  });
  const version = highwayVersion(join(folder, 'include'));
  if (version !== PINS.highway.upstream) throw new Failure(`Highway ${PINS.highway.upstream} is pinned, ${version} was unpacked`);
}

// ---- protobuf's source; CMake builds the lite library from it, once for each kind of target

function setUpProtobuf() {
  const { upstream } = PINS.protobuf;
  const own = process.env.KVP_PROTOBUF_SOURCE;
  if (own) {
    if (!existsSync(join(own, 'src/google/protobuf/message_lite.h'))) throw new Failure(`KVP_PROTOBUF_SOURCE=${own} is no protobuf source`);
    return;
  }
  const folder = join(toolchain, 'protobuf');
  if (!debian) {
    if (existsSync(join(folder, 'src/google/protobuf/message_lite.h'))) return;
    throw new Failure(
      `no protobuf source. Unpack the release tarball protobuf-cpp-${upstream} (release v21.12) and set ` +
        'KVP_PROTOBUF_SOURCE to its folder; protoc must be the same version.',
    );
  }
  once(folder, `${upstream}\n`, () => {
    say(`fetching the source of protobuf ${upstream}`);
    const apt = privateApt(undefined, 'deb-src');
    apt.get(['source', '--download-only', 'protobuf']);
    const file = readdirSync(apt.folder).find((name) => name.startsWith(`protobuf_${upstream}.orig.tar`));
    if (!file) throw new Failure(`protobuf ${upstream} is pinned, but apt-get source brought another one`);
    rmSync(folder, { recursive: true, force: true });
    mkdirSync(folder, { recursive: true });
    run('tar', ['-x', '-f', join(apt.folder, file), '-C', folder, '--strip-components=1']);
  });
  const header = read(join(folder, 'src/google/protobuf/stubs/common.h')).match(/GOOGLE_PROTOBUF_VERSION (\d+)/)?.[1];
  if (header !== '3021012') throw new Failure(`protobuf ${upstream} is pinned, the source says ${header}`);
}

// ---- nvcc for the CUDA kernels, which are optional: CUDACXX, an nvcc on PATH, else PyPI's packages, unpacked

function setUpCuda() {
  if (process.env.KVPAGES_CUDA === 'off' || process.env.CUDACXX || which('nvcc')) return;
  if (process.platform !== 'linux' || !['x64', 'arm64'].includes(process.arch)) return;
  const folder = join(toolchain, 'cuda');
  const wanted = Object.entries(PINS.cuda).map(([name, version]) => `${name}==${version}`);
  try {
    once(folder, `${wanted.join('\n')}\n`, () => {
      say(`fetching nvcc ${PINS.cuda['nvidia-cuda-nvcc']} (125 MB download; KVPAGES_CUDA=off does without)`);
      if (!output('python3', ['-m', 'pip', '--version'])) {
        if (!debian) throw new Failure('python3 has no pip');
        aptGet(['install', '-y', '--no-install-recommends', 'python3-pip']);
      }
      rmSync(folder, { recursive: true, force: true });
      const pip = ['-m', 'pip', '--quiet', '--disable-pip-version-check', '--no-input', '--retries', '2', '--timeout', '30'];
      run('python3', [...pip, 'install', '--no-deps', '--only-binary', ':all:', '--no-warn-script-location', '--target', folder, ...wanted], {
        env: { ...process.env, PIP_ROOT_USER_ACTION: 'ignore' },
      });
    });
  } catch (error) {
    if (!(error instanceof Failure)) throw error;
    rmSync(folder, { recursive: true, force: true });
    say(`no nvcc: ${error.message}; the addon is built without CUDA kernels`);
  }
}

// ---- npm packages

/** Whether node_modules has every package of the lock file in its version (optional ones for other platforms aside). */
function packagesAreThere() {
  const lock = JSON.parse(readFileSync(inRoot('package-lock.json'), 'utf8')).packages;
  return Object.entries(lock).every(([path, entry]) => {
    if (!path || entry.link) return true;
    const there = read(inRoot(path, 'package.json'));
    if (!there) return Boolean(entry.optional || entry.devOptional || entry.peer);
    return JSON.parse(there).version === entry.version;
  });
}

function installNpmPackages() {
  if (packagesAreThere()) return;
  say('npm ci');
  // --force: a development package for linux-x64 alone must not stop other platforms.
  const force = process.platform === 'linux' && process.arch === 'x64' ? [] : ['--force'];
  run('npm', ['ci', '--ignore-scripts', '--no-audit', '--no-fund', ...force], { shell: process.platform === 'win32' });
}

// ---- Elsewhere than on Debian: say what is missing

function checkPrograms(tests) {
  const wanted = [
    ['cmake', 'cmake 3.25 or newer'], ['ninja', 'ninja'], ['protoc', `protoc ${PINS.protobuf.upstream}`], ['python3', 'python 3'],
    ...(tests ? [['clang++', 'clang (sanitizers, libFuzzer)']] : []),
  ];
  const missing = wanted.filter(([program]) => !which(program)).map(([, text]) => text);
  if (missing.length) {
    throw new Failure(`missing: ${missing.join(', ')}. brew: cmake ninja protobuf@21 python3 highway googletest ccache llvm`);
  }
}

/** Several may set up in one folder at once: the first does it, the others wait. */
async function locked(body) {
  const lock = join(toolchain, 'setup.lock');
  for (;;) {
    try {
      writeFileSync(lock, String(process.pid), { flag: 'wx' });
      break;
    } catch (error) {
      if (error.code !== 'EEXIST') throw error;
      const owner = Number(read(lock));
      let alive = true;
      try {
        if (owner) process.kill(owner, 0);
      } catch (signal) {
        alive = signal.code === 'EPERM';
      }
      if (!alive) rmSync(lock, { force: true });
      else await new Promise((resolve) => setTimeout(resolve, 500));
    }
  }
  try {
    return body();
  } finally {
    rmSync(lock, { force: true });
  }
}

export async function setup({ tests = true } = {}) {
  const [major] = process.versions.node.split('.');
  if (Number(major) < 20) throw new Failure(`Node 20 or newer is needed, this is ${process.version}`);
  const began = Date.now();
  mkdirSync(toolchain, { recursive: true });
  // Emscripten's tools are CommonJS; without this they would inherit "type": "module" from the project.
  if (!existsSync(join(toolchain, 'package.json'))) writeFileSync(join(toolchain, 'package.json'), '{"type":"commonjs"}\n');
  await locked(() => {
    if (debian) installPackages(tests ? ['build', 'test'] : ['build']);
    else checkPrograms(tests);
    installNpmPackages();
    setUpEmscripten();
    setUpHighway();
    setUpProtobuf();
    setUpCuda();
  });
  say(`set up in ${seconds(began)} (${root})`);
}

if (isMain(import.meta)) await script(() => setup({ tests: !process.argv.includes('--no-tests') }));
