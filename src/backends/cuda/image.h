// SPDX-License-Identifier: Apache-2.0
// The kernels inside this binary, compiled and put there by cmake/cuda.cmake.
#pragma once

namespace kvpages::cuda {

const void* KernelImage();   // a fatbin; null where there is none
const char* WhyNoKernels();  // then
int LeastDriverVersion();    // that takes what this nvcc made, as cuDriverGetVersion counts

}  // namespace kvpages::cuda
