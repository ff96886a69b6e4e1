// SPDX-License-Identifier: Apache-2.0
// What two distributions of the next token have in common: log-softmax, divergence, the most likely token. Row by row what
// `kv.fidelity` gives for many rows at once.

/** Log-probabilities of rows of logits, against which others are measured. */
export class Reference {
  readonly top: Int32Array;
  readonly #logs: Float64Array;
  readonly #shares: Float64Array;

  constructor(
    logits: Float32Array,
    readonly vocabulary: number,
  ) {
    const rows = logits.length / vocabulary;
    this.top = new Int32Array(rows);
    this.#logs = new Float64Array(logits.length);
    this.#shares = new Float64Array(logits.length);
    for (let row = 0; row < rows; ++row) {
      const at = row * vocabulary;
      const values = logits.subarray(at, at + vocabulary);
      this.top[row] = mostLikely(values);
      const { most, logSum } = normalize(values);
      for (let i = 0; i < vocabulary; ++i) {
        const log = values[i]! - most - logSum;
        this.#logs[at + i] = log;
        this.#shares[at + i] = Math.exp(log);
      }
    }
  }

  /** KL(reference || logits) of one row in nats, whether both have the same most likely token, and -log of a token's share. */
  compare(row: number, values: Float32Array, token: number): { kl: number; same: boolean; nll: number } {
    const { most, logSum } = normalize(values);
    const at = row * this.vocabulary;
    let kl = 0;
    for (let i = 0; i < values.length; ++i) {
      const share = this.#shares[at + i]!;
      // Where the reference has no share, 0 * log 0 counts as 0.
      if (share > 0) kl += share * (this.#logs[at + i]! - (values[i]! - most - logSum));
    }
    return { kl: Math.max(0, kl), same: mostLikely(values) === this.top[row], nll: most + logSum - (values[token] ?? NaN) };
  }
}

/** Largest value, and the logarithm of the sum of exponentials relative to it. */
function normalize(values: Float32Array): { most: number; logSum: number } {
  let most = -Infinity;
  for (let i = 0; i < values.length; ++i) if (values[i]! > most) most = values[i]!;
  let sum = 0;
  for (let i = 0; i < values.length; ++i) sum += Math.exp(values[i]! - most);
  return { most, logSum: Math.log(sum) };
}

/** Index of the largest value, the first of equal ones. */
export function mostLikely(values: Float32Array): number {
  let best = 0;
  for (let i = 1; i < values.length; ++i) if (values[i]! > values[best]!) best = i;
  return best;
}
