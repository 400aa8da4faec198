// What operators have to do, and which of them let the host wait.
#pragma once
#include "tensors.h"

namespace simulated {

enum class HostWaits { never, always, for_masks };

// Operators whose result's size depends on values: the host has to wait for it ("CUDA semantics" and
// the documentation of torch.nonzero: "causes host-device synchronization").
inline HostWaits host_waits_of(const std::string& name) {
  static const std::set<std::string> always = {
      "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::bincount", "aten::repeat_interleave", "aten::_coalesce"};
  static const std::set<std::string> indexing = {
      "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};
  if (always.count(name)) return HostWaits::always;
  return indexing.count(name) ? HostWaits::for_masks : HostWaits::never;
}

// Indexing by a mask begins with nonzero(), but for x[mask] = one value, which fills.
inline bool host_waits_now(HostWaits when, const std::vector<c10::IValue>& arguments) {
  if (when != HostWaits::for_masks) return when == HostWaits::always;
  bool fills = arguments.size() > 3 && arguments[2].toTensor().numel() == 1 && !arguments[3].toBool();
  if (fills) return false;
  for (const std::optional<at::Tensor>& index : arguments[1].toOptionalTensorVector()) {
    bool mask = index && index->defined() && (index->scalar_type() == at::kBool ||
                                              index->scalar_type() == at::kByte);
    if (mask) return true;
  }
  return false;
}

enum class Work { moves_bytes, picks, multiplies, convolves, convolves_backward };

inline Work work_of(const std::string& name) {
  static const std::map<std::string, Work> known = {
      {"aten::mm", Work::multiplies},          {"aten::addmm", Work::multiplies},
      {"aten::bmm", Work::multiplies},         {"aten::baddbmm", Work::multiplies},
      {"aten::mv", Work::multiplies},          {"aten::addmv", Work::multiplies},
      {"aten::dot", Work::multiplies},         {"aten::convolution", Work::convolves},
      {"aten::convolution_backward", Work::convolves_backward},
      {"aten::embedding", Work::picks},        {"aten::index", Work::picks},
      {"aten::index_select", Work::picks},     {"aten::gather", Work::picks}};
  auto found = known.find(name);
  return found == known.end() ? Work::moves_bytes : found->second;
}

struct WorkDone {
  double bytes = 0, flops = 0;
};

// Attention needs no line of its own: torch computes it by bmm on these devices.
inline WorkDone work_done(
    Work work, const std::vector<c10::IValue>& arguments, const std::vector<c10::IValue>& results) {
  WorkDone done;
  auto add = [](double& sum, const std::vector<c10::IValue>& values) {
    auto add_one = [&](const at::Tensor& t) { sum += is_simulated(t) ? bytes_of(t) : 0; };
    for (const c10::IValue& value : values) {
      if (value.isTensor()) add_one(value.toTensor());
      if (!value.isTensorList()) continue;
      for (const at::Tensor& tensor : value.toTensorVector()) add_one(tensor);
    }
  };
  auto per_output = [](const at::Tensor& weight) {  // multiplications for each element
    return (double)weight.numel() / std::max<int64_t>(weight.size(0), 1);
  };
  add(done.bytes, results);
  if (work == Work::picks) done.bytes *= 2;  // of the whole, it reads only what it gives
  else add(done.bytes, arguments);
  if (work == Work::multiplies) {
    std::vector<at::Tensor> tensors;
    for (const c10::IValue& value : arguments) {
      if (value.isTensor()) tensors.push_back(value.toTensor());
    }
    const at::Tensor& left = tensors[tensors.size() - 2];
    done.flops = 2.0 * results[0].toTensor().numel() * left.size(-1);
  } else if (work == Work::convolves) {
    bool transposed = arguments[6].toBool();
    const at::Tensor& every = (transposed ? arguments[0] : results[0]).toTensor();
    done.flops = 2.0 * every.numel() * per_output(arguments[1].toTensor());
  } else if (work == Work::convolves_backward) {
    bool transposed = arguments[7].toBool();
    auto needed = arguments[10].toBoolList();
    const at::Tensor& every = arguments[transposed ? 1 : 0].toTensor();
    double once = 2.0 * every.numel() * per_output(arguments[2].toTensor());
    done.flops = once * (needed.get(0) + needed.get(1));
  }
  return done;
}

}  // namespace simulated
