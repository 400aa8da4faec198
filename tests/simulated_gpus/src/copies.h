// Copies: within a device, between two, and between a device and the host.
//
// Between devices a copy runs on the source's current stream, with a barrier on both sides, so that
// it is ordered for the current streams of both devices, and for these alone
// (aten/src/ATen/native/cuda/Copy.cu, copy_device_to_device).
//
// The host waits for a copy unless it is non_blocking. Even then it waits where its memory is not
// pinned and is written: cudaMemcpyAsync to pageable memory "will return only once the copy has
// completed" (CUDA Runtime API, "API synchronization behavior", Asynchronous).
#pragma once
#include "views.h"
#include <ATen/ops/_local_scalar_dense_native.h>

namespace simulated {

// The copy of the values, between tensors of the CPU's.
inline void copy_values(at::Tensor target, const at::Tensor& source) {
  at::AutoDispatchBelowADInplaceOrView below;
  target.copy_(source);
}

// A copy of the same pinned memory sees what the ones before it have brought, and reports what the
// host has changed under them.
inline void finish_copies_of(const at::Tensor& pinned) {
  std::vector<PendingCopy> finished;
  {
    Locked locked(state_mutex);
    Block* block = block_of(pinned);
    std::erase_if(pending_copies, [&](PendingCopy& copy) {
      if (copy.block != block) return false;
      finished.push_back(std::move(copy));
      return true;
    });
  }
  finish(std::move(finished));
}

// A copy from or to pinned memory that the host does not wait for.
inline void copy_pinned(at::Tensor& self, const at::Tensor& source, const OperationPtr& operation) {
  at::AutoDispatchBelowADInplaceOrView below;
  bool to_host = self.is_cpu();
  const at::Tensor& pinned = to_host ? self : source;
  finish_copies_of(pinned);
  at::Tensor snapshot;
  if (to_host) {
    snapshot = at::empty_like(self);
    copy_values(snapshot, on_cpu(source));
    if (self.is_non_overlapping_and_dense()) memset(self.mutable_data_ptr(), 0xff, self.nbytes());
  } else {
    snapshot = source.clone();
    copy_values(on_cpu(self), source);
  }
  Locked locked(state_mutex);
  pending_copies.push_back({block_of(pinned), operation->stream, operation->epoch, to_host,
                            pinned.detach(), snapshot, operation});
}

inline void order_copy(const at::Tensor& self, const at::Tensor& source, const OperationPtr& operation) {
  bool from_device = is_simulated(source), to_device = is_simulated(self);
  int source_device = from_device ? source.device().index() : -1;
  int target_device = to_device ? self.device().index() : -1;
  Locked locked(state_mutex);
  int stream = current_stream(from_device ? source_device : target_device);
  int other = from_device && to_device ? current_stream(target_device) : stream;
  auto barrier = [](int waiter, int awaited) {
    if (waiter == awaited) return;
    catch_up_with_host(*streams[awaited]);
    stream_waits_for(*streams[waiter], streams[awaited]->clock, streams[awaited]->time);
  };
  barrier(stream, other);
  launch(*operation, stream);
  use(source, false, operation);
  use(self, true, operation);
  if (source_device == target_device) {
    spend(operation_us(2 * bytes_of(self), 0), *operation);
  } else {
    spend_on_link(bytes_of(self), source_device, target_device, *operation);
  }
  barrier(other, stream);
}

inline std::string_view name_of_copy(const at::Tensor& self, const at::Tensor& source) {
  if (!is_simulated(source)) return "copy_ from host";
  if (!is_simulated(self)) return "copy_ to host";
  return self.device() == source.device() ? "copy_" : "copy_ between devices";
}

inline at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) return self;
  bool known = (is_simulated(self) || self.is_cpu()) && (is_simulated(source) || source.is_cpu());
  TORCH_CHECK(known && !source.is_sparse() && !self.is_sparse(), "not simulated: copy_ from ",
              source.toString(), " to ", self.toString());
  OperationPtr operation = describe(name_of_copy(self, source));
  order_copy(self, source, operation);
  bool to_host = self.is_cpu(), from_host = source.is_cpu();
  bool pinned = is_pinned(to_host ? self : source);
  if (non_blocking && pinned && detecting) {
    copy_pinned(self, source.expand(self.sizes()), operation);
    return self;
  }
  copy_values(on_cpu(self), on_cpu(source));
  bool host_waits = to_host ? !(non_blocking && pinned) : from_host && !non_blocking;
  if (host_waits) let_host_wait([&] { host_waits_for(*streams[operation->stream]); });
  return self;
}

inline at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  at::Tensor written = target;
  copy_(written, self, non_blocking);
  return target;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

// tensor.item(): the host waits for the stream.
inline at::Scalar item(const at::Tensor& self) {
  OperationPtr operation = describe("item");
  let_host_wait([&] {
    int stream = current_stream(self.device().index());
    launch(*operation, stream);
    use(self, false, operation);
    spend_on_link(self.itemsize(), self.device().index(), -1, *operation);
    host_waits_for(*streams[stream]);
  });
  return at::native::_local_scalar_dense_cpu(on_cpu(self));
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
}

}  // namespace simulated
