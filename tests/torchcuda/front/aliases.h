// CPU tensors over the memory of CUDA tensors as kernels see it, and the ranges that kernels touch.
#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_map>
#include <vector>

#include "graphs.h"

namespace torchcuda {

struct Alias {
  at::Tensor original;
  at::Tensor alias;
};

// Two aliases of one storage share a storage, as their originals do.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor);
  const std::vector<Alias>& made() const { return made_; }
  // Returns the tensor that this is an alias of; null if it is not an alias.
  const at::Tensor* original(const at::Tensor& alias) const;

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
  std::vector<Alias> made_;
};

uint64_t start_of(const at::Tensor& tensor);
// Returns the bytes from the tensor's first to its last element.
Touched range_of(const at::Tensor& tensor);
std::vector<Touched> ranges(const std::vector<Alias>& aliases);
void launch_over(int device, const std::vector<Touched>& touched);

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type,
                         int device);

}  // namespace torchcuda
