// SPDX-License-Identifier: Apache-2.0
// Compile check: every piece of the formats as device code. Not run.
#include "formats/codec.h"
#include "formats/row.h"
#include "formats/schemes.h"
#include "formats/search.h"

namespace kvpages {

__global__ void EncodeElements(Codec codec, const float* x, const uint8_t* scales, const uint8_t* zeros, float global, uint8_t* codes,
                               float* restored, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const Scale scale = LoadScaleAt(codec, scales, zeros, global, i);
    const uint32_t code = Encode(codec, x[i], scale);
    PutCode(codes, codec.bits, i, code);
    restored[i] = Decode(codec, GetCode(codes, codec.bits, i), scale);
  }
}

__global__ void StoreScalesOf(ScaleType type, const float* x, int64_t count, uint8_t* out) {
  const float g = E4M3Global(TreeSum(count, [&](int64_t i) { return x[i] * x[i]; }));
  for (int i = 0; i < kRatioCount; ++i) PutScale(type, out, i, StoreScale(type, Ratio(i) * x[i] + RmsRatio(0), g).bits);
}

__global__ void EncodeBlocks(Type type, SpecOptions options, float amax, float* x, uint8_t* codes, uint8_t* scales, float* restored) {
  const float g = Nvfp4Global(options, amax);
  scales[0] = EncodeNvfp4(x, g, true, codes);
  restored[0] = DecodeNvfp4(codes[0], scales[0], g);
  scales[1] = EncodeMx(type, options.rule, x, codes);
  restored[1] = DecodeMx(type, codes[0], scales[1]);
  EncodeLlama(type, x, codes);
  restored[2] = DecodeLlama(type, codes, 0);
}

__global__ void LoadRows(RowSource source, float* out) { LoadRow(source, blockIdx.x, blockIdx.y, blockIdx.z, out); }

}  // namespace kvpages
