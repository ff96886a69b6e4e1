// SPDX-License-Identifier: Apache-2.0
// Prompts of a study that names none: a question, a story, a program. Written for this project.
import type { Text } from '../study.js';

export const defaultPrompts: readonly Text[] = [
  [
    {
      role: 'user',
      content:
        'I keep bees in two hives behind the house. Last week one of them became very quiet, and I found many dead bees in front of it. ' +
        'What could have happened, how do I find out, and what should I do for the other hive before the winter?',
    },
  ],
  'It was late in the autumn when the two sisters came back to the house by the river, which neither of them had seen since their ' +
    'father left it to a cousin. The gate stood open, the garden had gone wild, and in the window of the kitchen there was a light. ' +
    '"Somebody must have known that we would come," said the elder, and she was not sure whether the thought pleased her. They went up ' +
    'the path without another word, and before they could knock,',
  [
    { role: 'system', content: 'You are a careful programming assistant.' },
    {
      role: 'user',
      content:
        'Write a JavaScript function that merges two sorted arrays into one sorted array without changing either of them, explain why it ' +
        'takes linear time, and show with an example that equal elements keep their order.',
    },
  ],
];
