// SPDX-License-Identifier: Apache-2.0
// What the fake CUDA driver (fake.cc) exports for tests beside the driver's own entries. Loaded with dlopen, found with
// dlsym.
#pragma once

#include <cstdint>

extern "C" {

// Words separated by ';':
//   reset             forgets faults, settings and counts
//   CALL:N:ERROR      the N-th of these calls from now on returns ERROR, a number; N may be '*': every one
//   devices=2 version=12080 capability=6.1 memory=BYTES pitch=BYTES prohibited=1 nameless=1
// The environment variable KVPAGES_FAKE_CUDA holds the first ones.
void KvpFakeSet(const char* words);

// held: bytes of device memory; locked: bytes of page-locked memory; contexts: retained; current: on the calling thread's stack;
// modules: loaded; calls: all but the names of errors; after: calls after the context was lost, but for its release; rash: frees
// of memory while work that this thread asked for was not done; NAME: calls of one entry.
uint64_t KvpFakeGet(const char* what);

}  // extern "C"
