// Order without time: vector clocks.
//
// Kernels run on the CPU at the moment they are launched, so numbers never show that a wait is
// missing. What a GPU would have been free to reorder is kept apart from the numbers, as a partial
// order of operations:
//
//   * Each stream counts its operations. "Epoch 7 of stream 3" names one operation.
//   * Each stream has a clock: for every stream the epoch up to which its next operation is
//     ordered after that stream's operations. A stream is ordered after itself, no more:
//     CUDA Programming Guide, "Streams": commands in a stream execute in order, different streams
//     "may execute their commands out of order with respect to one another or concurrently".
//   * To wait is to join clocks: take the larger epoch of each stream.
//   * The host has a clock, too. What is launched is ordered after all that the host has waited
//     for, whichever stream it goes to, since it is launched later.
//
// Operation A comes before B if B's clock, at its launch, had reached A's epoch. If neither comes
// before the other, the GPU may do them in either order or at once.
#pragma once
#include <c10/core/Device.h>
#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace simulated {

constexpr c10::DeviceType kDevice = c10::DeviceType::CUDA;
constexpr int kMostDevices = 64;
inline int device_count = 8;

// Guards all of the simulation's state. Nothing is called under it that may take another lock: no
// Python, no torch operator.
inline std::mutex state_mutex;
using Locked = std::lock_guard<std::mutex>;

class Clock {
 public:
  uint64_t of(size_t stream) const {
    return stream < epochs_.size() ? epochs_[stream] : 0;
  }
  void set(size_t stream, uint64_t epoch) {
    if (epochs_.size() <= stream) epochs_.resize(stream + 1);
    epochs_[stream] = epoch;
  }
  void join(const Clock& other) {
    if (epochs_.size() < other.epochs_.size()) epochs_.resize(other.epochs_.size());
    for (size_t i = 0; i < other.epochs_.size(); i++) {
      epochs_[i] = std::max(epochs_[i], other.epochs_[i]);
    }
  }

 private:
  std::vector<uint64_t> epochs_;
};

struct Stream {
  int device;
  int64_t id;  // 0 is the device's default stream
  Clock clock;
  double time = 0;              // when its last operation ends, microseconds of virtual time
  uint64_t host_waits_seen = 0; // its clock includes the host's as of so many waits of the host
};

// Streams are numbered as they come into use and live for ever.
inline std::vector<Stream*> streams;
inline Clock host_clock;
inline double host_time = 0;
inline uint64_t host_waits = 0;
inline uint64_t stream_waits = 0;

inline int stream_number(int device, int64_t id) {
  static std::map<std::pair<int, int64_t>, int> numbers;
  auto [found, is_new] = numbers.try_emplace({device, id}, (int)streams.size());
  if (is_new) streams.push_back(new Stream{device, id, {}});
  return found->second;
}

inline std::string stream_name(int stream) {
  if (stream < 0) return "host";
  const Stream& s = *streams[stream];
  return "cuda:" + std::to_string(s.device) + "/stream" + std::to_string(s.id);
}

// What a stream does next is launched now: after everything that the host has waited for.
inline void catch_up_with_host(Stream& stream) {
  if (stream.host_waits_seen == host_waits) return;
  stream.clock.join(host_clock);
  stream.host_waits_seen = host_waits;
}

inline void stream_waits_for(Stream& waiter, const Clock& clock, double time) {
  stream_waits++;
  waiter.clock.join(clock);
  waiter.time = std::max(waiter.time, time);
}

inline void host_waits_for(const Clock& clock, double time) {
  host_waits++;
  host_clock.join(clock);
  host_time = std::max(host_time, time);
}

inline void host_waits_for(const Stream& stream) {
  host_waits_for(stream.clock, stream.time);
}

}  // namespace simulated
