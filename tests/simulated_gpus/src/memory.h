// Memory of the devices: who uses which bytes, and when bytes may be used again.
//
// Three rules, each with its kind of report:
//
//   RACE            Two operations use a byte, one of them writes, and neither comes before the
//                   other.
//   ALLOC-RACE      An operation uses memory and does not come after what its allocating stream had
//                   launched when it was allocated. torch hands memory out that was freed on the
//                   same stream while kernels on that stream may still use it ("CUDA semantics",
//                   "Use of Stream-Ordered memory"); so to allocate is to write, on that stream.
//   USE-AFTER-FREE  An operation used memory on a stream other than the one it was allocated on,
//                   the memory was freed without record_stream for that stream, and the owner's
//                   stream allocates again before it has waited for that use. The documentation of
//                   Tensor.record_stream: the allocator "is aware of only the stream where a tensor
//                   was allocated".
#pragma once
#include "operations.h"
#include "regions.h"
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <cstring>

namespace simulated {

struct Access {
  int stream;
  uint64_t epoch;
  Region region;
  bool writes;
  bool allocates;
  OperationPtr operation;
};

// One allocation: what torch calls a storage points to it.
struct Block {
  c10::DataPtr memory;
  size_t size;
  int device;
  int owner;     // the stream that it was allocated on
  uint64_t era;  // see begin_era in interface.cpp
  OperationPtr allocation;
  std::vector<Access> accesses;  // those that a later one may still have to be compared with
  std::set<int> recorded;        // streams that record_stream was called for
  char* bytes() const { return (char*)memory.get(); }
};

// A block that has been freed on its owner's stream, with the accesses that nothing waits for.
struct FreedBlock {
  size_t size;
  uint64_t era;
  OperationPtr free;
  std::vector<Access> unprotected;
};

struct DeviceMemory {
  size_t live = 0, peak = 0, limit = 0, allocations = 0, blocks = 0, refusals = 0;
  size_t failing = 0, since = 0;  // the allocation that is to fail, and how many there have been
};

inline DeviceMemory device_memory[kMostDevices];
inline std::map<int, std::vector<FreedBlock>> freed_on_stream;
inline uint64_t era = 0;

thread_local int current_device = 0;
thread_local std::vector<int64_t> current_stream_ids;

inline int64_t current_stream_id(int device) {
  return device < (int)current_stream_ids.size() ? current_stream_ids[device] : 0;
}
inline int current_stream(int device) {
  return stream_number(device, current_stream_id(device));
}

inline std::string verb(const Access& access) {
  return access.allocates ? "allocation" : access.writes ? "write" : "read";
}

// Notes that an operation uses bytes of a block, and reports what it conflicts with.
inline void use(Block& block, Region region, bool writes, const OperationPtr& operation) {
  if (!detecting || region.begin >= region.end) return;
  const int stream = operation->stream;
  const Clock& clock = streams[stream]->clock;
  Access now{stream, operation->epoch, std::move(region), writes, false, operation};
  std::erase_if(block.accesses, [&](const Access& before) {
    bool ordered = before.stream == stream || clock.of(before.stream) >= before.epoch;
    bool conflicts = !ordered && (writes || before.writes);
    if (conflicts && now.region.overlaps(before.region)) {
      add_report({before.allocates ? "ALLOC-RACE" : "RACE", block.device, block.size, block.era,
                  verb(now) + " on " + stream_name(stream) + " after " + verb(before) + " on " +
                      stream_name(before.stream),
                  operation, before.operation, block.allocation});
    }
    // Whoever comes after `now` comes after `before`, too: only the later one need be kept, if it
    // conflicts with as much.
    return ordered && (writes || !before.writes) && now.region.covers(before.region);
  });
  block.accesses.push_back(std::move(now));
}

inline Block* block_of(const at::Tensor& tensor);  // pinned.h

inline void use(const at::Tensor& tensor, bool writes, const OperationPtr& operation) {
  Block* block = detecting && tensor.numel() ? block_of(tensor) : nullptr;
  if (block) use(*block, Region::of(tensor), writes, operation);
}

// Any block freed on this stream may be the one that is handed out now.
inline void check_reuse(int stream, int device, const OperationPtr& allocation) {
  auto found = freed_on_stream.find(stream);
  if (found == freed_on_stream.end()) return;
  for (const FreedBlock& freed : found->second) {
    for (const Access& access : freed.unprotected) {
      if (streams[stream]->clock.of(access.stream) >= access.epoch) continue;
      add_report({"USE-AFTER-FREE", device, freed.size, freed.era,
                  verb(access) + " on " + stream_name(access.stream) +
                      " may be going on when memory of " + stream_name(stream) + " is used again",
                  allocation, access.operation, freed.free});
    }
  }
  freed_on_stream.erase(found);
}

inline void free_block(void* context) {
  auto* block = (Block*)context;
  if (!block || !alive) return;
  std::unique_ptr<Block> deleted(block);  // after the lock is given back
  OperationPtr operation = describe("free");
  Locked locked(state_mutex);
  device_memory[block->device].live -= block->size;
  device_memory[block->device].blocks--;
  if (!detecting) return;
  operation->stream = block->owner;
  FreedBlock freed{block->size, block->era, operation, {}};
  for (Access& access : block->accesses) {
    if (access.stream == block->owner || block->recorded.count(access.stream)) continue;
    freed.unprotected.push_back(std::move(access));
  }
  if (!freed.unprotected.empty()) freed_on_stream[block->owner].push_back(std::move(freed));
}

inline void refuse_if_full(DeviceMemory& account, size_t size, int device) {
  account.allocations++;
  bool to_fail = ++account.since == account.failing;
  bool full = account.limit && account.live + size > account.limit;
  if (!to_fail && !full) return;
  account.refusals++;
  TORCH_CHECK_WITH(OutOfMemoryError, to_fail, "CUDA out of memory (simulated). Tried to allocate ",
                   size, " bytes on device ", device, "; ", account.live, " of ", account.limit,
                   " are in use.");
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory (simulated: allocation ",
                   account.failing, " of device ", device, " was to fail).");
}

// Gives memory to the current stream of a device, as torch's caching allocator does: new memory, or
// what a result of the CPU's has.
inline c10::DataPtr give_memory(size_t size, int device, c10::DataPtr memory = {}) {
  constexpr size_t kFilled = 1 << 20;
  OperationPtr operation = describe("allocate");
  Locked locked(state_mutex);
  DeviceMemory& account = device_memory[device];
  refuse_if_full(account, size, device);
  if (!memory) {
    memory = c10::GetCPUAllocator()->allocate(size);
    // All ones is NaN: what nobody has written is seen, in what is small enough to be filled.
    if (size <= kFilled) memset(memory.get(), 0xff, size);
  }
  int stream = current_stream(device);
  catch_up_with_host(*streams[stream]);
  operation->stream = stream;
  operation->epoch = streams[stream]->clock.of(stream);
  check_reuse(stream, device, operation);
  void* bytes = memory.get();
  auto* block = new Block{std::move(memory), size, device, stream, era, operation, {}, {}};
  if (detecting) {
    block->accesses.push_back(
        {stream, operation->epoch, Region::all(size), true, true, operation});
  }
  account.blocks++;
  account.live += size;
  account.peak = std::max(account.peak, account.live);
  return {bytes, block, &free_block, c10::Device(kDevice, (c10::DeviceIndex)device)};
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    if (size) return give_memory(size, current_device);
    return {nullptr, nullptr, &free_block, c10::Device(kDevice, (c10::DeviceIndex)current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override {
    memcpy(to, from, size);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    auto* block = (Block*)pointer.get_context();
    Locked locked(state_mutex);
    if (block) block->recorded.insert(stream_number(stream.device_index(), stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Locked locked(state_mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* all : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*all)[0].current = device_memory[device].live;
      (*all)[0].peak = device_memory[device].peak;
    }
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    Locked locked(state_mutex);
    device_memory[device].peak = device_memory[device].live;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Locked locked(state_mutex);
    const DeviceMemory& account = device_memory[device];
    return {account.limit - account.live, account.limit};
  }
};
inline Allocator allocator;

}  // namespace simulated
