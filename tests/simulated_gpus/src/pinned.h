// Pinned memory of the host: copies from and to it that the host does not wait for.
//
// CUDA Programming Guide, "Asynchronous Concurrent Execution": copies between pinned memory and a
// device run asynchronously with the host. So until the host has waited,
//
//   * what it reads where a copy from the device writes is undefined. Here it is 0xFF, NaN: the
//     bytes are delivered when the host has waited for the copy, not before.
//   * what it writes where a copy to the device reads may reach the device. Here the bytes are
//     compared when the host has waited: if they have changed, that is reported as HOST-RACE.
//
// Operations of the host on its own memory are the CPU's and pass by this library, which is why
// these two are found by the values and not by order. Memory that is not pinned goes through a
// buffer of the driver's: a copy from it has been read, and one to it has been written, when the
// call returns (CUDA Runtime API, "API synchronization behavior").
#pragma once
#include "memory.h"

namespace simulated {

struct PendingCopy {
  Block* block;
  int stream;
  uint64_t epoch;
  bool to_host;
  at::Tensor pinned;    // the tensor in pinned memory, which it keeps alive
  at::Tensor snapshot;  // to the host: what will be there. From the host: what was there
  OperationPtr operation;
};

inline std::map<const void*, Block*> pinned_blocks;
inline std::vector<PendingCopy> pending_copies;

inline void free_pinned(void* context) {
  auto* block = (Block*)context;
  if (!alive) return;
  std::unique_ptr<Block> deleted(block);
  Locked locked(state_mutex);
  pinned_blocks.erase(block->bytes());
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    c10::DataPtr memory = c10::GetCPUAllocator()->allocate(std::max<size_t>(size, 1));
    void* bytes = memory.get();
    OperationPtr operation = describe("allocate pinned");
    Locked locked(state_mutex);
    auto* block = new Block{std::move(memory), size, -1, -1, era, operation, {}, {}};
    pinned_blocks[bytes] = block;
    return {bytes, block, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override {
    memcpy(to, from, size);
  }
};
inline PinnedAllocator pinned_allocator;

inline bool is_simulated(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

// The block behind a tensor on a device or in pinned memory; null for other memory of the host.
inline Block* block_of(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return nullptr;
  const c10::DataPtr& pointer = tensor.storage().data_ptr();
  bool ours = is_simulated(tensor) || pointer.get_deleter() == &free_pinned;
  return ours ? (Block*)pointer.get_context() : nullptr;
}

inline bool is_pinned(const at::Tensor& tensor) {
  return tensor.is_cpu() && block_of(tensor) != nullptr;
}

// Takes out of the list, under the lock, the copies that are finished for `clock`.
inline std::vector<PendingCopy> take_finished(const Clock& clock) {
  std::vector<PendingCopy> finished;
  std::erase_if(pending_copies, [&](PendingCopy& copy) {
    if (clock.of(copy.stream) < copy.epoch) return false;
    finished.push_back(std::move(copy));
    return true;
  });
  return finished;
}

// Delivers and compares, outside of the lock, since these are operators of torch's.
inline void finish(std::vector<PendingCopy> finished) {
  at::AutoDispatchBelowADInplaceOrView below;
  for (PendingCopy& copy : finished) {
    if (copy.to_host) {
      copy.pinned.copy_(copy.snapshot);
      continue;
    }
    auto bytes = [](const at::Tensor& t) { return t.contiguous().view(at::kByte); };
    if (at::equal(bytes(copy.pinned), bytes(copy.snapshot))) continue;
    Locked locked(state_mutex);
    add_report({"HOST-RACE", copy.block->device, copy.block->size, copy.block->era,
                "the host wrote pinned memory that a copy on " + stream_name(copy.stream) +
                    " may still have been reading",
                copy.operation, copy.operation, copy.block->allocation});
  }
}

}  // namespace simulated
