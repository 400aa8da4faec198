// The bytes of an allocation that an operation uses.
#pragma once
#include <ATen/ATen.h>

namespace simulated {

struct Region {
  size_t begin = 0, end = 0;  // from the start of the block
  size_t itemsize = 1;
  bool dense = true;  // all bytes in between; otherwise elements lie at these strides
  std::vector<int64_t> sizes, strides;

  static Region all(size_t size) { return {0, size, 1, true, {}, {}}; }

  static Region of(const at::Tensor& tensor) {
    Region region;
    region.itemsize = tensor.itemsize();
    region.begin = tensor.storage_offset() * region.itemsize;
    size_t elements = 1;
    for (int64_t d = 0; d < tensor.dim(); d++) {
      elements += (tensor.size(d) - 1) * tensor.stride(d);
    }
    region.end = region.begin + elements * region.itemsize;
    region.dense = tensor.is_non_overlapping_and_dense();
    if (!region.dense) {
      region.sizes = tensor.sizes().vec();
      region.strides = tensor.strides().vec();
    }
    return region;
  }

  bool covers(const Region& other) const {
    if (dense) return begin <= other.begin && other.end <= end;
    return begin == other.begin && end == other.end && itemsize == other.itemsize &&
        !other.dense && sizes == other.sizes && strides == other.strides;
  }

  bool overlaps(const Region& other) const {
    if (other.end <= begin || end <= other.begin) return false;
    if (dense && other.dense) return true;
    std::vector<bool> mine(end - begin);
    each_byte([&](size_t byte) { mine[byte - begin] = true; });
    bool found = false;
    other.each_byte([&](size_t byte) { found |= byte >= begin && byte < end && mine[byte - begin]; });
    return found;
  }

 private:
  template <class Visit>
  void each_byte(Visit visit, size_t dim = 0, size_t offset = 0) const {
    if (dense) {
      for (size_t byte = begin; byte < end; byte++) visit(byte);
    } else if (dim == sizes.size()) {
      for (size_t k = 0; k < itemsize; k++) visit(begin + offset + k);
    } else {
      for (int64_t i = 0; i < sizes[dim]; i++) {
        each_byte(visit, dim + 1, offset + i * strides[dim] * itemsize);
      }
    }
  }
};

}  // namespace simulated
