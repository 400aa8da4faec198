// Making tensors, and the operators that change what memory a tensor has, not what is in it.
#pragma once
#include "tensors.h"
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <torch/library.h>

namespace simulated {

inline at::Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                        std::optional<at::Layout> layout, std::optional<at::Device> device,
                        std::optional<bool>, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "not simulated: ", *layout);
  c10::DeviceGuard guard(c10::device_or_default(device));
  auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_generic(sizes, &allocator, kDense, type, format);
}

inline at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                                std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                std::optional<at::Device> device, std::optional<bool>) {
  int index = Guard::index_of(c10::device_or_default(device));
  return empty_on_device(sizes, strides, c10::dtype_or_default(dtype), index);
}

// New memory of `size` bytes for a storage, which begins as the old one was.
inline void resize_storage(c10::StorageImpl& storage, size_t size) {
  c10::DeviceGuard guard(storage.device());
  c10::DataPtr resized = allocator.allocate(size);
  auto* before = (Block*)storage.data_ptr().get_context();
  auto* after = (Block*)resized.get_context();
  size_t kept = std::min(size, storage.nbytes());
  if (before && after && kept) {
    OperationPtr operation = describe("resize_");
    memcpy(resized.get(), storage.data(), kept);
    Locked locked(state_mutex);
    launch(*operation, current_stream(storage.device().index()));
    use(*before, Region::all(kept), false, operation);
    use(*after, Region::all(kept), true, operation);
  }
  storage.set_data_ptr_noswap(std::move(resized));
  storage.set_nbytes(size);
}

inline const at::Tensor& resize_(
    const at::Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  int64_t elements = c10::multiply_integers(sizes);
  size_t needed = elements ? (elements + self.storage_offset()) * self.itemsize() : 0;
  if (needed > self.storage().nbytes()) {
    resize_storage(*self.storage().unsafeGetStorageImpl(), needed);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

inline at::Tensor& set_storage_at(at::Tensor& self, at::Storage source, int64_t offset,
                                  c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  std::vector<int64_t> contiguous(sizes.size(), 1);
  for (int d = (int)sizes.size() - 2; d >= 0; d--) {
    contiguous[d] = contiguous[d + 1] * std::max<int64_t>(sizes[d + 1], 1);
  }
  if (strides.size() != sizes.size()) strides = contiguous;
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return self;
}

inline at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  int64_t elements = source.nbytes() / self.itemsize();
  return set_storage_at(self, source, 0, {elements}, {});
}

inline at::Tensor& set_to_nothing(at::Tensor& self) {
  c10::DataPtr nothing(nullptr, self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, std::move(nothing), &allocator, true);
  return set_storage_at(self, storage, 0, {0}, {});
}

inline at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef sizes,
                             c10::IntArrayRef strides, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

inline void record_stream(at::Tensor& self, at::Stream stream) {
  each_part(self, [&](const at::Tensor& part) {
    allocator.recordStream(part.storage().data_ptr(), stream);
  });
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("resize_", resize_);
  library.impl("set_", set_to_nothing);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_storage_at);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("record_stream", record_stream);
}

}  // namespace simulated
