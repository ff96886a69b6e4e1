// SPDX-License-Identifier: Apache-2.0
// Lifetime of objects that the core holds: explicit dispose, the garbage collector as a backstop, and which load()
// an object belongs to.
/// <reference lib="esnext.disposable" preserve="true" />
import type { Core } from './binding.js';
import { KvPagesError } from './errors.js';
import { className, wrongType } from './tensor.js';

/** One `load()`: a bound core and the instance in it. */
export interface Session {
  readonly core: Core;
  readonly instance: number;
  readonly backend: string;
}

// Node 20 and current browsers have the symbol; elsewhere the method is reachable as dispose() alone.
export const disposeSymbol: typeof Symbol.dispose =
  Symbol.dispose ?? (Symbol.for('Symbol.dispose') as typeof Symbol.dispose);

const backstop = new FinalizationRegistry<{ core: Core; handle: number }>(({ core, handle }) => {
  try {
    core.functions['kvp_release']!(handle);
  } catch {
    // An instance that stopped holds nothing any more.
  }
});

export abstract class Owned {
  readonly #session: Session;
  #handle: number;

  /** @internal */
  constructor(session: Session, handle: number) {
    this.#session = session;
    this.#handle = handle;
    backstop.register(this, { core: session.core, handle }, this);
  }

  /** Whether `dispose` has been called. */
  get disposed(): boolean {
    return this.#handle === 0;
  }

  /** Gives the memory back now. Later calls with this object throw `ERR_DISPOSED`; a second `dispose` does nothing. */
  dispose(): void {
    const handle = this.#handle;
    if (handle === 0) return;
    this.#handle = 0;
    backstop.unregister(this);
    try {
      this.#session.core.call('kvp_release', handle);
    } catch (error) {
      // An instance that stopped holds nothing any more; leaving a scope must not throw for it.
      if (!(error instanceof KvPagesError) || error.code !== 'ERR_INTERNAL') throw error;
    }
  }

  [disposeSymbol](): void {
    this.dispose();
  }

  /** @internal */
  protected get session(): Session {
    return this.#session;
  }

  /** Handle of an object that a caller passed; 0, which the core calls disposed, after dispose.
   * @internal */
  static handleOf<T extends Owned>(
    object: unknown,
    type: abstract new (...args: never[]) => T,
    session: Session,
    argument: string,
  ): number {
    if (!(object instanceof type)) throw wrongType(argument, `must be a ${className(type)}`, object);
    const owned: Owned = object;
    if (owned.#session !== session) {
      throw new KvPagesError(
        'ERR_ARGUMENT',
        `${argument}: must be of this instance, got one of another load() (${owned.#session.backend})`,
        {
          argument,
          expected: `an object of this ${session.backend} instance`,
          actual: `an object of another ${owned.#session.backend} instance`,
        },
      );
    }
    return owned.#handle;
  }

  /** @internal */
  protected get handle(): number {
    return this.#handle;
  }
}
