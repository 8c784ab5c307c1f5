// Any operator: torch's CPU kernel on aliases of its tensors.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>

#include <set>

#include "aliases.h"
#include "driver.h"
#include "operators.h"

namespace torchcuda {

namespace {

using at::Tensor;
using c10::IValue;
using Stack = torch::jit::Stack;

// They return a number, or a size that depends on the data: a GPU's stream is waited for.
const std::set<std::string> kWaiting = {"aten::_local_scalar_dense",
                                        "aten::equal",
                                        "aten::nonzero",
                                        "aten::masked_select",
                                        "aten::_unique2",
                                        "aten::unique_dim",
                                        "aten::unique_consecutive",
                                        "aten::unique_dim_consecutive",
                                        "aten::is_set_to",
                                        "aten::repeat_interleave",
                                        "aten::bincount",
                                        "aten::histc",
                                        "aten::linalg_solve",
                                        "aten::allclose",
                                        "aten::nonzero_static"};

// TensorIterator and these take indices that are on the CPU.
const std::set<std::string> kHostIndices = {"aten::index", "aten::_index_put_impl_",
                                            "aten::index_put_", "aten::index_put",
                                            "aten::_unsafe_index"};

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), stack_(stack), count_(op.schema().arguments().size()) {}

  void run() {
    find_device();
    check_views();
    const c10::DeviceGuard guard(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(device_)));
    Graph* graph = capturing(device_);
    if (graph != nullptr && !waits()) {
      record(*graph, converted());
      return;
    }
    start_kernel(device_);
    Stack arguments = converted();
    if (graph == nullptr) invoke(arguments);
    launch_over(device_, ranges(aliases_.made()));
    // Refused in a capture.
    if (waits()) synchronize_stream(device_, current_stream(device_));
    finish(arguments);
  }

 private:
  std::string name() const { return op_.schema().name(); }
  IValue& argument(size_t i) { return (*stack_)[stack_->size() - count_ + i]; }
  bool waits() const { return kWaiting.contains(name()); }

  template <typename Visit>
  void each_tensor(const IValue& value, const Visit& visit) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) visit(value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) visit(tensor);
    } else if (value.isList()) {
      for (const IValue& item : value.toListRef()) each_tensor(item, visit);
    }
  }

  void find_device() {
    for (size_t i = 0; i < count_; ++i) {
      if (argument(i).isDevice() && argument(i).toDevice().is_cuda()) {
        const at::Device wanted = argument(i).toDevice();
        device_ = wanted.has_index() ? wanted.index() : current_device();
      }
      each_tensor(argument(i), [&](const Tensor& tensor) { agree(tensor); });
    }
    for (size_t i = 0; i < count_; ++i) {
      each_tensor(argument(i), [&](const Tensor& tensor) { check_host(i, tensor); });
    }
    if (device_ < 0) device_ = current_device();
  }

  void agree(const Tensor& tensor) {
    if (!tensor.is_cuda()) return;
    if (device_ < 0) device_ = tensor.device().index();
    TORCH_CHECK(tensor.device().index() == device_,
                "Expected all tensors to be on the same device, but found at least two devices, "
                "cuda:",
                device_, " and ", tensor.device(), "! (when checking argument in method ", name(),
                ")");
  }

  void check_host(size_t position, const Tensor& tensor) {
    if (tensor.is_cuda() || tensor.dim() == 0) return;
    if (kHostIndices.contains(name()) && op_.schema().arguments()[position].name() == "indices") {
      return;
    }
    TORCH_CHECK(false,
                "Expected all tensors to be on the same device, but found at least two "
                "devices, cuda:",
                device_, " and ", tensor.device(), "! (when checking argument for argument ",
                op_.schema().arguments()[position].name(), " in method ", name(), ")");
  }

  void check_views() {
    for (const c10::Argument& result : op_.schema().returns()) {
      const c10::AliasInfo* alias = result.alias_info();
      TORCH_CHECK_NOT_IMPLEMENTED(alias == nullptr || alias->isWrite(), "the double of torch's ",
                                  "CUDA front has no view operator ", name());
    }
  }

  IValue on_cpu(const IValue& value) {
    if (value.isTensor()) {
      const Tensor tensor = value.toTensor();
      return tensor.defined() && tensor.is_cuda() ? IValue(aliases_.of(tensor)) : value;
    }
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) {
        list.push_back(tensor.defined() && tensor.is_cuda() ? aliases_.of(tensor) : tensor);
      }
      return list;
    }
    if (value.isList() && value.toListRef().size() > 0) return list_on_cpu(value);
    if (value.isDevice() && value.toDevice().is_cuda()) return at::Device(at::kCPU);
    if (value.isGenerator()) return numbers_of(value.toGenerator());
    return value;
  }

  IValue list_on_cpu(const IValue& value) {
    c10::impl::GenericList list(value.toList().elementType());
    for (const IValue& item : value.toListRef()) list.push_back(on_cpu(item));
    return list;
  }

  Stack converted() {
    Stack made;
    for (size_t i = 0; i < count_; ++i) {
      const IValue& value = argument(i);
      const c10::Argument& formal = op_.schema().arguments()[i];
      if (value.isNone() && formal.name() == "generator") {
        const auto index = static_cast<c10::DeviceIndex>(device_);
        made.push_back(numbers_of(at::detail::getCUDAHooks().getDefaultGenerator(index)));
      } else {
        made.push_back(on_cpu(value));
      }
    }
    return made;
  }

  void invoke(Stack& arguments) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
  }

  // Out tensors that the kernel made larger are made larger here as well.
  void resize_outputs() {
    for (const auto& [original, alias] : aliases_.made()) {
      if (original.sizes() == alias.sizes()) continue;
      const_cast<Tensor&>(original).resize_(alias.sizes());
      Aliases again;
      again.of(original).copy_(alias);
    }
  }

  Tensor on_gpu(const Tensor& result) {
    if (const Tensor* original = aliases_.original(result)) return *original;
    Tensor made = empty_strided(result.sizes(), result.strides(), result.scalar_type(), device_);
    outputs_.of(made).copy_(result);
    return made;
  }

  IValue result_on_gpu(const IValue& value) {
    if (value.isTensor()) {
      return value.toTensor().defined() ? IValue(on_gpu(value.toTensor())) : value;
    }
    if (!value.isTensorList()) return value;
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(on_gpu(tensor));
    return list;
  }

  void finish(const Stack& results) {
    resize_outputs();
    Stack converted;
    for (const IValue& value : results) converted.push_back(result_on_gpu(value));
    torch::jit::drop(*stack_, count_);
    for (IValue& value : converted) stack_->push_back(std::move(value));
    launch_over(device_, ranges(outputs_.made()));
  }

  // --- captured ---

  void record(Graph& graph, Stack arguments) {
    Stack results = arguments;
    const bool writes = std::ranges::any_of(op_.schema().arguments(), [](const c10::Argument& a) {
      return a.alias_info() != nullptr && a.alias_info()->isWrite();
    });
    if (writes && !is_empty_written()) {
      results = written(arguments);
    } else {
      // Only the sizes of its results are used: their content is undefined until a replay.
      results = with_safe_indices(std::move(results));
      invoke(results);
    }
    finish(results);
    if (writes) arguments = recorded(std::move(arguments));
    Node node;
    node.touched = ranges(aliases_.made());
    for (const Touched& range : ranges(outputs_.made())) node.touched.push_back(range);
    node.run = replayed(std::move(arguments), std::move(results));
    graph.nodes.push_back(std::move(node));
  }

  // Returns the arguments with zeros for integers, which may be indices that no kernel has computed
  // yet.
  Stack with_safe_indices(Stack arguments) {
    for (size_t i = 0; i < count_; ++i) {
      if (!arguments[i].isTensor() || op_.schema().arguments()[i].alias_info() != nullptr) continue;
      const Tensor tensor = arguments[i].toTensor();
      if (!tensor.defined() || aliases_.original(tensor) == nullptr) continue;
      if (at::isIntegralType(tensor.scalar_type(), false)) arguments[i] = at::zeros_like(tensor);
    }
    return arguments;
  }

  // An out tensor of no elements takes the size that the kernel gives it: the kernel is run for
  // that on separate memory.
  bool is_empty_written() {
    return std::ranges::any_of(aliases_.made(),
                               [](const Alias& entry) { return entry.original.numel() == 0; });
  }

  // The arguments again, since some may have been resized.
  Stack recorded(Stack arguments) {
    for (IValue& value : arguments) {
      if (!value.isTensor() || !value.toTensor().defined()) continue;
      const Tensor* original = aliases_.original(value.toTensor());
      if (original != nullptr) value = again_.of(*original);
    }
    return arguments;
  }

  // Returns the results of an operator that writes into its arguments, without running it.
  Stack written(const Stack& arguments) {
    Stack results;
    for (const c10::Argument& result : op_.schema().returns()) {
      TORCH_CHECK_NOT_IMPLEMENTED(result.alias_info() != nullptr, "the double cannot capture ",
                                  name());
      for (size_t i = 0; i < count_; ++i) {
        const c10::AliasInfo* alias = op_.schema().arguments()[i].alias_info();
        if (alias != nullptr && *alias == *result.alias_info()) results.push_back(arguments[i]);
      }
    }
    return results;
  }

  std::function<void()> replayed(Stack arguments, Stack results) {
    std::vector<std::pair<size_t, Tensor>> made;
    for (size_t i = 0; i < results.size(); ++i) {
      if (!results[i].isTensor() || !results[i].toTensor().defined()) continue;
      const IValue& on_gpu = (*stack_)[stack_->size() - results.size() + i];
      if (aliases_.original(results[i].toTensor()) != nullptr) continue;
      Aliases again;
      made.emplace_back(i, again.of(on_gpu.toTensor()));
    }
    return [op = op_, arguments = std::move(arguments), made = std::move(made)] {
      Stack stack = arguments;
      const at::AutoDispatchBelowADInplaceOrView guard;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
      for (const auto& [i, target] : made) target.copy_(stack[i].toTensor());
    };
  }

  const c10::OperatorHandle& op_;
  Stack* stack_;
  size_t count_;
  int device_ = -1;
  Aliases aliases_;
  Aliases outputs_;
  Aliases again_;
};

}  // namespace

void any_operator(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

}  // namespace torchcuda
