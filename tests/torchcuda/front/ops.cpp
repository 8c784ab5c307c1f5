// Kernels for torch's CUDA key. Memory, views and copies are written out; every other operator is
// any_operator (call.cpp).
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "aliases.h"
#include "allocator.h"
#include "driver.h"
#include "operators.h"

namespace torchcuda {

namespace {

using at::Tensor;

const c10::DispatchKeySet kCudaKeys(c10::DispatchKey::CUDA);

// --- memory and views --------------------------------------------------------------------------

Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  const at::Device on = at::device_or_default(device);
  const c10::DeviceGuard guard(on);
  return at::detail::empty_generic(sizes, c10::GetAllocator(at::kCUDA), kCudaKeys,
                                   at::dtype_or_default(type), format);
}

Tensor empty_strided_of(at::IntArrayRef sizes, at::IntArrayRef strides,
                        std::optional<at::ScalarType> type, std::optional<at::Layout>,
                        std::optional<at::Device> device, std::optional<bool>) {
  const at::Device on = at::device_or_default(device);
  const int index = on.has_index() ? on.index() : current_device();
  return empty_strided(sizes, strides, at::dtype_or_default(type), index);
}

Tensor as_strided(const Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                  std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                    at::IntArrayRef strides) {
  at::native::checkSetStorage(self, source, offset, sizes, strides);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  const auto items = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {items}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

Tensor& set_nothing(Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(at::kCUDA), true);
  return set_storage(self, std::move(none), 0, {0}, {1});
}

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking);

const Tensor& resize(const Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  if (self.sizes() == sizes) return self;
  int64_t items = 1;
  for (const int64_t size : sizes) items *= size;
  const size_t bytes = static_cast<size_t>(items + self.storage_offset()) * self.itemsize();
  c10::StorageImpl* storage = self.storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) {
    TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
    const c10::DeviceGuard guard(self.device());
    Tensor before = empty_strided({0}, {1}, self.scalar_type(), self.device().index());
    const size_t kept = storage->nbytes();
    c10::DataPtr fresh = c10::GetAllocator(at::kCUDA)->allocate(bytes);
    c10::DataPtr old = storage->set_data_ptr(std::move(fresh));
    storage->set_nbytes(bytes);
    if (kept > 0) {
      start_kernel(self.device().index());
      const uint64_t distance = driver().test_cuda_kernel_distance();
      std::memcpy(static_cast<char*>(storage->mutable_data()) + distance,
                  static_cast<char*>(old.get()) + distance, kept);
    }
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

void record_stream(Tensor& self, at::Stream stream) {
  record_use(start_of(self), static_cast<uint64_t>(stream.id()));
}

// --- copies ------------------------------------------------------------------------------------

bool is_plain(const Tensor& a, const Tensor& b) {
  return a.is_contiguous() && b.is_contiguous() && a.scalar_type() == b.scalar_type() &&
         a.sizes() == b.sizes() && a.numel() > 0;
}

void copy_within(Tensor& self, const Tensor& source) {
  const int device = self.device().index();
  Aliases aliases;
  Tensor target = aliases.of(self);
  const Tensor from = source.is_cuda() ? aliases.of(source) : source;
  if (Graph* graph = capturing(device)) {
    graph->nodes.push_back({[target, from] { target.copy_(from); }, ranges(aliases.made())});
    return;
  }
  start_kernel(device);
  target.copy_(from);
  launch_over(device, ranges(aliases.made()));
}

// A copy from pinned memory is made in the stream's order. CUDA stages pageable memory first.
void copy_from_host(Tensor& self, const Tensor& source, bool non_blocking) {
  const int device = self.device().index();
  const uint64_t stream = current_stream(device);
  const bool pinned = source.numel() > 0 && is_pinned_memory(source.const_data_ptr());
  if (non_blocking && pinned && is_plain(self, source) && capturing(device) == nullptr) {
    const OnDevice context(device);
    check(driver().cuMemcpyHtoDAsync_v2(range_of(self).address, source.const_data_ptr(),
                                        source.nbytes(), reinterpret_cast<void*>(stream)),
          "cudaMemcpyAsync");
    return;
  }
  // Pageable memory is read before CUDA returns, which no captured stream can promise.
  if (!non_blocking || !pinned) synchronize_stream(device, stream);
  copy_within(self, source);
}

void copy_to_host(Tensor& self, const Tensor& source, bool non_blocking) {
  const int device = source.device().index();
  const uint64_t stream = current_stream(device);
  const bool pinned = self.numel() > 0 && is_pinned_memory(self.const_data_ptr());
  if (!non_blocking || !pinned) synchronize_stream(device, stream);
  Graph* graph = capturing(device);
  Aliases aliases;
  const Tensor from = aliases.of(source);
  if (graph != nullptr) {
    graph->nodes.push_back({[self, from] { self.copy_(from); }, ranges(aliases.made())});
    return;
  }
  const bool later = non_blocking && pinned && is_plain(self, source);
  if (later) {
    const OnDevice context(device);
    check(driver().cuMemcpyDtoHAsync_v2(self.data_ptr(), range_of(source).address, self.nbytes(),
                                        reinterpret_cast<void*>(stream)),
          "cudaMemcpyAsync");
    return;
  }
  synchronize_stream(device, stream);
  self.copy_(from);
}

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) return self;
  const int device = self.is_cuda() ? self.device().index() : source.device().index();
  const c10::DeviceGuard guard(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device)));
  const Tensor shaped = source.sizes() == self.sizes() ? source : source.expand_as(self);
  if (!self.is_cuda()) {
    copy_to_host(self, shaped, non_blocking);
  } else if (!shaped.is_cuda()) {
    copy_from_host(self, shaped, non_blocking);
  } else {
    if (self.device() != shaped.device()) {
      synchronize_stream(shaped.device().index(), current_stream(shaped.device().index()));
    }
    copy_within(self, shaped);
  }
  return self;
}

Tensor copy_between(const Tensor& self, const Tensor& target, bool non_blocking) {
  Tensor to = target;
  return copy(to, self, non_blocking);
}

void replay(Graph* graph) {
  const auto stream = reinterpret_cast<void*>(current_stream(graph->device));
  {
    const OnDevice context(graph->device);
    check(driver().cuGraphLaunch(graph->executable, stream), "cudaGraphLaunch");
  }
  start_kernel(graph->device);
  for (const Node& node : graph->nodes) {
    node.run();
    launch_over(graph->device, node.touched);
  }
}

}  // namespace

}  // namespace torchcuda

namespace {

template <typename Body>
int guarded(char* message, size_t bytes, const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    std::strncpy(message, error.what(), bytes - 1);
    return 1;
  }
}

std::vector<torchcuda::Touched> listed(const uint64_t* triples, int count) {
  std::vector<torchcuda::Touched> touched;
  for (int i = 0; i < count; ++i) {
    touched.push_back({triples[3 * i], triples[3 * i + 1], triples[3 * i + 2] != 0});
  }
  return touched;
}

}  // namespace

extern "C" {

int torchcuda_replay(torchcuda::Graph* graph, char* message, size_t bytes) {
  return guarded(message, bytes, [=] { torchcuda::replay(graph); });
}

// Kernels written in Python (torchcuda_front.kernel). Returns true if it was captured.
int torchcuda_capture_kernel(int device, void (*run)(), const uint64_t* triples, int count) {
  torchcuda::Graph* graph = torchcuda::capturing(device);
  if (graph == nullptr) return 0;
  graph->nodes.push_back({run, listed(triples, count)});
  return 1;
}

int torchcuda_start_kernel(int device, char* message, size_t bytes) {
  return guarded(message, bytes, [=] { torchcuda::start_kernel(device); });
}

int torchcuda_launch(int device, const uint64_t* triples, int count, char* message, size_t bytes) {
  return guarded(message, bytes, [=] { torchcuda::launch_over(device, listed(triples, count)); });
}
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&torchcuda::any_operator>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", torchcuda::empty);
  m.impl("empty_strided", torchcuda::empty_strided_of);
  m.impl("as_strided", torchcuda::as_strided);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", torchcuda::set_storage);
  m.impl("set_.source_Storage", torchcuda::set_whole_storage);
  m.impl("set_.source_Tensor", torchcuda::set_tensor);
  m.impl("set_", torchcuda::set_nothing);
  m.impl("resize_", torchcuda::resize);
  m.impl("record_stream", torchcuda::record_stream);
  m.impl("copy_", torchcuda::copy);
  m.impl("_copy_from", torchcuda::copy_between);
  // As one kernel each, where torch's composite asks for CUDA's own stubs.
  for (const char* whole : {"scaled_dot_product_attention", "linear", "matmul", "rms_norm",
                            "layer_norm", "_fused_rms_norm"}) {
    m.impl(whole, torch::CppFunction::makeFromBoxedFunction<&torchcuda::any_operator>());
  }
}
