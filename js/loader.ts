// SPDX-License-Identifier: Apache-2.0
// What the loaders of all environments share: the words of the options, and compiling a WebAssembly module.
import { bindWasm } from './bind-wasm.js';
import { KvPagesError } from './errors.js';
import type { Backend, BackendInfo, Loaded, LoadOptions, WasmSource } from './kv-pages.js';
import { requireOptions, requireString, wrongType } from './tensor.js';

const backendWords = ['auto', 'cuda', 'native', 'wasm'] as const;

/** Outcome of looking for a backend: its functions, or why there are none. */
export type Attempt =
  | { readonly functions: Loaded['functions']; readonly reason: string }
  | { readonly functions?: undefined; readonly reason: string };

export interface Environment {
  /** Stands in for options that are not given. */
  readonly backend?: string | undefined;
  readonly kernels?: string | undefined;
  /** Looks for Node's addon. */
  native(): Attempt;
  /** Looks for a GPU that the addon can use. Opens it where there is one. */
  cuda(): Attempt;
  /** The module beside the script, or what the caller gave. */
  module(source: WasmSource | undefined): Promise<WebAssembly.Module>;
}

/** Chooses and binds a backend. The words and their order are the same everywhere; what there is differs. */
export async function open(
  options: LoadOptions,
  environment: Environment,
): Promise<{ loaded: Loaded; kernels: string; maxBytes: number }> {
  requireOptions(options, 'options', ['backend', 'kernels', 'maxBytes', 'wasm']);
  const backend = requireString(options.backend ?? (environment.backend || 'auto'), 'backend');
  const kernels = requireString(options.kernels ?? (environment.kernels || 'auto'), 'kernels');
  const maxBytes = options.maxBytes ?? 0;
  if (typeof maxBytes !== 'number') throw wrongType('maxBytes', 'must be a number', maxBytes);
  if (!(backendWords as readonly string[]).includes(backend)) {
    throw new KvPagesError('ERR_BACKEND', `backend: must be auto, cuda, native or wasm, got '${backend}'`, {
      argument: 'backend',
      expected: backendWords.join(' '),
      actual: backend,
    });
  }
  const attempts = new Map<Backend, Attempt>();
  const wanted: readonly Backend[] = backend === 'auto' ? ['cuda', 'native', 'wasm'] : [backend as Backend];
  // The addon is looked for in any case, so that backends() can tell; a GPU and WebAssembly only where they are wanted.
  attempts.set('native', environment.native());
  for (const name of wanted) {
    if (name === 'cuda') attempts.set(name, environment.cuda());
    if (name === 'wasm') attempts.set(name, await openWasm(options.wasm, environment));
    const attempt = attempts.get(name)!;
    if (attempt.functions === undefined) continue;
    const others = wanted.slice(0, wanted.indexOf(name)).map((other) => `${other}: ${attempts.get(other)!.reason}`);
    return {
      loaded: {
        functions: attempt.functions,
        backend: name,
        reason: [attempt.reason, ...others].join('; '),
        backends: listOf(attempts),
      },
      kernels,
      maxBytes,
    };
  }
  const reasons = wanted.map((name) => `${name}: ${attempts.get(name)!.reason}`).join('; ');
  throw new KvPagesError('ERR_BACKEND', `backend: '${backend}' is not available here (${reasons})`, {
    argument: 'backend',
    actual: backend,
  });
}

function listOf(attempts: ReadonlyMap<Backend, Attempt>): BackendInfo[] {
  const all: readonly Backend[] = ['cuda', 'native', 'wasm'];
  return all.map((backend) => {
    const attempt = attempts.get(backend) ?? { reason: backend === 'cuda' ? 'not looked for' : 'not needed' };
    const available = attempt.functions !== undefined || (backend === 'wasm' && !attempts.has(backend));
    return { backend, available, reason: attempt.reason };
  });
}

async function openWasm(source: WasmSource | undefined, environment: Environment): Promise<Attempt> {
  try {
    return { functions: await bindWasm(await environment.module(source)), reason: 'the WebAssembly module runs' };
  } catch (error) {
    // A wrong type is the caller's mistake and no property of this environment.
    if (error instanceof TypeError && error.message.startsWith('wasm:')) throw error;
    return { reason: `the WebAssembly module does not load: ${String(error)}` };
  }
}

/** Compiles a module from what `load({ wasm })` takes; a location is read by `fetchLocation`. */
export async function compile(
  source: WasmSource,
  fetchLocation: (location: string | URL) => Promise<Response | BufferSource>,
): Promise<WebAssembly.Module> {
  const given = await source;
  if (Object.prototype.toString.call(given) === '[object WebAssembly.Module]') return given as WebAssembly.Module;
  const found = typeof given === 'string' || given instanceof URL ? await fetchLocation(given) : given;
  if (isBytes(found)) return WebAssembly.compile(found);
  if (typeof Response === 'undefined' || !(found instanceof Response)) {
    throw wrongType('wasm', 'must be a URL, a Response, bytes or a WebAssembly.Module', found);
  }
  if (!found.ok) throw new Error(`${found.url || 'the response'} has status ${found.status}`);
  // Streaming needs the media type, which not every server gives.
  if (found.headers.get('content-type')?.startsWith('application/wasm') && WebAssembly.compileStreaming !== undefined) {
    return WebAssembly.compileStreaming(found);
  }
  return WebAssembly.compile(await found.arrayBuffer());
}

function isBytes(value: unknown): value is BufferSource {
  return ArrayBuffer.isView(value) || Object.prototype.toString.call(value) === '[object ArrayBuffer]';
}

/** Remembers the compiled module of one location; a failure is tried again next time. */
export function once<T>(make: () => Promise<T>): () => Promise<T> {
  let made: Promise<T> | undefined;
  return () =>
    (made ??= make().catch((error: unknown) => {
      made = undefined;
      throw error;
    }));
}
