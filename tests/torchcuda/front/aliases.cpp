#include "aliases.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>

#include "allocator.h"
#include "driver.h"

namespace torchcuda {

using at::Tensor;

namespace {

c10::Storage view_of(const c10::Storage& storage) {
  const auto start = reinterpret_cast<uint64_t>(storage.data());
  const uint64_t view = start == 0 ? 0 : start + driver().test_cuda_kernel_distance();
  c10::DataPtr pointer(reinterpret_cast<void*>(view), at::Device(at::kCPU));
  return {c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer),
          c10::GetCPUAllocator(), true};
}

}  // namespace

uint64_t start_of(const Tensor& tensor) {
  return reinterpret_cast<uint64_t>(tensor.storage().data());
}

Touched range_of(const Tensor& tensor) {
  if (tensor.numel() == 0 || !tensor.has_storage()) return {};
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  const auto item = static_cast<uint64_t>(tensor.itemsize());
  const uint64_t first = start_of(tensor) + static_cast<uint64_t>(tensor.storage_offset()) * item;
  const uint64_t bytes = (static_cast<uint64_t>(last) + 1) * item;
  return {first, bytes, !is_allocated(start_of(tensor))};
}

Tensor Aliases::of(const Tensor& tensor) {
  c10::Storage& storage = storages_[tensor.storage().unsafeGetStorageImpl()];
  if (!storage) storage = view_of(tensor.storage());
  auto impl = c10::make_intrusive<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  Tensor alias{std::move(impl)};
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  made_.push_back({tensor, alias});
  return alias;
}

const Tensor* Aliases::original(const Tensor& alias) const {
  for (const Alias& entry : made_) {
    if (entry.alias.is_same(alias)) return &entry.original;
  }
  return nullptr;
}

void launch_over(int device, const std::vector<Touched>& touched) {
  for (const auto& [address, bytes, holes] : touched) launch(device, address, bytes, holes);
}

std::vector<Touched> ranges(const std::vector<Alias>& aliases) {
  std::vector<Touched> found;
  for (const Alias& entry : aliases) {
    const Touched range = range_of(entry.original);
    if (range.bytes > 0) found.push_back(range);
  }
  return found;
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type,
                     int device) {
  const c10::DeviceGuard guard(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)));
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(at::kCUDA),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), type);
}

}  // namespace torchcuda
