// An operation on a stream, with what a report says of it; and the reports.
#pragma once
#include "clocks.h"
#include <pthread.h>
#include <set>
#include <string_view>
#if __has_include(<torch/csrc/autograd/node.h>)
#include <torch/csrc/autograd/node.h>
#else  // torch < 2.13
#include <torch/csrc/autograd/function.h>
#endif
#include <torch/csrc/profiler/combined_traceback.h>
#include <typeindex>

namespace simulated {

inline bool alive = true;         // false when Python is about to end: do as little as possible
inline bool detecting = true;     // whether accesses are remembered and compared
inline bool with_stacks = false;  // whether operations remember their Python stacks
inline uint64_t operations_launched = 0;

struct Operation {
  std::string_view name;  // of a string that lives for ever
  std::string_view node;  // the autograd node that was running, likewise
  uint64_t node_number = 0;
  char thread[16] = {};
  int stream = -1;
  uint64_t epoch = 0;
  uint64_t number = 0;
  std::shared_ptr<torch::CapturedTraceback> stack;
};
using OperationPtr = std::shared_ptr<Operation>;

// A string that lives for ever, equal to the given one.
inline std::string_view keep_string(const std::string& text) {
  static std::mutex mutex;
  static auto* kept = new std::set<std::string>;
  std::lock_guard<std::mutex> guard(mutex);
  return *kept->insert(text).first;
}

// The name of the autograd node that this thread runs. To ask a node in Python for its name takes
// the interpreter's lock, so it is asked once.
inline void describe_node(Operation& operation) {
  auto node = torch::autograd::get_current_node();
  if (!node) return;
  thread_local const void* last = nullptr;
  thread_local uint64_t last_number = 0;
  thread_local std::string_view last_name;
  if (node.get() != last || node->sequence_nr() != last_number) {
    last_name = keep_string(node->name());
    last = node.get();
    last_number = node->sequence_nr();
  }
  operation.node = last_name;
  operation.node_number = last_number;
}

// Describes what this thread is about to do. Never under state_mutex: a stack and a node's name may
// need Python's lock, whose holder may be waiting for state_mutex.
inline OperationPtr describe(std::string_view name) {
  auto operation = std::make_shared<Operation>();
  operation->name = name;
  if (detecting && alive) {
    describe_node(*operation);
    pthread_getname_np(pthread_self(), operation->thread, sizeof operation->thread);
    if (with_stacks) operation->stack = torch::CapturedTraceback::gather(true, false, false);
  }
  return operation;
}

// Puts an operation into the order: the next one of its stream.
inline void launch(Operation& operation, int stream) {
  Stream& s = *streams[stream];
  catch_up_with_host(s);
  operation.stream = stream;
  operation.epoch = s.clock.of(stream) + 1;
  operation.number = ++operations_launched;
  s.clock.set(stream, operation.epoch);
}

struct Report {
  const char* kind;
  int device;
  size_t size;   // bytes of the allocation
  uint64_t era;  // in which the memory was allocated
  std::string how;
  OperationPtr now;
  OperationPtr before;
  OperationPtr memory;  // what allocated it, or freed it
};

inline std::vector<Report> reports;
inline uint64_t reports_made = 0;
inline std::set<std::string> pairs_reported;

// Without stacks one report for each pair of operations is enough: they would look the same.
inline void add_report(Report report) {
  constexpr size_t kMost = 2000;
  reports_made++;
  std::string pair(report.kind);
  pair.append(report.now->name).append(report.now->node).append(report.before->name);
  pair += report.how;
  bool is_new = pairs_reported.insert(pair).second;
  if ((is_new || with_stacks) && reports.size() < kMost) reports.push_back(std::move(report));
}

}  // namespace simulated
