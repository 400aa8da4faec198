// What torch's CPU library asks of CUDA's, when that has been loaded. The name CUDAHooks is the one
// under which torch looks for it in its registry, once, at its first question: so this library has
// to be loaded before that, and Python's side loads it before `import torch`.
#pragma once
#include "generators.h"
#include <ATen/detail/CUDAHooksInterface.h>

namespace simulated {
// While Python builds torch.cuda.default_generators, a new generator is the device's own one.
thread_local bool hand_out_default_generators = false;
}  // namespace simulated

namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return simulated::device_count > 0; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return simulated::device_count; }
  DeviceIndex current_device() const override { return simulated::current_device; }
  DeviceIndex getCurrentDevice() const override { return simulated::current_device; }
  void setCurrentDevice(DeviceIndex device) const override {
    simulated::Guard().setDevice(simulated::Guard::device_at(device));
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    DeviceIndex before = simulated::current_device;
    if (device >= 0) setCurrentDevice(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device < simulated::device_count ? device : -1);
  }
  Device getDeviceFromPtr(void*) const override { return simulated::Guard().getDevice(); }
  const Generator& getDefaultGenerator(DeviceIndex device) const override {
    return simulated::default_generator(device);
  }
  Generator getNewGenerator(DeviceIndex device) const override {
    if (simulated::hand_out_default_generators) return simulated::default_generator(device);
    int index = device < 0 ? simulated::current_device : device;
    return at::make_generator<simulated::Generator>(index);
  }
  bool isPinnedPtr(const void* pointer) const override {
    simulated::Locked locked(simulated::state_mutex);
    return simulated::pinned_blocks.count(pointer) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &simulated::pinned_allocator;
  }
  c10::Allocator* getCUDADeviceAllocator() const override { return &simulated::allocator; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
