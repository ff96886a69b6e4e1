// SPDX-License-Identifier: Apache-2.0
// The A/B study as a library: what `kvpages ab` runs, for Node and browsers. Public as `kvpages/study`.
export { attendEngine, thawEngine } from './study/engine.js';
export type { Engine } from './study/engine.js';
export { makePlan } from './study/plan.js';
export type { PlanOptions, PlanProgress, PlanResult, SpecCost } from './study/plan.js';
export { defaultSchemes, parseScheme, planScheme } from './study/scheme.js';
export type { Plan, Scheme } from './study/scheme.js';
export { runStudy, writeOn } from './study/study.js';
export type { Divergence, SchemeResult, Sequence, SequenceResult, StudyOptions, StudyProgress, StudyResult } from './study/study.js';
export { isIds, openTokenizer, readTexts } from './study/tokens.js';
export type { ChatMessage, Text, Tokenizer } from './study/tokens.js';
