// Devices, streams and events, as torch asks for them through its device guard.
//
// torch's streams are made with cudaStreamNonBlocking, so neither kind waits for the legacy default
// stream (CUDA Runtime API, "Stream synchronization behavior"), and torch's default stream, 0 here,
// is a stream like another one. They come round-robin from a pool of 32 for each device and
// priority ("CUDA semantics": torch.cuda.Stream; c10/cuda/CUDAStream.h).
//
// An event is what its stream's clock was when it was recorded. cudaStreamWaitEvent lets all later
// work of a stream wait for the most recent record of the event at the time of the call; waiting
// for one that was never recorded does nothing (CUDA Runtime API, "Event Management").
//
// Who asks whether an event has been reached is told that it has: a GPU may be that fast. The host
// then knows it, and is ordered after it.
#pragma once
#include "pinned.h"
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace simulated {

struct Event {
  Clock clock;
  double time;
  int device;
  int stream;
  uint64_t epoch;  // of its stream
  bool has_timing;
};

// Lets the host wait as `wait` says, then see what copies to pinned memory have brought.
template <class Wait>
void let_host_wait(Wait wait) {
  std::vector<PendingCopy> finished;
  {
    Locked locked(state_mutex);
    wait();
    finished = take_finished(host_clock);
  }
  finish(std::move(finished));
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr int kPool = 32;

  // Devices -------------------------------------------------------------------------------------
  static void check(c10::DeviceIndex device) {
    TORCH_CHECK(device >= 0 && device < device_count, "CUDA error: invalid device ordinal ",
                (int)device, " (simulated devices: ", device_count, ")");
  }
  static int index_of(c10::Device device) {
    return device.has_index() ? device.index() : current_device;
  }
  static c10::Device device_at(int index) { return {kDevice, (c10::DeviceIndex)index}; }
  c10::DeviceType type() const override { return kDevice; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count; }
  c10::Device getDevice() const override { return device_at(current_device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    if (!device.has_index()) return;
    check(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  // Streams -------------------------------------------------------------------------------------
  static c10::Stream make(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, device_at(device), id);
  }
  static Stream& state_of(const c10::Stream& stream) {
    return *streams[stream_number(stream.device_index(), stream.id())];
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return make(index_of(device), 0);
  }
  c10::Stream getStream(c10::Device device) const override {
    return make(index_of(device), current_stream_id(index_of(device)));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    static uint64_t taken[kMostDevices][2];
    Locked locked(state_mutex);
    int index = index_of(device);
    check(index);
    bool high = priority < 0;
    return make(index, 1 + kPool * high + taken[index][high]++ % kPool);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    return getNewStream(device, high ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    int index = index_of(stream.device());
    if ((int)current_stream_ids.size() <= index) current_stream_ids.resize(index + 1);
    current_stream_ids[index] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return (void*)(intptr_t)stream.id();
  }
  bool queryStream(const c10::Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    let_host_wait([&] { host_waits_for(state_of(stream)); });
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    int index = device < 0 ? current_device : device;
    let_host_wait([&] {
      for (Stream* stream : streams) {
        if (stream->device == index) host_waits_for(*stream);
      }
    });
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& s) const override {
    allocator.recordStream(pointer, s);
  }

  // Events --------------------------------------------------------------------------------------
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete (Event*)event;
  }
  void record(void** event, const c10::Stream& on, c10::DeviceIndex device,
              c10::EventFlag flag) const override {
    TORCH_CHECK(device == -1 || device == on.device_index(), "Event device index ", (int)device,
                " does not match recording stream's device index ", (int)on.device_index(), ".");
    Locked locked(state_mutex);
    if (!*event) *event = new Event;
    Stream& stream = state_of(on);
    catch_up_with_host(stream);
    int number = stream_number(stream.device, stream.id);
    *(Event*)*event = {stream.clock, std::max(stream.time, host_time), stream.device, number,
                       stream.clock.of(number), flag == c10::EventFlag::BACKEND_DEFAULT};
  }
  void block(void* event, const c10::Stream& waiter) const override {
    if (!event) return;
    Locked locked(state_mutex);
    stream_waits_for(state_of(waiter), ((Event*)event)->clock, ((Event*)event)->time);
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    let_host_wait([&] { host_waits_for(((Event*)event)->clock, ((Event*)event)->time); });
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    TORCH_CHECK_VALUE(from && to, "Both events must be recorded before calculating elapsed time.");
    Locked locked(state_mutex);
    for (auto* event : {(Event*)from, (Event*)to}) {
      TORCH_CHECK_VALUE(event->has_timing,
                        "Both events must be created with argument 'enable_timing=True'.");
      bool ready = host_clock.of(event->stream) >= event->epoch;
      TORCH_CHECK(ready, "CUDA error: device not ready (simulated: the host has not waited)");
    }
    bool same_device = ((Event*)from)->device == ((Event*)to)->device;
    TORCH_CHECK(same_device, "CUDA error: invalid resource handle (events of two devices)");
    return (((Event*)to)->time - ((Event*)from)->time) / 1e3;
  }
};

}  // namespace simulated
