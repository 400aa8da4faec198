// A simulated accelerator: N devices whose kernels run on the CPU at once, with CUDA's stream
// semantics kept as vector clocks. -DSIM_AS_CUDA registers it as DeviceType::CUDA instead.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/set_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/profiler/combined_traceback.h>
#include <torch/library.h>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_set>
#include <pthread.h>

constexpr c10::DeviceType DT = c10::DeviceType::CUDA;
constexpr c10::DispatchKey DK = c10::DispatchKey::CUDA;
using at::Tensor;
using c10::DeviceIndex;
using c10::IValue;

// ------------------------------------------------------------------------------- vector clocks
struct Clock {
  std::vector<uint64_t> v;
  uint64_t get(size_t i) const { return i < v.size() ? v[i] : 0; }
  void set(size_t i, uint64_t x) { if (v.size() <= i) v.resize(i + 1); v[i] = x; }
  void join(const Clock& o) {
    if (v.size() < o.v.size()) v.resize(o.v.size());
    for (size_t i = 0; i < o.v.size(); i++) v[i] = std::max(v[i], o.v[i]);
  }
};
struct OpInfo {
  std::string name, node, thread; int actor; uint64_t epoch; size_t number = 0;
  std::shared_ptr<torch::CapturedTraceback> tb;
};
using OpP = std::shared_ptr<OpInfo>;
struct Access { int actor; uint64_t epoch; size_t lo, hi; bool write, alloc; OpP op; };
struct Block {
  char* ptr; size_t size; int device; int owner; uint64_t id;
  std::vector<Access> acc; std::set<int> recorded; OpP alloc;
};
struct StreamState { int device; int64_t id; Clock clock; double vt = 0; };
struct EventState { Clock clock; double vt = 0; int device = -1; bool timing = false; };
struct Freed { std::vector<Access> acc; OpP alloc, freed; size_t size; uint64_t id; };
struct Report { std::string kind, device; OpP now, before, third; std::string how; size_t size; };
struct Traced { int actor; double start, end; std::string name; };

static std::recursive_mutex G;
static int g_count = [] { auto e = getenv("SIM_DEVICES"); return e ? atoi(e) : 8; }();
static bool g_stacks = getenv("SIM_STACKS") != nullptr;
static bool g_alive = true, g_detect = true, g_trace = false;
static std::vector<StreamState*> actors;
static std::map<std::pair<int, int64_t>, int> actor_of;
static Clock host; static double host_vt = 0;
static std::vector<Report> reports; static std::set<std::string> seen_reports; static size_t n_reports = 0;
static std::map<int, std::vector<Freed>> pending;
static std::vector<Traced> traced;
static std::vector<int64_t> next_stream(64, 1);
static uint64_t n_ops = 0, n_blocks = 0, n_syncs = 0, n_waits = 0;
static size_t live[64], peak[64], limit_[64], live_blocks[64];
static std::atomic<bool> g_race_error{false};
thread_local int t_device = 0;
thread_local std::vector<int64_t> t_stream;
static double us_base = 5, gbps_mem = 1000, gbps_link = 25, tflops = 20, us_host = 0;

static int actor(int dev, int64_t id) {
  auto [it, fresh] = actor_of.try_emplace({dev, id}, (int)actors.size());
  if (fresh) actors.push_back(new StreamState{dev, id});
  return it->second;
}
static int64_t current_stream(int dev) { return dev < (int)t_stream.size() ? t_stream[dev] : 0; }
static int current_actor(int dev) { return actor(dev, current_stream(dev)); }
static std::string actor_name(int a) {
  if (a < 0) return "host";
  return c10::DeviceTypeName(DT, true) + ":" + std::to_string(actors[a]->device) + "/stream" + std::to_string(actors[a]->id);
}
static OpP make_op(std::string name) {  // before G is taken: gathering a stack may take the GIL
  auto op = std::make_shared<OpInfo>();
  op->name = std::move(name);
  if (g_detect && g_alive) {
    if (auto n = torch::autograd::get_current_node()) op->node = n->name() + "#" + std::to_string(n->sequence_nr());
    char buf[32]; if (!pthread_getname_np(pthread_self(), buf, 32)) op->thread = buf;
    if (g_stacks) op->tb = torch::CapturedTraceback::gather(true, false, false);
  }
  return op;
}
static void report(const char* kind, int dev, OpP now, OpP before, OpP third, std::string how, size_t size) {
  n_reports++;
  std::string key = std::string(kind) + now->name + now->node.substr(0, now->node.find('#')) + before->name + how;
  if (!g_stacks && !seen_reports.insert(key).second) return;
  if (reports.size() < 2000) reports.push_back({kind, std::to_string(dev), now, before, third, how, size});
}
static void begin(const OpP& op, int a, double us = -1) {
  auto* s = actors[a];
  s->clock.join(host);
  s->clock.set(a, s->clock.get(a) + 1);
  op->actor = a; op->epoch = s->clock.get(a); op->number = ++n_ops;
}
static void spend(const OpP& op, int a, double us) {
  auto* s = actors[a];
  host_vt += us_host;  // one host, whichever thread launches: the interpreter lock
  double start = std::max(s->vt, host_vt);
  s->vt = start + us;
  if (g_trace && traced.size() < 1000000) traced.push_back({a, start, s->vt, op->name});
}
// The link of a device carries one copy at a time in each direction. The host's order is not that of
// virtual time, so a copy takes the first gap after `ready` that is long enough on both engines.
static std::map<int, std::map<double, double>> busy;  // engine -> begin -> end
static double reserve(double ready, double us, std::initializer_list<int> engines) {
  for (bool again = true; again;) {
    again = false;
    for (int e : engines)
      for (auto it = busy[e].lower_bound(ready + us); it != busy[e].begin();) {
        --it;  // begins before the copy would end; earlier ones end before it
        if (it->second > ready) { ready = it->second; again = true; }
        break;
      }
  }
  if (us > 0) for (int e : engines) busy[e][ready] = ready + us;
  return ready;
}
static void touch(Block* b, size_t lo, size_t hi, bool write, const OpP& op, bool is_alloc = false) {
  if (!g_detect || lo >= hi) return;
  int a = op->actor; auto& clock = actors[a]->clock;
  std::vector<Access> kept;
  for (auto& x : b->acc) {
    bool overlap = x.lo < hi && lo < x.hi;
    bool ordered = x.actor == a || clock.get(x.actor) >= x.epoch;
    if (overlap && !ordered && (write || x.write))
      report(x.alloc ? "ALLOC-RACE" : "RACE", b->device, op, x.op, b->alloc,
             std::string(write ? "write" : "read") + " on " + actor_name(a) + " after " +
             (x.alloc ? "allocation" : x.write ? "write" : "read") + " on " + actor_name(x.actor), b->size);
    bool covered = lo <= x.lo && x.hi <= hi;
    if (!(covered && ordered && (write || !x.write))) kept.push_back(x);
  }
  kept.push_back({a, op->epoch, lo, hi, write, is_alloc, op});
  b->acc = std::move(kept);
}
static Block* block_of(const Tensor& t) {
  return t.has_storage() ? (Block*)t.storage().data_ptr().get_context() : nullptr;
}
static void touch(const Tensor& t, bool write, const OpP& op) {
  if (!t.defined() || t.numel() == 0) return;
  auto* b = block_of(t);
  if (!b) return;
  size_t lo = t.storage_offset() * t.itemsize(), n = 1;
  for (int64_t d = 0; d < t.dim(); d++) n += (t.size(d) - 1) * t.stride(d);
  touch(b, lo, lo + n * t.itemsize(), write, op);
}
static void wait_actor(int waiter, int awaited) {
  n_waits++;
  actors[waiter]->clock.join(actors[awaited]->clock);
  actors[waiter]->vt = std::max(actors[waiter]->vt, actors[awaited]->vt);
}
static void host_joins(const Clock& c, double vt) { n_syncs++; host.join(c); host_vt = std::max(host_vt, vt); }
static void host_sync(int a) { host_joins(actors[a]->clock, actors[a]->vt); }

// ----------------------------------------------------------------------------------- allocator
static void deleter(void* ctx) {
  auto* b = (Block*)ctx;
  if (!b || !g_alive) return;
  OpP op = make_op("free");
  std::lock_guard<std::recursive_mutex> g(G);
  live[b->device] -= b->size; live_blocks[b->device]--;
  if (g_detect && g_alive) {
    Freed f{{}, b->alloc, op, b->size, b->id};
    for (auto& x : b->acc)
      if (x.actor != b->owner && !b->recorded.count(x.actor)) f.acc.push_back(x);
    op->actor = b->owner;
    if (!f.acc.empty()) pending[b->owner].push_back(std::move(f));
  }
  free(b->ptr);
  delete b;
}
struct SimAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    OpP op = make_op("alloc");
    std::lock_guard<std::recursive_mutex> g(G);
    int dev = t_device, a = current_actor(dev);
    if (limit_[dev] && live[dev] + n > limit_[dev])
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory (simulated). Tried to allocate ", n,
        " bytes on device ", dev, "; ", live[dev], " of ", limit_[dev], " are in use.");
    op->actor = a;
    actors[a]->clock.join(host);
    op->epoch = actors[a]->clock.get(a);
    auto it = pending.find(a);
    if (it != pending.end()) {  // any block freed on this stream may be the one handed out now
      for (auto& f : it->second)
        for (auto& x : f.acc)
          if (actors[a]->clock.get(x.actor) < x.epoch)
            report("USE-AFTER-FREE", dev, op, x.op, f.freed, std::string(x.write ? "write" : "read") + " on " +
              actor_name(x.actor) + " may be going on when memory of " + actor_name(a) + " is used again", f.size);
      pending.erase(it);
    }
    if (!n) return {nullptr, nullptr, &deleter, c10::Device(DT, dev)};
    auto* b = new Block{nullptr, n, dev, a, ++n_blocks, {}, {}, op};
    if (posix_memalign((void**)&b->ptr, 64, n)) { delete b; TORCH_CHECK(false, "host memory is out"); }
    if (n <= (1 << 20)) memset(b->ptr, 0xff, n);  // NaN: what was never written is seen
    live[dev] += n; live_blocks[dev]++; peak[dev] = std::max(peak[dev], live[dev]);
    if (g_detect) b->acc.push_back({a, op->epoch, 0, n, true, true, op});
    return {b->ptr, b, &deleter, c10::Device(DT, dev)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* d, const void* s, size_t n) const override { memcpy(d, s, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& p, c10::Stream s) override {
    std::lock_guard<std::recursive_mutex> g(G);
    if (auto* b = (Block*)p.get_context()) b->recorded.insert(actor(s.device_index(), s.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    c10::CachingDeviceAllocator::DeviceStats s;
    for (auto* x : {&s.allocated_bytes[0], &s.reserved_bytes[0], &s.active_bytes[0]}) { x->current = live[d]; x->peak = peak[d]; }
    return s;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex d) override { peak[d] = live[d]; }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    size_t all = limit_[d] ? limit_[d] : (80ull << 30); return {all - live[d], all};
  }
};
static SimAllocator g_alloc;
struct PinnedAllocator final : c10::Allocator {
  static std::set<const void*>& ptrs() { static auto* s = new std::set<const void*>; return *s; }
  static void del(void* p) { std::lock_guard<std::recursive_mutex> g(G); ptrs().erase(p); free(p); }
  c10::DataPtr allocate(size_t n) override {
    void* p = nullptr; if (posix_memalign(&p, 64, n ? n : 1)) TORCH_CHECK(false, "host memory is out");
    std::lock_guard<std::recursive_mutex> g(G); ptrs().insert(p);
    return {p, p, &del, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &del; }
  void copy_data(void* d, const void* s, size_t n) const override { memcpy(d, s, n); }
};
static PinnedAllocator g_pinned;

// --------------------------------------------------------------------------------------- guard
struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  using S = c10::Stream;
  static void check(DeviceIndex d) { TORCH_CHECK(d >= 0 && d < g_count, "invalid device ordinal ", (int)d, " of ", g_count); }
  c10::DeviceType type() const override { return DT; }
  c10::Device exchangeDevice(c10::Device d) const override { auto o = getDevice(); setDevice(d); return o; }
  c10::Device getDevice() const override { return {DT, (DeviceIndex)t_device}; }
  void setDevice(c10::Device d) const override { if (d.index() >= 0) { check(d.index()); t_device = d.index(); } }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.index() >= 0) t_device = d.index(); }
  static int at(c10::Device d) { return d.index() < 0 ? t_device : d.index(); }
  S getStream(c10::Device d) const override { int i = at(d); return S(S::UNSAFE, {DT, (DeviceIndex)i}, current_stream(i)); }
  S getDefaultStream(c10::Device d) const override { return S(S::UNSAFE, {DT, (DeviceIndex)at(d)}, 0); }
  S getNewStream(c10::Device d, int) const override {
    std::lock_guard<std::recursive_mutex> g(G); int i = at(d); check(i);
    return S(S::UNSAFE, {DT, (DeviceIndex)i}, next_stream[i]++);
  }
  S getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
  S exchangeStream(S s) const override {
    auto old = getStream(s.device()); int i = at(s.device());
    if ((int)t_stream.size() <= i) t_stream.resize(i + 1);
    t_stream[i] = s.id(); return old;
  }
  void* getStreamNativeHandle(const S s) const override { return (void*)(intptr_t)s.id(); }
  void destroyEvent(void* e, DeviceIndex) const noexcept override { delete (EventState*)e; }
  void record(void** e, const S& s, DeviceIndex, c10::EventFlag f) const override {
    std::lock_guard<std::recursive_mutex> g(G);
    if (!*e) *e = new EventState;
    auto* ev = (EventState*)*e; auto* st = actors[actor(s.device_index(), s.id())];
    st->clock.join(host);
    ev->clock = st->clock; ev->vt = std::max(st->vt, host_vt); ev->device = s.device_index(); ev->timing = f == c10::EventFlag::BACKEND_DEFAULT;
  }
  void block(void* e, const S& s) const override {
    if (!e) return;
    std::lock_guard<std::recursive_mutex> g(G); n_waits++;
    auto* ev = (EventState*)e; auto* st = actors[actor(s.device_index(), s.id())];
    st->clock.join(ev->clock); st->vt = std::max(st->vt, ev->vt);
  }
  bool queryEvent(void* e) const override {  // done once the host has been told
    if (!e) return true;
    std::lock_guard<std::recursive_mutex> g(G); auto* ev = (EventState*)e;
    host_joins(ev->clock, ev->vt); return true;
  }
  DeviceIndex deviceCount() const noexcept override { return g_count; }
  bool queryStream(const S& s) const override { synchronizeStream(s); return true; }
  void synchronizeStream(const S& s) const override { std::lock_guard<std::recursive_mutex> g(G); host_sync(actor(s.device_index(), s.id())); }
  void synchronizeEvent(void* e) const override { queryEvent(e); }
  void synchronizeDevice(const DeviceIndex d) const override {
    std::lock_guard<std::recursive_mutex> g(G);
    for (size_t a = 0; a < actors.size(); a++) if (actors[a]->device == (d < 0 ? t_device : d)) host_sync(a);
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const S& s) const override { g_alloc.recordStream(p, s); }
  double elapsedTime(void* a, void* b, DeviceIndex) const override {
    TORCH_CHECK(a && b, "Both events must be recorded before calculating elapsed time.");
    return (((EventState*)b)->vt - ((EventState*)a)->vt) / 1e3;
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return c10::DeviceCapability(); }
};

// ----------------------------------------------------------------------------------- generators
struct SimGenerator final : at::CPUGeneratorImpl {
  explicit SimGenerator(DeviceIndex i) : at::CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = c10::Device(DT, i); key_set_ = c10::DispatchKeySet(DK);
  }
  uint64_t off = 0;
  void set_offset(uint64_t o) override { off = o; }
  uint64_t get_offset() const override { return off; }
  static c10::DeviceType device_type() { return DT; }
};
thread_local bool t_hand_out_default = false;
static const at::Generator& default_generator(int i) {
  static auto* all = [] { auto* v = new std::vector<at::Generator>; for (int i = 0; i < 64; i++) v->push_back(at::make_generator<SimGenerator>((DeviceIndex)i)); return v; }();
  return (*all)[i < 0 ? t_device : i];
}
template <class Base> struct HooksOf : Base {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return g_count > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(DeviceIndex i) const override { if (t_hand_out_default) return default_generator(i); return at::make_generator<SimGenerator>((DeviceIndex)(i < 0 ? t_device : i)); }
  at::Device getDeviceFromPtr(void*) const override { return {DT, (DeviceIndex)t_device}; }
  bool isPinnedPtr(const void* p) const override {
    std::lock_guard<std::recursive_mutex> g(G); auto& s = PinnedAllocator::ptrs();
    return s.count(p);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned; }
  DeviceIndex deviceCount() const override { return g_count; }
  void setCurrentDevice(DeviceIndex d) const override { SimGuard().setDevice({DT, d}); }
  DeviceIndex getCurrentDevice() const override { return t_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { auto o = t_device; if (d >= 0) setCurrentDevice(d); return o; }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { auto o = t_device; if (d >= 0 && d < g_count) t_device = d; return o; }
};
namespace at {
struct CUDAHooks final : HooksOf<CUDAHooksInterface> {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  DeviceIndex current_device() const override { return t_device; }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}

// -------------------------------------------------------------------------------------- kernels
static bool is_sim(const Tensor& t) { return t.defined() && t.device().type() == DT; }
static Tensor sim_empty(c10::IntArrayRef size, c10::IntArrayRef stride, at::ScalarType dtype, int dev) {
  c10::DeviceGuard guard(c10::Device(DT, dev));
  return at::detail::empty_strided_generic(size, stride, &g_alloc, c10::DispatchKeySet(DK), dtype);
}
static Tensor cpu_alias(const Tensor& t) {  // the same memory seen as a CPU tensor
  auto* b = block_of(t);
  c10::Storage st(c10::Storage::use_byte_size_t(), b ? b->size : 0, c10::DataPtr(b ? b->ptr : nullptr, c10::kCPU), nullptr, false);
  auto r = at::detail::make_tensor<c10::TensorImpl>(std::move(st), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  r.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) r._set_conj(true);
  if (t.is_neg()) r._set_neg(true);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) r.unsafeGetTensorImpl()->set_wrapped_number(true);
  return r;
}
static Tensor to_sim(const Tensor& c, int dev, const OpP& op) {
  if (!c.defined()) return c;
  Tensor d = c.is_non_overlapping_and_dense() ? c : c.contiguous();
  Tensor r = sim_empty(d.sizes(), d.strides(), d.scalar_type(), dev);
  if (d.numel()) {
    memcpy(r.mutable_data_ptr(), d.const_data_ptr(), d.numel() * d.itemsize());
    std::lock_guard<std::recursive_mutex> g(G);
    touch(r, true, op);
  }
  return r;
}
static double bytes_of(const Tensor& t) { return t.defined() ? (double)t.numel() * t.itemsize() : 0; }

static Tensor k_empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> mf) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "only strided tensors");
  auto d = c10::device_or_default(device); c10::DeviceGuard guard(d);
  return at::detail::empty_generic(size, &g_alloc, c10::DispatchKeySet(DK), c10::dtype_or_default(dtype), mf);
}
static Tensor k_empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  auto d = c10::device_or_default(device); c10::DeviceGuard guard(d);
  return at::detail::empty_strided_generic(size, stride, &g_alloc, c10::DispatchKeySet(DK), c10::dtype_or_default(dtype));
}
static Tensor& k_copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  if (self.is_same(src) || !self.defined() || self.numel() == 0) return self;
  bool d = is_sim(self), s = is_sim(src);
  if (!(d || self.is_cpu()) || !(s || src.is_cpu())) TORCH_CHECK(false, "copy_: ", src.device(), " to ", self.device());
  OpP op = make_op(std::string("copy_") + (s ? d ? (self.device() == src.device() ? "" : " P2P") : " D2H" : " H2D"));
  c10::OptionalDeviceGuard guard(s ? src.device() : self.device());
  {
    std::lock_guard<std::recursive_mutex> g(G);
    int on = current_actor(s ? src.device().index() : self.device().index());
    int other = s && d ? current_actor(self.device().index()) : on;
    if (other != on) wait_actor(on, other);  // as copy_device_to_device: a barrier on both sides
    begin(op, on);
    if (s) touch(src, false, op);
    if (d) touch(self, true, op);
    bool crosses = !(s && d) || self.device() != src.device();
    if (crosses) {  // out of a device, or of the host for it; into a device, or the host from it
      int from = 2 * (s ? src : self).device().index() + !s, to = 2 * (d ? self : src).device().index() + d;
      auto& vt = actors[on]->vt;
      vt = reserve(std::max(vt, host_vt + us_host), us_base + bytes_of(self) / (gbps_link * 1e3), {from, to});
    }
    spend(op, on, us_base + bytes_of(self) / ((crosses ? gbps_link : gbps_mem) * 1e3));
    if (other != on) wait_actor(other, on);
    if (!(s && d) && !non_blocking) host_sync(on);
  }
  Tensor a = d ? cpu_alias(self) : self, b = s ? cpu_alias(src) : src;
  at::AutoDispatchBelowADInplaceOrView below;
  a.copy_(b);
  return self;
}
static Tensor k_copy_from(const Tensor& self, const Tensor& dst, bool nb) { Tensor d = dst; k_copy_(d, self, nb); return dst; }
static Tensor k_copy_from_and_resize(const Tensor& self, const Tensor& dst) { dst.resize_(self.sizes()); Tensor d = dst; k_copy_(d, self, false); return dst; }
static at::Scalar k_local_scalar(const Tensor& self) {
  OpP op = make_op("item");
  { std::lock_guard<std::recursive_mutex> g(G); int a = current_actor(self.device().index());
    begin(op, a); touch(self, false, op); spend(op, a, us_base); host_sync(a); }
  return at::native::_local_scalar_dense_cpu(cpu_alias(self));
}
static Tensor k_as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> off) {
  return at::native::as_strided_tensorimpl(self, size, stride, off);
}
static const Tensor& k_resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> mf) {
  int64_t n = c10::multiply_integers(size);
  auto* impl = self.unsafeGetTensorImpl();
  size_t need = (n + self.storage_offset()) * self.itemsize();
  if (n && need > self.storage().nbytes()) {
    c10::DeviceGuard guard(self.device());
    auto fresh = g_alloc.allocate(need); auto* b = (Block*)fresh.get_context();
    if (self.storage().nbytes()) {
      OpP op = make_op("resize_");
      { std::lock_guard<std::recursive_mutex> g(G); begin(op, current_actor(self.device().index()));
        touch(block_of(self), 0, block_of(self)->size, false, op); touch(b, 0, b->size, true, op); }
      memcpy(b->ptr, block_of(self)->ptr, std::min(need, (size_t)self.storage().nbytes()));
    }
    auto* st = self.storage().unsafeGetStorageImpl();
    st->set_data_ptr_noswap(std::move(fresh)); st->set_nbytes(need);
  }
  impl->set_sizes_contiguous(size);
  if (mf) impl->empty_tensor_restride(*mf);
  return self;
}
static Tensor& k_set_storage_off(Tensor& self, at::Storage s, int64_t off, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(s);
  std::vector<int64_t> st(stride.begin(), stride.end());
  if (st.size() != size.size()) { st.assign(size.size(), 1); for (int i = (int)size.size() - 2; i >= 0; i--) st[i] = st[i + 1] * std::max<int64_t>(size[i + 1], 1); }
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, st, off);
  return self;
}
static Tensor& k_set_storage(Tensor& self, at::Storage s) {
  int64_t n = s.nbytes() / self.itemsize(); return k_set_storage_off(self, s, 0, {n}, {});
}
static Tensor& k_set(Tensor& self) {
  c10::Storage s(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, self.device()), &g_alloc, true);
  return k_set_storage_off(self, s, 0, {0}, {});
}
static void k_record_stream(Tensor& self, at::Stream s) { g_alloc.recordStream(self.storage().data_ptr(), s); }
static bool k_is_pinned(const Tensor&, std::optional<at::Device>) { return false; }

static const std::unordered_set<std::string> SYNCS = {"aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
  "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave", "aten::_local_scalar_dense"};
static const std::unordered_set<std::string> MIXES = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put",
  "aten::_foreach_norm", "aten::_amp_update_scale_"};

// Each weight is used once for each sample and place of the output; so it is in each gradient.
static double conv_flops(const Tensor& y, const Tensor& w) {
  return y.dim() < 2 ? 0 : 2.0 * w.numel() * y.numel() / std::max<int64_t>(y.size(1), 1);
}
static double conv_flops(const std::string& name, const std::vector<IValue>& in, const IValue* out, size_t outs) {
  bool back = name.find("backward") != std::string::npos, transposed = name.find("transpose") != std::string::npos;
  if (in.size() < 3 || !in[1].isTensor() || !outs || !out[0].isTensor()) return 0;
  const Tensor& y = transposed ? in[back].toTensor() : back ? in[0].toTensor() : out[0].toTensor();
  double times = back ? 0 : 1;
  for (size_t k = 0; back && k < std::min<size_t>(outs, 2); k++) times += out[k].isTensor() && out[k].toTensor().defined();
  return times * conv_flops(y, in[1 + back].toTensor());
}
static void fallback_as(const c10::OperatorHandle& op, torch::jit::Stack* stack, const c10::OperatorHandle& runs) {
  const auto& schema = op.schema();
  const auto n = schema.arguments().size();
  const auto base = stack->size() - n;
  int dev = -1; std::string other;
  bool mixes = MIXES.count(schema.name());
  auto look = [&](const Tensor& t) {
    if (is_sim(t)) {
      if (dev < 0) dev = t.device().index();
      else if (dev != t.device().index()) {
        TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ",
          c10::Device(DT, dev), " and ", t.device(), "! (in ", schema.name(), ")");
      }
    } else if (t.defined() && t.is_cpu() && t.dim() > 0 && !mixes) other = "cpu";
  };
  for (size_t k = 0; k < n; k++) {
    auto& v = (*stack)[base + k];
    if (v.isTensor()) look(v.toTensor());
    else if (v.isTensorList()) for (const Tensor& t : v.toTensorVector()) look(t);
    else if (v.isOptionalTensorList()) { for (const std::optional<Tensor>& t : v.toOptionalTensorVector()) if (t) look(*t); }
    else if (v.isDevice() && v.toDevice().type() == DT && dev < 0) dev = v.toDevice().has_index() ? v.toDevice().index() : t_device;
  }
  if (dev < 0) dev = t_device;
  TORCH_CHECK(other.empty(), "Expected all tensors to be on the same device, but found at least two devices, ",
    c10::Device(DT, dev), " and cpu! (in ", schema.name(), ")");
  c10::DeviceGuard guard(c10::Device(DT, dev));
  bool view = false;
  for (auto& r : schema.returns()) if (r.alias_info() && !r.alias_info()->isWrite()) view = true;
  OpP info = view ? std::make_shared<OpInfo>() : make_op(schema.name().substr(6) + (schema.overload_name().empty() ? "" : "." + schema.overload_name()));
  std::vector<IValue> originals(stack->begin() + base, stack->end());
  struct Out { Tensor sim, cpu; }; std::vector<Out> outs;
  std::vector<std::pair<Tensor, bool>> uses; double bytes = 0;
  bool bn = schema.name() == "aten::native_batch_norm";
  std::optional<at::Generator> gen; int gen_at = -1;
  auto convert = [&](const Tensor& t, bool write) -> Tensor {
    if (!is_sim(t)) return t;
    if (!view) uses.push_back({t, write});
    bytes += bytes_of(t);
    if (write && t.numel() == 0) { Tensor c = at::empty(t.sizes(), t.options().device(at::kCPU)); outs.push_back({t, c}); return c; }
    return cpu_alias(t);
  };
  for (size_t k = 0; k < n; k++) {
    auto& v = (*stack)[base + k];
    auto* ai = schema.arguments()[k].alias_info();
    bool write = (ai && ai->isWrite()) || (bn && (k == 3 || k == 4) && originals[5].toBool());
    if (v.isTensor()) v = convert(v.toTensor(), write);
    else if (v.isTensorList()) { auto l = v.toTensorVector(); for (auto& t : l) t = convert(t, write); v = IValue(c10::List<Tensor>(l)); }
    else if (v.isOptionalTensorList()) { c10::List<std::optional<Tensor>> l; for (std::optional<Tensor> t : v.toOptionalTensorVector()) l.push_back(t ? std::optional<Tensor>(convert(*t, write)) : t); v = IValue(l); }
    else if (v.isDevice() && v.toDevice().type() == DT) v = IValue(c10::Device(c10::kCPU));
    else if (v.isGenerator()) { gen = v.toGenerator(); gen_at = k; v = IValue(); }
  }
  int a = -1;
  if (!view) {
    std::lock_guard<std::recursive_mutex> g(G);
    a = current_actor(dev); begin(info, a);
    for (auto& [t, w] : uses) touch(t, w, info);
  }
  // Everything that draws does so from the device's generator, put into the CPU's default one.
  bool draws = runs.hasTag(at::Tag::nondeterministic_seeded);
  auto call = [&] { runs.callBoxed(stack); };
  {
    at::AutoDispatchBelowADInplaceOrView below;
    if (draws && gen && gen->device().is_cpu()) { (*stack)[base + gen_at] = IValue(*gen); call(); }
    else if (draws) {
      at::Generator mine = gen ? *gen : default_generator(dev);
      at::Generator cpu = at::detail::getDefaultCPUGenerator();
      static std::mutex lend; std::lock_guard<std::mutex> l(lend);
      at::Tensor old; 
      { std::lock_guard<std::mutex> gl(cpu.mutex()); old = cpu.get_state(); cpu.set_state(mine.get_state()); }
      auto back = [&] { std::lock_guard<std::mutex> gl(cpu.mutex()); mine.set_state(cpu.get_state()); cpu.set_state(old); };
      try { call(); } catch (...) { back(); throw; }
      back();
    } else call();
  }
  const auto nret = schema.returns().size();
  const auto rbase = stack->size() - nret;
  for (auto& o : outs) if (o.cpu.numel()) {
    k_resize_(o.sim, o.cpu.sizes(), std::nullopt);
    Tensor al = cpu_alias(o.sim); at::AutoDispatchBelowADInplaceOrView below; al.copy_(o.cpu);
    std::lock_guard<std::recursive_mutex> g(G); touch(o.sim, true, info);
  }
  for (size_t r = 0; r < nret; r++) {
    auto& v = (*stack)[rbase + r];
    auto* ai = schema.returns()[r].alias_info();
    if (ai && ai->isWrite()) {
      for (size_t k = 0; k < n; k++) {
        auto* aa = schema.arguments()[k].alias_info();
        if (aa && *aa == *ai) { v = originals[k]; break; }
      }
    } else if (ai) {
      Tensor self; for (auto& o : originals) if (o.isTensor()) { self = o.toTensor(); break; }
      auto wrap = [&](const Tensor& t) {
        Tensor r2 = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), t.dtype());
        r2.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset()); return r2; };
      if (v.isTensor()) v = wrap(v.toTensor());
      else { std::vector<Tensor> l; for (const Tensor& t : v.toTensorVector()) l.push_back(wrap(t)); v = IValue(l); }
    } else if (v.isTensor()) { bytes += bytes_of(v.toTensor()); v = to_sim(v.toTensor(), dev, info); }
    else if (v.isTensorList()) { std::vector<Tensor> l; for (const Tensor& t : v.toTensorVector()) l.push_back(to_sim(t, dev, info)); v = IValue(l); }
  }
  if (!view) {
    std::lock_guard<std::recursive_mutex> g(G);
    double flops = 0; const auto& nm = schema.name();
    if ((nm == "aten::mm" || nm == "aten::addmm" || nm == "aten::bmm") && nret && (*stack)[rbase].isTensor()) {
      const Tensor& x = originals[nm == "aten::addmm" ? 1 : 0].toTensor(); flops = 2.0 * (*stack)[rbase].toTensor().numel() * x.size(-1);
    } else if (nm.find("conv") != std::string::npos) flops = conv_flops(nm, originals, stack->data() + rbase, nret);
    spend(info, a, us_base + std::max(bytes / (gbps_mem * 1e3), flops / (tflops * 1e6)));
    if (SYNCS.count(nm)) host_sync(a);
  }
}
static void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { fallback_as(op, stack, op); }
static void k_conv(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  fallback_as(op, stack, c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", ""));
}
static std::tuple<Tensor, Tensor, Tensor> k_conv_backward(const Tensor& dy, const Tensor& x, const Tensor& w, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef outpad, int64_t groups, std::array<bool, 3> mask) {
  OpP op = make_op("convolution_backward"); int dev = x.device().index(); c10::DeviceGuard guard(x.device());
  { std::lock_guard<std::recursive_mutex> g(G); begin(op, current_actor(dev)); for (auto* t : {&dy, &x, &w}) touch(*t, false, op);
    double bytes = 0, flops = (mask[0] + mask[1]) * conv_flops(transposed ? x : dy, w);
    for (auto* t : {&dy, &x, &w}) bytes += bytes_of(*t);
    if (mask[0]) bytes += bytes_of(x);
    if (mask[1]) bytes += bytes_of(w);
    spend(op, op->actor, us_base + std::max(bytes / (gbps_mem * 1e3), flops / (tflops * 1e6))); }
  at::AutoDispatchBelowADInplaceOrView below;
  int64_t nb = transposed ? w.size(1) * groups : w.size(0);
  auto [a, b, c] = at::convolution_backward(cpu_alias(dy), cpu_alias(x), cpu_alias(w), c10::OptionalIntArrayRef(c10::IntArrayRef(&nb, 1)), stride, padding, dilation, transposed, outpad, groups, mask);
  return {to_sim(a, dev, op), to_sim(b, dev, op), to_sim(c, dev, op)};
}
static int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) { return 0; }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", k_empty);
  m.impl("empty_strided", k_empty_strided);
  m.impl("copy_", k_copy_);
  m.impl("_copy_from", k_copy_from);
  m.impl("_copy_from_and_resize", k_copy_from_and_resize);
  m.impl("_local_scalar_dense", k_local_scalar);
  m.impl("as_strided", k_as_strided);
  m.impl("resize_", k_resize_);
  m.impl("set_.source_Storage", k_set_storage);
  m.impl("set_.source_Storage_storage_offset", k_set_storage_off);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_", k_set);
  m.impl("record_stream", k_record_stream);
}

// Structured ops reach a backend without kernels through CompositeExplicitAutogradNonFunctional, which
// calls their .out overload with an output of ours: give them the fallback itself, as CUDA has kernels.
static torch::Library& structured() {
  static auto* lib = new torch::Library(torch::Library::IMPL, "aten", DK, __FILE__, __LINE__);
  return *lib;
}
static int register_structured() {
  auto& d = c10::Dispatcher::singleton(); int n = 0;
  for (auto& name : d.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto h = d.findOp(name);
    if (!h || !h->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional)) continue;
    if (!h->hasKernelForDispatchKey(c10::DispatchKey::CPU) || h->hasKernelForDispatchKey(DK)) continue;
    structured().impl((name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name)).c_str(),
      torch::CppFunction::makeFromBoxedFunction<&fallback>()); n++;
  }
  return n;
}
static int init = [] {
  register_structured();
  static SimGuard guard; c10::impl::registerDeviceGuard(DT, &guard);
  c10::SetAllocator(DT, &g_alloc, 1);
  return 0;
}();

// ----------------------------------------------------------------------------------- C interface
static std::string esc(const std::string& s) {
  std::ostringstream o; for (char c : s) { if (c == '"' || c == '\\') o << '\\' << c; else if (c == '\n') o << "\\n"; else if ((unsigned char)c >= 32) o << c; } return o.str();
}
static std::string frames(const OpP& op) {
  if (!op || !op->tb) return "[]";
  auto st = torch::symbolize({op->tb.get()}); std::ostringstream o; o << "["; int k = 0;
  if (!st.tracebacks.empty()) for (auto i : st.tracebacks[0]) { auto& f = st.all_frames[i]; o << (k++ ? "," : "") << '"' << esc(f.filename + ":" + std::to_string(f.lineno) + " " + f.funcname) << '"'; }
  o << "]"; return o.str();
}
static std::string op_json(const OpP& op) {
  if (!op) return "null";
  std::ostringstream o;
  o << "{\"op\":\"" << esc(op->name) << "\",\"node\":\"" << esc(op->node) << "\",\"thread\":\"" << esc(op->thread) << "\",\"stream\":\"" << actor_name(op->actor) << "\",\"number\":" << op->number << ",\"stack\":" << frames(op) << "}";
  return o.str();
}
#pragma GCC visibility push(default)
static char* give(const std::string& s) { return strdup(s.c_str()); }
extern "C" {
char* sim_reports() {
  std::vector<Report> r; { std::lock_guard<std::recursive_mutex> g(G); r = reports; }
  std::ostringstream o; o << "["; int k = 0;
  for (auto& x : r) o << (k++ ? ",\n" : "") << "{\"kind\":\"" << x.kind << "\",\"device\":" << x.device << ",\"how\":\"" << esc(x.how) << "\",\"size\":" << x.size
    << ",\"now\":" << op_json(x.now) << ",\"before\":" << op_json(x.before) << ",\"third\":" << op_json(x.third) << "}";
  o << "]"; return give(o.str());
}
char* sim_trace() {
  std::lock_guard<std::recursive_mutex> g(G); std::ostringstream o; o << "["; int k = 0;
  for (auto& t : traced) o << (k++ ? "," : "") << "[\"" << actor_name(t.actor) << "\"," << t.start << "," << t.end << ",\"" << esc(t.name) << "\"]";
  o << "]"; return give(o.str());
}
void sim_free(char* p) { free(p); }
void sim_clear() { std::lock_guard<std::recursive_mutex> g(G); reports.clear(); seen_reports.clear(); n_reports = 0; traced.clear(); }
void sim_reset_clock() { std::lock_guard<std::recursive_mutex> g(G); host_vt = 0; busy.clear(); for (auto* s : actors) { s->vt = 0; host.join(s->clock); } traced.clear(); }
void sim_set(int stacks, int detect, int trace) { g_stacks = stacks; g_detect = detect; g_trace = trace; }
void sim_shutdown() { std::lock_guard<std::recursive_mutex> g(G); g_alive = g_detect = g_stacks = false; reports.clear(); pending.clear(); }
void sim_limit(int d, size_t n) { limit_[d] = n; }
void sim_reset_peak(int d) { std::lock_guard<std::recursive_mutex> g(G); peak[d] = live[d]; }
size_t sim_live(int d) { return live[d]; }
size_t sim_peak(int d) { return peak[d]; }
size_t sim_stat(int k) { size_t all[] = {n_ops, n_blocks, n_syncs, n_waits, n_reports, actors.size()}; return all[k]; }
double sim_vt(int d) { double r = 0; for (auto* s : actors) if (s->device == d) r = std::max(r, s->vt); return r; }
double sim_elapsed(size_t a, size_t b) { return (((EventState*)b)->vt - ((EventState*)a)->vt) / 1e3; }
double sim_host_vt() { return host_vt; }
void sim_rates(double us, double mem, double link, double tf, double h) { us_base = us; gbps_mem = mem; gbps_link = link; tflops = tf; us_host = h; }
void sim_sleep(double us) { OpP op = make_op("sleep"); std::lock_guard<std::recursive_mutex> g(G); int a = current_actor(t_device); begin(op, a); spend(op, a, us); }
int sim_current_device() { return t_device; }
void sim_hand_out_default(int x) { t_hand_out_default = x; }
int sim_count() { return g_count; }
}
