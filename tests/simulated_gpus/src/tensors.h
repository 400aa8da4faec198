// A tensor of a device and the same memory as a tensor of the CPU's, and results on their way back.
#pragma once
#include "costs.h"
#include "hooks.h"
#include <ATen/EmptyTensor.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/native/SparseTensorUtils.h>

namespace simulated {

constexpr c10::DispatchKeySet kDense(c10::DispatchKey::CUDA);

inline double bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? (double)tensor.numel() * tensor.itemsize() : 0;
}

inline at::Tensor empty_on_device(
    c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype, int device) {
  c10::DeviceGuard guard(Guard::device_at(device));
  return at::detail::empty_strided_generic(sizes, strides, &allocator, kDense, dtype);
}

inline at::Tensor dense_on_cpu(const at::Tensor& tensor) {
  const c10::DataPtr& pointer = tensor.storage().data_ptr();
  c10::DataPtr borrowed(pointer.get(), c10::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                       std::move(borrowed), nullptr, false);
  at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

// A sparse tensor is two dense ones: where its values are, and the values.
inline at::Tensor make_sparse(const at::Tensor& like, const at::Tensor& indices,
                              const at::Tensor& values, c10::DispatchKey key) {
  at::Tensor made = at::detail::make_tensor<at::SparseTensorImpl>(
      c10::DispatchKeySet(key), like.dtype());
  auto* impl = at::sparse::get_sparse_impl(made);
  impl->resize_(like.sparse_dim(), like.dense_dim(), like.sizes());
  impl->set_indices_and_values_unsafe(indices, values);
  impl->set_coalesced(at::sparse::get_sparse_impl(like)->coalesced());
  return made;
}

// The same memory, seen as a tensor of the CPU's.
inline at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!is_simulated(tensor)) return tensor;
  if (!tensor.is_sparse()) return dense_on_cpu(tensor);
  auto* impl = at::sparse::get_sparse_impl(tensor);
  return make_sparse(tensor, dense_on_cpu(impl->indices()), dense_on_cpu(impl->values()),
                     c10::DispatchKey::SparseCPU);
}

// Calls `visit` for the dense tensors that `tensor` is made of.
template <class Visit>
void each_part(const at::Tensor& tensor, Visit visit) {
  if (!tensor.defined()) return;
  if (!tensor.is_sparse()) return visit(tensor);
  visit(at::sparse::get_sparse_impl(tensor)->indices());
  visit(at::sparse::get_sparse_impl(tensor)->values());
}

// The memory of a result of the CPU's, if nothing else holds it: the device can have it as it is.
inline bool is_free_to_take(const at::Tensor& result) {
  const c10::Storage& storage = result.storage();
  return storage.use_count() == 1 && result.storage_offset() == 0 && storage.resizable() &&
      storage.data_ptr().get_deleter() == c10::GetCPUAllocator()->raw_deleter();
}

inline at::Tensor dense_to_device(at::Tensor result, int device, const OperationPtr& operation) {
  if (!result.is_non_overlapping_and_dense()) result = result.contiguous();
  c10::DeviceGuard guard(Guard::device_at(device));
  if (result.numel() == 0) {
    return empty_on_device(result.sizes(), result.strides(), result.scalar_type(), device);
  }
  size_t size = result.numel() * result.itemsize();
  c10::DataPtr memory;
  if (is_free_to_take(result)) {
    auto* storage = result.storage().unsafeGetStorageImpl();
    memory = give_memory(size, device, storage->set_data_ptr(c10::DataPtr(nullptr, c10::kCPU)));
  } else {
    memory = give_memory(size, device);
    memcpy(memory.get(), result.const_data_ptr(), size);
  }
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), size, std::move(memory), &allocator, true);
  at::Tensor made =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), kDense, result.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
  if (result.is_conj()) made._set_conj(true);
  if (result.is_neg()) made._set_neg(true);
  Locked locked(state_mutex);
  use(made, true, operation);
  return made;
}

// Moves a result of the CPU's to a device, as what `operation` has written there.
inline at::Tensor to_device(const at::Tensor& result, int device, const OperationPtr& operation) {
  if (!result.defined()) return result;
  if (!result.is_sparse()) return dense_to_device(result, device, operation);
  auto* impl = at::sparse::get_sparse_impl(result);
  return make_sparse(result, dense_to_device(impl->indices(), device, operation),
                     dense_to_device(impl->values(), device, operation),
                     c10::DispatchKey::SparseCUDA);
}

}  // namespace simulated
