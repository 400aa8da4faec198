// The library: all of the simulation in one translation unit, what is registered when it is loaded,
// and the functions that Python calls through ctypes.
#include "sparse.h"
#include "substitutes.h"
#include <sstream>

namespace simulated {

// Operators with structured kernels reach a device that has none of its own through
// CompositeExplicitAutogradNonFunctional: their functional form calls their .out form with an
// output of ours. CUDA has kernels for all forms, so here, too, each has the fallback.
static void register_structured() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) continue;
    auto composite = c10::DispatchKey::CompositeExplicitAutogradNonFunctional;
    if (!op->hasKernelForDispatchKey(composite)) continue;
    std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    library->impl((name.name.substr(6) + overload).c_str(),
                  torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// A library whose kernel draws random numbers, from a generator that nobody gives it.
TORCH_LIBRARY(other_library, library) {
  library.def("mask(Tensor like) -> Tensor", {at::Tag::nondeterministic_seeded});
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  // One operation each, and not what CUDA's choice of algorithm would make of them.
  for (const char* whole : {"convolution", "convolution_backward", "histc"}) {
    library.impl(whole, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

static const bool registered = [] {
  register_substitutes();
  register_structured();
  static Guard guard;
  c10::impl::registerDeviceGuard(kDevice, &guard);
  c10::SetAllocator(kDevice, &allocator, 1);
  // A child of fork has one thread, which must find the lock free.
  pthread_atfork([] { state_mutex.lock(); }, [] { state_mutex.unlock(); },
                 [] { state_mutex.unlock(); });
  return true;
}();

// Reports as JSON -------------------------------------------------------------------------------

static std::string json_text(std::string_view text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += (unsigned char)c < 32 ? ' ' : c;
  }
  return out + '"';
}

template <class Items, class Text>
static std::string json_list(const Items& items, Text text) {
  std::string out = "[";
  for (const auto& item : items) out += (out.size() > 1 ? "," : "") + text(item);
  return out + "]";
}

static std::string json_of_stack(const Operation& operation) {
  if (!operation.stack) return "[]";
  auto symbolized = torch::symbolize({operation.stack.get()});
  if (symbolized.tracebacks.empty()) return "[]";
  return json_list(symbolized.tracebacks[0], [&](uint64_t frame) {
    const auto& f = symbolized.all_frames[frame];
    return json_text(f.filename + ":" + std::to_string(f.lineno) + " " + f.funcname);
  });
}

static std::string json_of(const Operation& operation) {
  std::string node(operation.node);
  if (!node.empty()) node += "#" + std::to_string(operation.node_number);
  return "{\"op\":" + json_text(operation.name) + ",\"node\":" + json_text(node) +
      ",\"thread\":" + json_text(operation.thread) +
      ",\"stream\":" + json_text(stream_name(operation.stream)) +
      ",\"number\":" + std::to_string(operation.number) +
      ",\"stack\":" + json_of_stack(operation) + "}";
}

static std::string json_of(const Report& report) {
  return "{\"kind\":" + json_text(report.kind) + ",\"device\":" + std::to_string(report.device) +
      ",\"size\":" + std::to_string(report.size) + ",\"era\":" + std::to_string(report.era) +
      ",\"how\":" + json_text(report.how) + ",\"now\":" + json_of(*report.now) +
      ",\"before\":" + json_of(*report.before) + ",\"memory\":" + json_of(*report.memory) + "}";
}

static char* give_text(const std::string& text) {
  return strdup(text.c_str());
}

// No exception may pass through ctypes: an error is a text, for Python to raise and to free.
template <class Action>
static char* error_of(Action action) {
  try {
    action();
    return nullptr;
  } catch (const c10::Error& error) {
    return give_text(error.what_without_backtrace());
  }
}

static void wait_for_all() {
  let_host_wait([] {
    for (Stream* stream : streams) host_waits_for(*stream);
  });
}

}  // namespace simulated

using namespace simulated;

#pragma GCC visibility push(default)
extern "C" {

// Before torch asks for the first time how many devices there are.
void sim_start(int devices) { device_count = devices; }

// At exit: no more bookkeeping, and nothing that holds Python objects.
void sim_shutdown() {
  Locked locked(state_mutex);
  alive = detecting = with_stacks = false;
  reports.clear();
  freed_on_stream.clear();
}

void sim_free_text(char* text) { free(text); }

// Order
void sim_detect(int detect, int stacks) {
  Locked locked(state_mutex);
  detecting = detect;
  with_stacks = stacks;
}
char* sim_reports() {
  std::vector<Report> copy;
  {
    Locked locked(state_mutex);
    copy = reports;
  }
  return give_text(json_list(copy, [](const Report& report) { return json_of(report); }));
}
void sim_clear() {
  Locked locked(state_mutex);
  reports.clear();
  pairs_reported.clear();
  reports_made = 0;
}
// A new era: all that came before it is over, for every device. Reports say in which era the memory
// was allocated that they are about.
int sim_begin_era() {
  wait_for_all();
  Locked locked(state_mutex);
  return (int)++era;
}
size_t sim_count(int which) {
  Locked locked(state_mutex);
  uint64_t allocations = 0;
  for (const DeviceMemory& account : device_memory) allocations += account.allocations;
  size_t counts[] = {operations_launched, allocations, host_waits,
                     stream_waits,        reports_made, streams.size()};
  return counts[which];
}

// Virtual time
void sim_rates(
    double launch_us, double memory_gbps, double link_gbps, double tflops, double host_us) {
  Locked locked(state_mutex);
  rates = {launch_us, memory_gbps, link_gbps, tflops, host_us};
}
void sim_reset_time() {
  wait_for_all();
  Locked locked(state_mutex);
  host_time = 0;
  for (Stream* stream : streams) stream->time = 0;
  for (Busy& busy : ways_out) busy.clear();
  for (Busy& busy : ways_in) busy.clear();
}
double sim_time(int device) {
  Locked locked(state_mutex);
  double latest = 0;
  for (Stream* stream : streams) {
    if (stream->device == device) latest = std::max(latest, stream->time);
  }
  return latest;
}
double sim_host_time() {
  Locked locked(state_mutex);
  return host_time;
}
char* sim_elapsed_ms(size_t from, size_t to, double* out) {
  return error_of([&] { *out = Guard().elapsedTime((void*)from, (void*)to, 0); });
}
void sim_sleep(double us) {
  OperationPtr operation = describe("sleep");
  Locked locked(state_mutex);
  launch(*operation, current_stream(current_device));
  spend(us, *operation);
}

// Memory
void sim_limit(int device, size_t bytes) { device_memory[device].limit = bytes; }
char* sim_resize_storage(size_t storage, size_t size) {
  return error_of([&] { resize_storage(*(c10::StorageImpl*)storage, size); });
}
// Of the allocations from now on the `number`th fails; 0: none.
void sim_fail_allocation(int device, size_t number) {
  Locked locked(state_mutex);
  device_memory[device].failing = number;
  device_memory[device].since = 0;
}
size_t sim_allocations(int device) {
  Locked locked(state_mutex);
  return device_memory[device].since;
}
void sim_reset_peak(int device) { allocator.resetPeakStats(device); }
// bytes live, most bytes live, limit, allocations so far, blocks live, refusals
void sim_memory(int device, size_t* out) {
  Locked locked(state_mutex);
  const DeviceMemory& m = device_memory[device];
  size_t all[] = {m.live, m.peak, m.limit, m.allocations, m.blocks, m.refusals};
  std::copy(std::begin(all), std::end(all), out);
}

// Devices and generators
int sim_current_device() { return current_device; }
void sim_hand_out_default_generators(int yes) { hand_out_default_generators = yes; }
}
#pragma GCC visibility pop
