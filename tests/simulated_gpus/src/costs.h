// Virtual time: how long operations take by a model of the machine, and when they then begin.
//
//   * An operation begins when its stream's last one has ended, what its stream waits for has
//     ended, and the host has launched it.
//   * It takes `launch_us`, and the longer one of moving its bytes at the memory's rate and doing
//     its floating-point operations at the device's. Streams of one device do not slow each other
//     down: they overlap freely.
//   * A copy between devices also needs the way out of its source and the way into its target, and
//     one between a device and the host the way out of or into the device. Each carries one copy
//     after the other. A copy begins in the first gap that is long enough. (By gaps, and not in the
//     order of launching: threads launch in an order that has nothing to do with virtual time.)
//   * To launch costs the host `host_us`. All threads share the host's one clock, as they share
//     Python's lock.
#pragma once
#include "operations.h"

namespace simulated {

struct Rates {
  double launch_us = 5;
  double memory_gbps = 1000;
  double link_gbps = 25;
  double tflops = 20;
  double host_us = 0;
};
inline Rates rates;

// When a way is busy: the start and end of each copy, in order.
using Busy = std::map<double, double>;
inline Busy ways_out[kMostDevices], ways_in[kMostDevices];

inline double operation_us(double bytes, double flops) {
  double moving = bytes / (rates.memory_gbps * 1e3);
  double computing = flops / (rates.tflops * 1e6);
  return rates.launch_us + std::max(moving, computing);
}

// The first time, not before `earliest`, from which the way is free for so long.
inline double first_gap(const Busy& busy, double earliest, double length) {
  auto next = busy.upper_bound(earliest);
  double start = earliest;
  if (next != busy.begin()) start = std::max(start, std::prev(next)->second);
  while (next != busy.end() && start + length > next->first) {
    start = std::max(start, next->second);
    ++next;
  }
  return start;
}

inline double reserve(std::vector<Busy*> ways, double earliest, double length) {
  double start = earliest;
  for (bool moved = true; moved;) {  // until all of them are free at once
    double before = start;
    for (Busy* way : ways) start = first_gap(*way, start, length);
    moved = start != before;
  }
  if (length > 0) {
    for (Busy* way : ways) (*way)[start] = start + length;
  }
  return start;
}

// When the stream could begin an operation that is launched now.
inline double launch_time(const Stream& stream) {
  host_time += rates.host_us;
  return std::max(stream.time, host_time);
}

inline void spend_from(double start, double us, const Operation& operation) {
  streams[operation.stream]->time = start + us;
}

inline void spend(double us, const Operation& operation) {
  spend_from(launch_time(*streams[operation.stream]), us, operation);
}

// A copy; the host is device -1.
inline void spend_on_link(double bytes, int source, int target, const Operation& operation) {
  double us = rates.launch_us + bytes / (rates.link_gbps * 1e3);
  std::vector<Busy*> ways;
  if (source >= 0) ways.push_back(&ways_out[source]);
  if (target >= 0) ways.push_back(&ways_in[target]);
  double start = reserve(ways, launch_time(*streams[operation.stream]), us);
  spend_from(start, us, operation);
}

}  // namespace simulated
