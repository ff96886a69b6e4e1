// SPDX-License-Identifier: Apache-2.0
// The one error class. Codes and texts come from the core; a test holds the union below against the core's list.

/** Every code an error can have. `kv.errorCodes` is the same list as the core reports it. */
export type ErrorCode =
  | 'ERR_ARGUMENT'
  | 'ERR_SHAPE'
  | 'ERR_SPEC'
  | 'ERR_NON_FINITE'
  | 'ERR_UNSUPPORTED'
  | 'ERR_CORRUPT'
  | 'ERR_MISMATCH'
  | 'ERR_LIMIT'
  | 'ERR_MEMORY'
  | 'ERR_BUFFER'
  | 'ERR_DISPOSED'
  | 'ERR_ABORTED'
  | 'ERR_BACKEND'
  | 'ERR_DEVICE'
  | 'ERR_INTERNAL';

/** What is known about a failure beside its code and text. A field that does not apply is absent. */
export interface ErrorFields {
  /** Public name of the argument that was refused. */
  argument?: string;
  /** Layer of a model's cache. */
  layer?: number;
  side?: 'key' | 'value';
  /** Index of the page in its cache. */
  page?: number;
  /** Position in the bytes that were read. */
  byteOffset?: number;
  expected?: string;
  actual?: string;
}

/**
 * What every function of this package throws, except for values of the wrong JavaScript type: these are a `TypeError`
 * that names the argument. A call that throws has changed nothing.
 */
export class KvPagesError extends Error implements ErrorFields {
  readonly code: ErrorCode;
  declare readonly argument?: string;
  declare readonly layer?: number;
  declare readonly side?: 'key' | 'value';
  declare readonly page?: number;
  declare readonly byteOffset?: number;
  declare readonly expected?: string;
  declare readonly actual?: string;

  constructor(code: ErrorCode, message: string, fields: ErrorFields = {}, options?: ErrorOptions) {
    super(message, options);
    this.name = 'KvPagesError';
    this.code = code;
    Object.assign(this, fields);
  }

  /**
   * True for the errors of every copy of this class: `kvpages`, `kvpages/safetensors`, ES modules and CommonJS have
   * their own.
   */
  static override [Symbol.hasInstance](value: unknown): boolean {
    return Object.prototype.toString.call(value) === '[object Error]' && (value as Error).name === 'KvPagesError';
  }
}
