// SPDX-License-Identifier: Apache-2.0
// Token ids of texts and chats, by the tokenizer of Hugging Face where it is installed. Lists of ids need none.
import { KvPagesError } from '../errors.js';

export interface ChatMessage {
  readonly role: string;
  readonly content: string;
}

/** A text, a chat, or token ids. */
export type Text = string | readonly ChatMessage[] | readonly number[];

export interface Tokenizer {
  /** @param goOn whether the model is to speak next */
  encode(text: Text, goOn: boolean): number[];
}

interface TokenizerModule {
  readonly Tokenizer: new (tokenizer: object, config: object) => { encode(text: string, options?: object): { ids: number[] } };
}
interface TemplateModule {
  readonly Template: new (text: string) => { render(values: object): string };
}

/** What is read of `tokenizer_config.json`. */
interface TokenizerConfig {
  readonly chat_template?: string | ReadonlyArray<{ readonly name: string; readonly template: string }>;
  readonly bos_token?: string | { readonly content: string } | null;
  readonly eos_token?: string | { readonly content: string } | null;
}

export const isIds = (text: Text): text is readonly number[] => Array.isArray(text) && text.every((part) => typeof part === 'number');

/**
 * The tokenizer of a model's folder.
 * @param tokenizer contents of `tokenizer.json`
 * @param config contents of `tokenizer_config.json`
 * @throws KvPagesError `ERR_BACKEND` with the command that installs it; `ERR_CORRUPT` where the files are not understood
 */
export async function openTokenizer(tokenizer: object, config: object): Promise<Tokenizer> {
  const { Tokenizer } = await optional<TokenizerModule>('@huggingface/tokenizers');
  const settings = config as TokenizerConfig;
  const template = typeof settings.chat_template === 'string' ? settings.chat_template : settings.chat_template?.find(({ name }) => name === 'default')?.template;
  const chats = template === undefined ? undefined : new (await optional<TemplateModule>('@huggingface/jinja')).Template(template);
  let encoder: InstanceType<TokenizerModule['Tokenizer']>;
  try {
    encoder = new Tokenizer(tokenizer, config);
  } catch (cause) {
    throw new KvPagesError('ERR_CORRUPT', `tokenizer: must be what @huggingface/tokenizers reads, got: ${(cause as Error).message}`, { argument: 'tokenizer' }, { cause });
  }
  const word = (token: TokenizerConfig['bos_token']) => (typeof token === 'string' ? token : (token?.content ?? ''));
  return {
    encode(text, goOn) {
      if (typeof text === 'string') return encoder.encode(text).ids;
      if (isIds(text)) return [...text];
      // A model without a template for chats reads what was said.
      if (chats === undefined) return encoder.encode(text.map(({ content }) => content).join('\n')).ids;
      const whole = chats.render({ messages: text, add_generation_prompt: goOn, bos_token: word(settings.bos_token), eos_token: word(settings.eos_token) });
      return encoder.encode(whole, { add_special_tokens: false }).ids;
    },
  };
}

async function optional<T>(name: string): Promise<T> {
  try {
    return (await import(/* @vite-ignore */ /* webpackIgnore: true */ name)) as T;
  } catch (cause) {
    const message = `${name} does not load here; install it with: npm install @huggingface/tokenizers @huggingface/jinja (or give token ids)`;
    throw new KvPagesError('ERR_BACKEND', message, { argument: 'tokenizer', expected: name }, { cause });
  }
}

/**
 * The texts in a JSON value: a string, a chat (messages with role and content), token ids, `{ messages | text | tokens }`, or a list of these.
 * @throws KvPagesError `ERR_ARGUMENT` that names the place
 */
export function readTexts(value: unknown, name: string): Text[] {
  const isMessage = (part: unknown): part is ChatMessage =>
    typeof part === 'object' && part !== null && typeof (part as ChatMessage).role === 'string' && typeof (part as ChatMessage).content === 'string';
  const one = (part: unknown): Text | undefined => {
    if (typeof part === 'string') return part;
    if (Array.isArray(part) && part.length > 0 && (part.every(isMessage) || part.every((id) => Number.isSafeInteger(id) && id >= 0))) return part as Text;
    if (typeof part !== 'object' || part === null || Array.isArray(part)) return undefined;
    const { messages, text, tokens } = part as Record<string, unknown>;
    return one(messages ?? text ?? tokens);
  };
  const whole = one(value);
  if (whole !== undefined) return [whole];
  const list = Array.isArray(value) ? value.map(one) : [];
  const bad = list.findIndex((text) => text === undefined);
  if (list.length > 0 && bad < 0) return list as Text[];
  throw new KvPagesError('ERR_ARGUMENT', `${name}: must hold texts, chats or token ids${bad < 0 ? '' : `, which entry ${bad} is not`}`, { argument: name });
}
