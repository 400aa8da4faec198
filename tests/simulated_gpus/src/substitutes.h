// Operators that CUDA has and the CPU lacks, or that draw random numbers without saying whose:
// written with other operators, on the CPU.
#pragma once
#include "kernels.h"

namespace simulated {

inline at::Tensor tensor_at(const Stack& stack, size_t k) {
  return stack[k].isNone() ? at::Tensor() : stack[k].toTensor();
}

template <class... Results>
void give(Stack& stack, size_t arguments, Results... results) {
  stack.resize(stack.size() - arguments);
  (stack.push_back(c10::IValue(std::move(results))), ...);
}

// native_dropout(input, p, train) -> (output, mask)
inline void native_dropout(Stack& stack, const at::Generator& generator) {
  size_t first = stack.size() - 3;
  at::Tensor input = tensor_at(stack, first);
  double keep = 1 - stack[first + 1].toDouble();
  bool train = stack[first + 2].isNone() || stack[first + 2].toBool();
  at::Tensor mask = at::ones(input.sizes(), input.options().dtype(at::kBool));
  at::Tensor output = input.clone();
  if (train) {
    mask.bernoulli_(keep, generator);
    output = input.mul(mask).mul_(keep == 0 ? 0 : 1 / keep);
  }
  give(stack, 3, output, mask);
}

// other_library::mask(like) -> 0 and 1, by the device's own generator
inline void mask(Stack& stack, const at::Generator& generator) {
  give(stack, 1, at::empty_like(tensor_at(stack, stack.size() - 1)).bernoulli_(0.5, generator));
}

// histc(self, bins, min, max): CUDA's counts integers, too
inline void histc(Stack& stack, const at::Generator&) {
  size_t first = stack.size() - 4;
  at::Tensor self = tensor_at(stack, first);
  at::Tensor counts = at::histc(self.to(at::kDouble), stack[first + 1].toInt(),
                                stack[first + 2].toScalar(), stack[first + 3].toScalar());
  give(stack, 4, counts.to(self.scalar_type()));
}

// _efficientzerotensor(size, dtype, layout, device, pin_memory): on the CPU it has no memory that
// could be taken to a device
inline void zero_tensor(Stack& stack, const at::Generator&) {
  size_t first = stack.size() - 5;
  at::TensorOptions options;
  if (!stack[first + 1].isNone()) options = options.dtype(stack[first + 1].toScalarType());
  give(stack, 5, at::zeros(stack[first].toIntVector(), options));
}

inline at::Tensor with_bias(const at::Tensor& gates, const at::Tensor& bias) {
  return bias.defined() ? gates + bias : gates;
}

// _thnn_fused_lstm_cell(input_gates, hidden_gates, cx, input_bias, hidden_bias)
//   -> (hy, cy, workspace); the workspace has the four gates, for the backward
inline void lstm_cell(Stack& stack, const at::Generator&) {
  size_t first = stack.size() - 5;
  at::Tensor all = with_bias(tensor_at(stack, first), tensor_at(stack, first + 3)) +
      with_bias(tensor_at(stack, first + 1), tensor_at(stack, first + 4));
  auto gates = all.chunk(4, 1);
  at::Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid();
  at::Tensor cell = gates[2].tanh(), out = gates[3].sigmoid();
  at::Tensor cy = forget * tensor_at(stack, first + 2) + in * cell;
  give(stack, 5, out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1));
}

// _thnn_fused_lstm_cell_backward_impl(grad_hy, grad_cy, cx, cy, workspace, has_bias)
//   -> (grad_gates, grad_cx, grad_bias)
inline void lstm_cell_backward(Stack& stack, const at::Generator&) {
  size_t first = stack.size() - 6;
  at::Tensor grad_hy = tensor_at(stack, first), grad_cy = tensor_at(stack, first + 1);
  at::Tensor cx = tensor_at(stack, first + 2), cy = tensor_at(stack, first + 3);
  auto gates = tensor_at(stack, first + 4).chunk(4, 1);
  at::Tensor in = gates[0], forget = gates[1], cell = gates[2], out = gates[3];
  at::Tensor tanh_cy = cy.tanh();
  if (!grad_hy.defined()) grad_hy = at::zeros_like(cy);
  at::Tensor grad_cell = grad_hy * out * (1 - tanh_cy * tanh_cy);
  if (grad_cy.defined()) grad_cell = grad_cell + grad_cy;
  at::Tensor grad_gates = at::cat(
      {grad_cell * cell * in * (1 - in), grad_cell * cx * forget * (1 - forget),
       grad_cell * in * (1 - cell * cell), grad_hy * tanh_cy * out * (1 - out)}, 1);
  bool has_bias = stack[first + 5].toBool();
  at::Tensor grad_bias = has_bias ? grad_gates.sum(0) : at::Tensor();
  give(stack, 6, grad_gates, grad_cell * forget, grad_bias);
}

// _thnn_fused_gru_cell(input_gates, hidden_gates, hx, input_bias, hidden_bias) -> (hy, workspace)
inline void gru_cell(Stack& stack, const at::Generator&) {
  size_t first = stack.size() - 5;
  auto from_input = with_bias(tensor_at(stack, first), tensor_at(stack, first + 3)).chunk(3, 1);
  at::Tensor hidden_gates = with_bias(tensor_at(stack, first + 1), tensor_at(stack, first + 4));
  auto from_hidden = hidden_gates.chunk(3, 1);
  at::Tensor hx = tensor_at(stack, first + 2);
  at::Tensor reset = (from_input[0] + from_hidden[0]).sigmoid();
  at::Tensor update = (from_input[1] + from_hidden[1]).sigmoid();
  at::Tensor fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  at::Tensor workspace = at::cat({reset, update, fresh, hx, from_hidden[2]}, 1);
  give(stack, 5, fresh + update * (hx - fresh), workspace);
}

// _thnn_fused_gru_cell_backward(grad_hy, workspace, has_bias)
//   -> (grad_input_gates, grad_hidden_gates, grad_hx, grad_input_bias, grad_hidden_bias)
inline void gru_cell_backward(Stack& stack, const at::Generator&) {
  size_t first = stack.size() - 3;
  at::Tensor grad_hy = tensor_at(stack, first);
  auto kept = tensor_at(stack, first + 1).chunk(5, 1);
  at::Tensor reset = kept[0], update = kept[1], fresh = kept[2], hx = kept[3], hidden = kept[4];
  at::Tensor grad_fresh = grad_hy * (1 - update) * (1 - fresh * fresh);
  at::Tensor grad_update = grad_hy * (hx - fresh) * update * (1 - update);
  at::Tensor grad_reset = grad_fresh * hidden * reset * (1 - reset);
  at::Tensor grad_input = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  at::Tensor grad_hidden = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  bool has_bias = stack[first + 2].toBool();
  at::Tensor none;
  give(stack, 3, grad_input, grad_hidden, grad_hy * update, has_bias ? grad_input.sum(0) : none,
       has_bias ? grad_hidden.sum(0) : none);
}

inline void register_substitutes() {
  substitutes() = {
      {"native_dropout", native_dropout},
      {"mask", mask},
      {"histc", histc},
      {"_efficientzerotensor", zero_tensor},
      {"_thnn_fused_lstm_cell", lstm_cell},
      {"_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward},
      {"_thnn_fused_gru_cell", gru_cell},
      {"_thnn_fused_gru_cell_backward", gru_cell_backward},
  };
}

}  // namespace simulated
