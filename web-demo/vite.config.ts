// SPDX-License-Identifier: Apache-2.0
// Builds the page into static files that work from any folder of any server. `kvpages` is the package itself, found by its name.
import { defineConfig } from 'vite';

export default defineConfig({
  root: import.meta.dirname,
  base: './',
  // Script files only: inline code and data: workers would not pass the page's policy.
  build: { target: 'es2022', outDir: 'dist', emptyOutDir: true, assetsInlineLimit: 0, modulePreload: { polyfill: false } },
  worker: { format: 'es' },
});
