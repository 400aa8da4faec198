// All other operators: one kernel, which runs the CPU's.
//
// torch's dispatcher keeps for each operator a table of kernels, one for each dispatch key. This
// library's fallback is what it finds under the key CUDA where nothing else is registered. It is
// "boxed": it sees any operator's arguments as a stack of values, with a schema that says what they
// are. (a!) in a schema means that the operator writes its argument, (a) that its result is a view.
//
// For one call:
//   1. find the device, and refuse tensors of two devices, as CUDA's kernels do;
//   2. put the operation into its stream's order, with the bytes that it reads and writes;
//   3. replace each tensor by the same memory as a tensor of the CPU's, and call the operator again,
//      which finds the CPU's kernel;
//   4. move results to the device: what was written is the argument itself, a view shares its
//      memory, all else is new memory.
//
// (torch's own at::native::cpu_fallback is of no use: it copies arguments from and to the device,
// through operators of the device that would be ordered as transfers.)
#pragma once
#include "copies.h"
#include "work.h"

namespace simulated {

using torch::jit::Stack;

// What stands in for the CPU's kernel, with the arguments on the CPU, and the generator to draw from.
using Substitute = void (*)(Stack&, const at::Generator&);
inline std::map<std::string, Substitute>& substitutes() {
  static auto* all = new std::map<std::string, Substitute>;
  return *all;
}

// What has to be known of an operator, found out at its first call.
struct OperatorInfo {
  static constexpr int kNew = -1, kView = -2;

  std::string_view name;  // add.Tensor
  std::vector<bool> writes;        // for each argument
  std::vector<int> results;        // kNew, kView, or the argument that is returned
  bool is_view = false;
  bool draws = false;              // random numbers
  int generator = -1;              // the argument that is the generator
  bool mixes_devices = false;
  bool trains_statistics = false;  // writes arguments 3 and 4 if 5 is true, which its schema hides
  HostWaits host_waits = HostWaits::never;
  Work work = Work::moves_bytes;
  Substitute substitute = nullptr;

  explicit OperatorInfo(const c10::OperatorHandle& op) {
    const c10::FunctionSchema& schema = op.schema();
    const std::string& full_name = schema.name();  // aten::add
    const std::string& overload = schema.overload_name();
    std::string shown = full_name.substr(full_name.find("::") + 2);
    name = keep_string(overload.empty() ? shown : shown + "." + overload);
    for (const c10::Argument& argument : schema.arguments()) {
      bool is_generator = argument.type()->str().find("Generator") != std::string::npos;
      if (is_generator) generator = (int)writes.size();
      writes.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    }
    for (const c10::Argument& result : schema.returns()) results.push_back(origin(schema, result));
    is_view = std::count(results.begin(), results.end(), kView) > 0;
    draws = op.hasTag(at::Tag::nondeterministic_seeded);
    mixes_devices = may_mix_devices(full_name);
    trains_statistics = full_name == "aten::native_batch_norm";
    host_waits = host_waits_of(full_name);
    work = work_of(full_name);
    auto found = substitutes().find(shown);
    if (found != substitutes().end()) substitute = found->second;
    TORCH_CHECK(!draws || generator >= 0 || substitute || full_name == "aten::_fused_sdp_choice",
                "not simulated: ", full_name, " draws random numbers without a generator");
  }

  static const OperatorInfo& of(const c10::OperatorHandle& op) {
    thread_local std::unordered_map<const void*, const OperatorInfo*> known;
    const OperatorInfo*& info = known[&op.schema()];
    if (!info) info = new OperatorInfo(op);
    return *info;
  }

 private:
  static int origin(const c10::FunctionSchema& schema, const c10::Argument& result) {
    if (!result.alias_info()) return kNew;
    if (!result.alias_info()->isWrite()) return kView;
    for (size_t k = 0; k < schema.arguments().size(); k++) {
      const c10::AliasInfo* argument = schema.arguments()[k].alias_info();
      if (argument && *argument == *result.alias_info()) return (int)k;
    }
    TORCH_CHECK(false, "not simulated: ", schema);
  }
  // Operators that accept indices, masks or scalars of the CPU's beside tensors of a device.
  static bool may_mix_devices(const std::string& name) {
    static const std::set<std::string> mixing = {
        "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
        "aten::_foreach_norm", "aten::_amp_update_scale_"};
    return mixing.count(name) > 0;
  }
};

// Calls `visit(tensor)` for each tensor of an argument, and replaces it by what that returns.
template <class Visit>
void replace_tensors(c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = visit(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<at::Tensor> replaced;
    for (const at::Tensor& tensor : value.toTensorVector()) replaced.push_back(visit(tensor));
    value = c10::IValue(std::move(replaced));
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> replaced;
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorVector()) {
      if (tensor && tensor->defined()) tensor = visit(*tensor);
      replaced.push_back(std::move(tensor));
    }
    value = c10::IValue(std::move(replaced));
  }
}

// Calls `visit(tensor)` for each tensor of an argument.
template <class Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    c10::IValue copy = value;
    replace_tensors(copy, [&](const at::Tensor& tensor) { visit(tensor); return tensor; });
  }
}

// One call of an operator; see the top of this file.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack& stack)
      : op_(op), info_(OperatorInfo::of(op)), stack_(stack),
        first_(stack.size() - info_.writes.size()),
        arguments_(stack.begin() + first_, stack.end()) {}

  void run() {
    find_device();
    c10::DeviceGuard guard(Guard::device_at(device_));
    operation_ = info_.is_view ? std::make_shared<Operation>() : describe(info_.name);
    if (!info_.is_view) order();
    replace_arguments();
    {
      at::AutoDispatchBelowADInplaceOrView below;
      if (info_.substitute) info_.substitute(stack_, generator_);
      else op_.callBoxed(&stack_);
    }
    first_ = stack_.size() - info_.results.size();
    results_.assign(stack_.begin() + first_, stack_.end());
    for (const Grown& grown : grown_) store(grown);
    for (size_t k = 0; k < results_.size(); k++) stack_[first_ + k] = result(k);
    if (!info_.is_view) finish_call();
  }

 private:
  // A written argument whose size the operator may change: it is empty, or sparse.
  struct Grown {
    at::Tensor ours, on_cpu;
  };

  const c10::OperatorHandle& op_;
  const OperatorInfo& info_;
  Stack& stack_;
  size_t first_;  // of the arguments on the stack, then of the results
  std::vector<c10::IValue> arguments_;
  std::vector<c10::IValue> results_;  // the CPU's
  std::vector<Grown> grown_;
  OperationPtr operation_;
  at::Generator generator_;
  int device_ = -1;

  bool writes(size_t k) const {
    if (info_.trains_statistics && (k == 3 || k == 4)) return arguments_[5].toBool();
    return info_.writes[k];
  }

  void find_device() {
    bool cpu = false;
    auto look = [&](const at::Tensor& tensor) {
      if (!is_simulated(tensor)) {
        cpu |= tensor.is_cpu() && tensor.dim() > 0;
        return;
      }
      int device = tensor.device().index();
      if (device_ < 0) device_ = device;
      if (device_ != device) refuse(tensor.device());
    };
    for (const c10::IValue& argument : arguments_) each_tensor(argument, look);
    for (const c10::IValue& argument : arguments_) {
      bool named = argument.isDevice() && argument.toDevice().type() == kDevice;
      if (device_ < 0 && named) device_ = Guard::index_of(argument.toDevice());
    }
    if (device_ < 0) device_ = current_device;
    if (cpu && !info_.mixes_devices) refuse(c10::Device(c10::kCPU));
  }

  void refuse(c10::Device other) const {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two "
                "devices, ", Guard::device_at(device_), " and ", other, "! (in ", info_.name, ")");
  }

  void order() {
    Locked locked(state_mutex);
    launch(*operation_, current_stream(device_));
    for (size_t k = 0; k < arguments_.size(); k++) {
      each_tensor(arguments_[k], [&](const at::Tensor& tensor) {
        if (!is_simulated(tensor)) return;
        each_part(tensor, [&](const at::Tensor& part) { use(part, writes(k), operation_); });
      });
    }
  }

  void replace_arguments() {
    for (size_t k = 0; k < arguments_.size(); k++) {
      c10::IValue& argument = stack_[first_ + k];
      if (argument.isDevice() && argument.toDevice().type() == kDevice) {
        argument = c10::IValue(c10::Device(c10::kCPU));
      }
      replace_tensors(argument, [&](const at::Tensor& tensor) {
        bool may_grow = tensor.is_sparse() || tensor.numel() == 0;
        if (!may_grow || !writes(k) || !is_simulated(tensor)) return simulated::on_cpu(tensor);
        at::Tensor given = tensor.is_sparse()
            ? simulated::on_cpu(tensor)
            : at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
        grown_.push_back({tensor, given});
        return given;
      });
    }
    if (!info_.draws) return;
    std::optional<at::Generator> given;
    if (info_.generator >= 0 && !arguments_[info_.generator].isNone()) {
      given = arguments_[info_.generator].toGenerator();
    }
    generator_ = simulated::on_cpu(given, device_);
    if (info_.generator >= 0) stack_[first_ + info_.generator] = c10::IValue(generator_);
  }

  void store(const Grown& grown) const {
    const auto& [ours, on_cpu] = grown;
    if (ours.is_sparse()) {
      at::Tensor moved = to_device(on_cpu, device_, operation_);
      auto* result = at::sparse::get_sparse_impl(moved);
      auto* impl = at::sparse::get_sparse_impl(ours);
      impl->set_indices_and_values_unsafe(result->indices(), result->values());
      impl->set_coalesced(result->coalesced());
    } else if (on_cpu.numel()) {
      resize_(ours, on_cpu.sizes(), std::nullopt);
      copy_values(simulated::on_cpu(ours), on_cpu);
      Locked locked(state_mutex);
      use(ours, true, operation_);
    }
  }

  c10::IValue result(size_t k) {
    int origin = info_.results[k];
    if (origin >= 0) return arguments_[origin];
    c10::IValue value = std::move(results_[k]);
    stack_[first_ + k] = c10::IValue();  // the only one who holds the tensor is `value`
    if (origin == OperatorInfo::kView) {
      replace_tensors(value, [&](const at::Tensor& t) { return view_of_argument(t); });
    } else {
      replace_tensors(value, [&](const at::Tensor& t) { return to_device(t, device_, operation_); });
    }
    return value;
  }

  at::Tensor view_of_argument(const at::Tensor& view) const {
    at::Tensor base;
    for (const c10::IValue& argument : arguments_) {
      if (argument.isTensor() && !base.defined()) base = argument.toTensor();
    }
    if (base.is_sparse()) {  // detach, alias
      auto* impl = at::sparse::get_sparse_impl(base);
      return make_sparse(view, impl->indices(), impl->values(), c10::DispatchKey::SparseCUDA);
    }
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), view.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
    made._set_conj(view.is_conj());
    made._set_neg(view.is_neg());
    return made;
  }

  void finish_call() {
    WorkDone done = work_done(info_.work, arguments_, {stack_.begin() + first_, stack_.end()});
    bool waits = host_waits_now(info_.host_waits, arguments_);
    Locked locked(state_mutex);
    spend(operation_us(done.bytes, done.flops), *operation_);
    if (waits) host_waits_for(*streams[operation_->stream]);
  }
};

inline void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Call(op, *stack).run();
}

}  // namespace simulated
