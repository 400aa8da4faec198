// Random numbers: each device has a generator, and each torch.Generator(device="cuda") is one.
//
// A generator of a device holds one of the CPU's, which the CPU's kernels draw from. Numbers differ
// from a GPU's; seeds, states and forks of the state act alike.
#pragma once
#include "streams.h"
#include <ATen/CPUGeneratorImpl.h>

namespace simulated {

struct Generator final : c10::GeneratorImpl {
  at::Generator on_cpu;

  explicit Generator(int device, uint64_t seed = c10::default_rng_seed_val)
      : c10::GeneratorImpl(Guard::device_at(device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        on_cpu(at::detail::createCPUGenerator(seed)) {}
  static c10::DeviceType device_type() { return kDevice; }
  void set_current_seed(uint64_t seed) override {
    on_cpu.set_current_seed(seed);
    offset_ = 0;
  }
  uint64_t current_seed() const override { return on_cpu.current_seed(); }
  uint64_t seed() override { return on_cpu.seed(); }
  // No kernel here counts by an offset: it is kept for those who ask for what they have set.
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  void set_state(const c10::TensorImpl& state) override {
    on_cpu.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return on_cpu.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  uint64_t offset_ = 0;
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->set_state(*get_state());
    copy->offset_ = offset_;
    return copy;
  }
};

inline const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < kMostDevices; i++) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return (*all)[device < 0 ? current_device : device];
}

// The CPU's generator behind the one of a call: the given one, or the device's own.
inline at::Generator on_cpu(const std::optional<at::Generator>& given, int device) {
  const at::Generator& generator =
      given && given->defined() ? *given : default_generator(device);
  if (generator.device().is_cpu()) return generator;
  return generator.get<Generator>()->on_cpu;
}

}  // namespace simulated
