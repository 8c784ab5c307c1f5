// Functions that the parts of torch's CUDA key share.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/stack.h>

namespace c10 {
class OperatorHandle;
}

namespace torchcuda {

// Runs any operator of the dispatcher on CUDA tensors.
void any_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// The CPU generator for that of a CUDA device.
at::Generator numbers_of(const at::Generator& generator);
bool is_pinned_memory(const void* data);

}  // namespace torchcuda
