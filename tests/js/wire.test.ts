// SPDX-License-Identifier: Apache-2.0
// Files against another implementation of protobuf: what the core writes is read by protobufjs, what protobufjs
// writes (other orders, other spellings, unknown fields) is read by the core.
import protobuf from 'protobufjs';
import { beforeAll, describe, expect, it } from 'vitest';
import type { KvPages } from '../../js/index.js';
import { errorOf, hex, loadHere, noise, readRepositoryFile } from './support.js';

const schema = new TextDecoder().decode(await readRepositoryFile('src/wire/kvpages.proto'));
// Wire types of the schema, with the names of fields as they are.
const { root } = protobuf.parse(schema, { keepCase: true });
const PagedCacheProto = root.lookupType('kvpages_wire.PagedCacheProto');

const [float, int8, float16, bfloat16, uint4, int4] = [1, 3, 10, 16, 21, 22];

let kv: KvPages;
beforeAll(async () => {
  kv = await loadHere();
});

function encode(message: object): Uint8Array {
  expect(PagedCacheProto.verify(message)).toBeNull();
  return PagedCacheProto.encode(PagedCacheProto.create(message)).finish();
}
/** The message as plain numbers and bytes. */
function decode(bytes: Uint8Array): any {
  return PagedCacheProto.toObject(PagedCacheProto.decode(bytes), { longs: Number });
}
const bytes = (view: ArrayBufferView) => new Uint8Array(view.buffer, view.byteOffset, view.byteLength);
const floats = (...values: number[]) => bytes(Float32Array.from(values));

const logical = (dims: number[]) => ({
  tensor_type: { elem_type: float, shape: { dim: dims.map((dim_value) => ({ dim_value })) } },
});
const dense = { dims: [1, 1, 2, 2], data_type: float, raw_data: floats(1, 2, 3, 4) };
const affine = (more: object = {}) => ({
  affine: {
    storage_type: int4,
    scale: { data_type: float, raw_data: floats(0.5) },
    zero_point: { data_type: int4, raw_data: Uint8Array.of(1) },
    ...more,
  },
  logical_type: logical([1, 1, 2, 2]),
  raw_data: Uint8Array.of(0x21, 0x43),
});

describe('what the core writes', () => {
  it('is what protobufjs reads', () => {
    const key = { dims: [1, 2, 3, 4], data: noise(24) };
    const value = { type: 'bf16', dims: [1, 2, 3, 2], data: Uint16Array.from({ length: 12 }, (_, i) => 0x3f80 + i) };
    const source = kv.createPagedCache([
      { key, value },
      { key, value, length: 2 },
    ]);
    const cache = source.quantize([1], { key: { type: 'int4', scale: 0.25, zeroPoint: -3 }, value: { type: 'f16' } });
    const message = decode(cache.serialize());
    expect(message).toEqual({
      blocks: [
        {
          start: 0,
          length: 3,
          key: { dims: [1, 2, 3, 4], data_type: float, raw_data: expect.anything() },
          value: { dims: [1, 2, 3, 2], data_type: bfloat16, raw_data: expect.anything() },
        },
        {
          start: 3,
          length: 2,
          encoded_key: {
            affine: {
              storage_type: int4,
              scale: { data_type: float, raw_data: expect.anything() },
              zero_point: { data_type: int4, raw_data: expect.anything() },
            },
            logical_type: logical([1, 2, 3, 4]),
            raw_data: expect.anything(),
          },
          value: { dims: [1, 2, 3, 2], data_type: float16, raw_data: expect.anything() },
        },
      ],
    });
    const [first, second] = message.blocks;
    expect(hex(first.key.raw_data)).toBe(hex(key.data));
    expect(hex(first.value.raw_data)).toBe(hex(value.data));
    expect(hex(second.encoded_key.raw_data)).toBe(hex(cache.page(1).key.codes));
    expect(hex(second.encoded_key.affine.scale.raw_data)).toBe(hex(floats(0.25)));
    expect(second.encoded_key.affine.zero_point.raw_data.length).toBe(1);
    expect(hex(second.value.raw_data)).toBe(hex(cache.page(1).value.data));
  });

  it('is byte for byte what protobufjs writes for dense pages', () => {
    const cache = kv.createPagedCache([
      {
        key: { dims: [1, 1, 2, 2], data: Float32Array.of(1, 2, 3, 4) },
        value: { dims: [1, 1, 2, 1], data: Float32Array.of(5, 6) },
      },
    ]);
    const fields = decode(cache.serialize());
    expect(hex(kv.parse(encode(fields)).serialize())).toBe(hex(cache.serialize()));
  });
});

describe('what protobufjs writes', () => {
  it('is read, with name and text', () => {
    const cache = kv.parse(
      encode({
        blocks: [{ start: 0, length: 2, key: dense, encoded_value: affine() }],
        name: 'layer 7',
        doc_string: 'Ünïcode',
      }),
    );
    expect([cache.name, cache.docString, cache.tokens]).toEqual(['layer 7', 'Ünïcode', 2]);
    expect(Array.from(cache.page(0).key.dequantize().data)).toEqual([1, 2, 3, 4]);
    // Codes 1 2 3 4, zero point 1, scale 0.5.
    expect(Array.from(cache.page(0).value.dequantize().data)).toEqual([0, 0.5, 1, 1.5]);
    const again = kv.parse(cache.serialize());
    expect([again.name, again.docString]).toEqual(['layer 7', 'Ünïcode']);
  });

  it('is read in either spelling of dense data', () => {
    const spellings = [
      { dims: [1, 1, 2, 2], data_type: float, float_data: [1, 2, 3, 4] },
      { dims: [1, 1, 2, 2], data_type: float16, int32_data: [0x3c00, 0x4000, 0x4200, 0x4400] },
      { dims: [1, 1, 2, 2], data_type: bfloat16, int32_data: [0x3f80, 0x4000, 0x4040, 0x4080] },
      { dims: [1, 1, 2, 2], data_type: float16, raw_data: bytes(Uint16Array.of(0x3c00, 0x4000, 0x4200, 0x4400)) },
    ];
    for (const key of spellings) {
      const page = kv.parse(encode({ blocks: [{ start: 0, length: 2, key, value: dense }] })).page(0);
      expect(Array.from(page.key.dequantize().data)).toEqual([1, 2, 3, 4]);
    }
  });

  it('is read in either spelling of an affine type and its scale', () => {
    const scale = { data_type: float, float_data: [0.5] };
    for (const layout of [
      affine({ scale }),
      affine({ storage_type: undefined, signed_storage: true }),
      affine({ storage_type: undefined, signed_storage: true, scale }),
    ]) {
      const page = kv.parse(encode({ blocks: [{ start: 0, length: 2, encoded_key: layout, value: dense }] })).page(0);
      expect(page.key.info.type).toBe('int4');
      expect(Array.from(page.key.dequantize().data)).toEqual([0, 0.5, 1, 1.5]);
    }
    const eight = {
      affine: { storage_type: int8, scale },
      logical_type: logical([1, 1, 2, 2]),
      raw_data: Uint8Array.of(1, 0xff, 127, 128),
    };
    const page = kv.parse(encode({ blocks: [{ start: 0, length: 2, encoded_key: eight, value: dense }] })).page(0);
    expect(Array.from(page.key.dequantize().data)).toEqual([0.5, -0.5, 63.5, -64]);
  });

  it('is read with scales per axis and per block', () => {
    const logical_type = logical([1, 1, 2, 4]);
    const raw_data = Uint8Array.of(0x21, 0x43, 0x65, 0x87);
    const value = { dims: [1, 1, 2, 4], data_type: float, raw_data: new Uint8Array(32) };
    const layouts: Array<[object, number[]]> = [
      [{ axis: 2, scale: { dims: [2], data_type: float, raw_data: floats(1, 2) } }, [1, 2, 3, 4, 10, 12, 14, 16]],
      [
        { axis: -1, scale: { dims: [4], data_type: float, raw_data: floats(1, 2, 3, 4) } },
        [1, 4, 9, 16, 5, 12, 21, 32],
      ],
      [
        { axis: 3, block_size: 2, scale: { dims: [1, 1, 2, 2], data_type: float, raw_data: floats(1, 2, 3, 4) } },
        [1, 2, 6, 8, 15, 18, 28, 32],
      ],
    ];
    for (const [layout, values] of layouts) {
      const encoded_key = { affine: { storage_type: uint4, ...layout }, logical_type, raw_data };
      const cache = kv.parse(encode({ blocks: [{ start: 0, length: 2, encoded_key, value }] }));
      expect(Array.from(cache.page(0).key.dequantize().data)).toEqual(values);
      expect(Array.from(kv.parse(cache.serialize()).page(0).key.dequantize().data)).toEqual(values);
    }
  });

  it('is read in any order of fields', () => {
    const message = { blocks: [{ start: 0, length: 2, encoded_key: affine(), value: dense }], name: 'x' };
    const cache = kv.parse(encode(message));
    expect(hex(kv.parse(reversed(encode(message))).serialize())).toBe(hex(cache.serialize()));
  });

  it('keeps unknown fields of a round trip', () => {
    // Field 77, bytes "abc", behind the cache and inside its only block.
    const unknown = Uint8Array.of(0xea, 0x04, 3, 0x61, 0x62, 0x63);
    const block = encodeBlock({ start: 0, length: 2, key: dense, value: dense });
    const inner = Uint8Array.from([...block, ...unknown]);
    const file = Uint8Array.from([0x0a, ...varint(inner.length), ...inner, ...unknown]);
    const written = hex(kv.parse(file).serialize());
    expect(written.split(hex(unknown)).length - 1).toBe(2);
  });

  it('carries structured encodings unchanged and refuses to convert them', () => {
    const encoded_key = {
      struct_type: { name: 'Q4_K', array: { element_type: { tensor_type: { elem_type: 2 } }, dimension: 4 } },
      logical_type: logical([1, 1, 2, 2]),
      raw_data: Uint8Array.of(1, 2, 3, 4),
    };
    const file = encode({ blocks: [{ start: 0, length: 2, encoded_key, value: dense }] });
    const cache = kv.parse(file);
    expect(cache.pages[0]!.key.kind).toBe('opaque');
    const to = { type: 'int8', scale: 1 } as const;
    expect(errorOf(() => cache.quantize([0], { key: to, value: to }))).toMatchObject({
      code: 'ERR_UNSUPPORTED',
      page: 0,
      side: 'key',
    });
    expect(errorOf(() => cache.page(0).key.dequantize()).code).toBe('ERR_UNSUPPORTED');
    const message = decode(cache.quantize([], { key: to, value: to }).serialize());
    expect(message.blocks[0].encoded_key.struct_type).toEqual(decode(file).blocks[0].encoded_key.struct_type);
    expect(hex(message.blocks[0].encoded_key.raw_data)).toBe('01020304');
  });
});

function encodeBlock(block: object): Uint8Array {
  const type = root.lookupType('kvpages_wire.PagedCacheBlockProto');
  return type.encode(type.create(block)).finish();
}

function varint(value: number): number[] {
  return value < 128 ? [value] : [(value & 127) | 128, ...varint(value >>> 7)];
}

/** The same message with the fields of every level in reverse order (repeated fields keep theirs). */
function reversed(message: Uint8Array, depth = 0): Uint8Array {
  const reader = protobuf.Reader.create(message);
  const fields: Array<{ tag: number; bytes: Uint8Array }> = [];
  while (reader.pos < reader.len) {
    const begin = reader.pos;
    const tag = reader.uint32();
    const header = reader.pos;
    reader.skipType(tag & 7);
    let field = message.slice(begin, reader.pos);
    // Blocks, payloads and layouts are messages; what lies deeper stays.
    const isMessage = (tag & 7) === 2 && ((depth === 0 && tag >>> 3 === 1) || (depth === 1 && tag >>> 3 >= 3));
    if (isMessage) {
      const inner = protobuf.Reader.create(message.slice(header, reader.pos)).bytes();
      const swapped = reversed(inner, depth + 1);
      field = Uint8Array.from([...message.slice(begin, header), ...varint(swapped.length), ...swapped]);
    }
    fields.push({ tag, bytes: field });
  }
  const tags = [...new Set(fields.map((field) => field.tag))].reverse();
  return Uint8Array.from(
    tags.flatMap((tag) => fields.filter((field) => field.tag === tag).flatMap((field) => [...field.bytes])),
  );
}
