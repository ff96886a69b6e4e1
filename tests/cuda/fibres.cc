// SPDX-License-Identifier: Apache-2.0
#include "cuda/fibres.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVP_ASAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define KVP_ASAN 1
#endif
#if defined(KVP_ASAN)
#include <pthread.h>
#include <sanitizer/common_interface_defs.h>
#endif

// glibc's swapcontext makes two system calls, so this is written out where it can be.
#if defined(__x86_64__) && defined(__ELF__)
#define KVP_OWN_SWITCH 1
extern "C" void KvpShimSwitch(void** from, void* to);
__asm__(R"(
  .text
  .globl KvpShimSwitch
  .hidden KvpShimSwitch
  .type KvpShimSwitch, @function
KvpShimSwitch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size KvpShimSwitch, .-KvpShimSwitch
)");
#else
#include <ucontext.h>
#endif

namespace kvpages::cuda::shim {

constinit thread_local Extent t_thread, t_block, t_block_dim, t_grid_dim;
constinit thread_local unsigned char* t_shared = nullptr;

namespace {

constexpr size_t kStackBytes = size_t{256} << 10;
constexpr uint32_t kWarp = 32;

[[noreturn]] void Fail(const char* why) {
  std::fprintf(stderr, "CUDA shim: %s\n", why);
  std::abort();
}

struct Barrier {
  uint32_t arrived = 0, live = 0;
  uint64_t generation = 0;
  void Check() {
    if (arrived == 0 || arrived < live) return;
    arrived = 0;
    ++generation;
  }
};

struct Warp {
  Barrier barrier;
  uint64_t slots[2][kWarp] = {};
};

struct Fibre {
  ~Fibre() {
    if (stack != nullptr) munmap(stack, kStackBytes);
  }
  void* stack = nullptr;
#if defined(KVP_OWN_SWITCH)
  void* pointer = nullptr;
#else
  ucontext_t context;
#endif
  void* fake_stack = nullptr;
  Extent thread;
  uint32_t index = 0;         // of the thread in its block
  uint32_t exchanges = 0;
  const Barrier* waits = nullptr;
  uint64_t generation = 0;
  bool idle = true;
};

// Set once a thread that ends has destroyed its scheduler: what is launched later, by the destructors of others, is not run.
constinit thread_local bool t_ended = false;

struct Scheduler {
  ~Scheduler() { t_ended = true; }
  std::vector<std::unique_ptr<Fibre>> fibres;
  Fibre* current = nullptr;
#if defined(KVP_OWN_SWITCH)
  void* pointer = nullptr;
#else
  ucontext_t context;
#endif
  void* fake_stack = nullptr;
  const void* bottom = nullptr;  // of the stack that calls Run
  size_t bytes = 0;
  const std::function<void()>* thread = nullptr;
  uint32_t next = 0, count = 0;  // threads of the block not yet begun from `next` on
  Barrier block;
  std::vector<Warp> warps;
  Extent dim;
};
thread_local Scheduler t_scheduler;

void Enter(Fibre& fibre) {
#if defined(KVP_ASAN)
  __sanitizer_start_switch_fiber(&t_scheduler.fake_stack, fibre.stack, kStackBytes);
#endif
  t_scheduler.current = &fibre;
  t_thread = fibre.thread;
#if defined(KVP_OWN_SWITCH)
  KvpShimSwitch(&t_scheduler.pointer, fibre.pointer);
#else
  swapcontext(&t_scheduler.context, &fibre.context);
#endif
#if defined(KVP_ASAN)
  __sanitizer_finish_switch_fiber(t_scheduler.fake_stack, nullptr, nullptr);
#endif
}

void Leave(Fibre& fibre) {
#if defined(KVP_ASAN)
  __sanitizer_start_switch_fiber(&fibre.fake_stack, t_scheduler.bottom, t_scheduler.bytes);
#endif
#if defined(KVP_OWN_SWITCH)
  KvpShimSwitch(&fibre.pointer, t_scheduler.pointer);
#else
  swapcontext(&fibre.context, &t_scheduler.context);
#endif
#if defined(KVP_ASAN)
  __sanitizer_finish_switch_fiber(fibre.fake_stack, nullptr, nullptr);
#endif
}

// A fibre runs one thread after the other, so that a kernel in which none waits needs one fibre.
void FibreMain() {
#if defined(KVP_ASAN)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  Fibre& fibre = *t_scheduler.current;
  for (;;) {
    Scheduler& all = t_scheduler;
    while (all.next < all.count) {
      fibre.idle = false;
      fibre.index = all.next++;
      fibre.exchanges = 0;
      fibre.thread = {fibre.index % all.dim.x, fibre.index / all.dim.x % all.dim.y, fibre.index / all.dim.x / all.dim.y};
      t_thread = fibre.thread;
      (*all.thread)();
      --all.block.live;
      all.block.Check();
      Barrier& warp = all.warps[fibre.index / kWarp].barrier;
      --warp.live;
      warp.Check();
    }
    fibre.idle = true;
    Leave(fibre);
  }
}

Fibre& NewFibre() {
  auto fibre = std::make_unique<Fibre>();
  fibre->stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (fibre->stack == MAP_FAILED) Fail("no memory for a stack");
#if defined(KVP_OWN_SWITCH)
  // As after a call of FibreMain from nowhere, with six saved registers below.
  auto* top = reinterpret_cast<uint64_t*>(static_cast<char*>(fibre->stack) + kStackBytes);
  *--top = 0;
  *--top = 0;
  *--top = 0;
  *--top = reinterpret_cast<uint64_t>(&FibreMain);
  for (int i = 0; i < 6; ++i) *--top = 0;
  fibre->pointer = top;
#else
  getcontext(&fibre->context);
  fibre->context.uc_stack.ss_sp = fibre->stack;
  fibre->context.uc_stack.ss_size = kStackBytes;
  fibre->context.uc_link = nullptr;
  makecontext(&fibre->context, FibreMain, 0);
#endif
  t_scheduler.fibres.push_back(std::move(fibre));
  return *t_scheduler.fibres.back();
}

void Wait(Barrier& barrier) {
  Fibre& fibre = *t_scheduler.current;
  fibre.waits = &barrier;
  fibre.generation = barrier.generation;
  ++barrier.arrived;
  barrier.Check();
  if (barrier.generation == fibre.generation) Leave(fibre);
  fibre.waits = nullptr;
}

void RunBlock() {
  Scheduler& all = t_scheduler;
  all.next = 0;
  all.block = {};
  all.block.live = all.count;
  all.warps.assign((all.count + kWarp - 1) / kWarp, {});
  for (uint32_t i = 0; i < all.count; ++i) ++all.warps[i / kWarp].barrier.live;
  while (all.block.live > 0) {
    bool progress = false;
    for (size_t i = 0; i < all.fibres.size() || all.next < all.count; ++i) {
      Fibre& fibre = i < all.fibres.size() ? *all.fibres[i] : NewFibre();
      const bool ready = fibre.idle ? all.next < all.count : fibre.waits->generation != fibre.generation;
      if (!ready) continue;
      progress = true;
      Enter(fibre);
    }
    if (!progress) Fail("threads of a block wait for each other");
  }
}

}  // namespace

void SyncBlock() { Wait(t_scheduler.block); }
void SyncWarp() { Wait(t_scheduler.warps[t_scheduler.current->index / kWarp].barrier); }

uint64_t Exchange(uint32_t mask, uint64_t value, uint32_t lane) {
  Fibre& fibre = *t_scheduler.current;
  Warp& warp = t_scheduler.warps[fibre.index / kWarp];
  if (mask != 0xffffffffu || warp.barrier.live != kWarp) Fail("an exchange needs the whole warp");
  // Two sets of slots: nobody writes a slot for the exchange after the next before all have read it.
  uint64_t* slots = warp.slots[fibre.exchanges++ % 2];
  slots[fibre.index % kWarp] = value;
  Wait(warp.barrier);
  return slots[(fibre.index % kWarp) ^ lane];
}

void Run(Extent grid, Extent block, uint32_t shared_bytes, const std::function<void()>& thread) {
  if (t_ended) return;
  Scheduler& all = t_scheduler;
#if defined(KVP_ASAN)
  pthread_attr_t attributes;
  void* bottom = nullptr;
  if (pthread_getattr_np(pthread_self(), &attributes) != 0) Fail("no bounds of the stack");
  pthread_attr_getstack(&attributes, &bottom, &all.bytes);
  pthread_attr_destroy(&attributes);
  all.bottom = bottom;
#endif
  // Of exactly the size asked for, so that a sanitizer sees what lies beyond.
  const auto shared = std::make_unique<unsigned char[]>(shared_bytes + 1);
  t_shared = shared.get();
  t_block_dim = block;
  t_grid_dim = grid;
  all.thread = &thread;
  all.count = block.x * block.y * block.z;
  all.dim = block;
  for (uint32_t z = 0; z < grid.z; ++z) {
    for (uint32_t y = 0; y < grid.y; ++y) {
      for (uint32_t x = 0; x < grid.x; ++x) {
        t_block = {x, y, z};
        std::memset(shared.get(), 0xff, shared_bytes);  // a new block finds no numbers there
        RunBlock();
      }
    }
  }
}

}  // namespace kvpages::cuda::shim
