// SPDX-License-Identifier: Apache-2.0
// The browser's worker of the worker test.
import { load } from '../../js/index.js';
import { work } from './worker-task.js';

try {
  postMessage(work(await load()));
} catch (error) {
  postMessage(String(error));
}
