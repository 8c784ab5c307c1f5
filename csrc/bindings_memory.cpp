// Virtual tensors and views for Python.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "binding_tools.h"
#include "dlpack.h"
#include "virtual_tensor.h"

namespace nb = nanobind;

namespace kvcached {

namespace {

constexpr const char* kVersionedName = "dltensor_versioned";
constexpr const char* kUnversionedName = "dltensor";

// A consumer renames the capsule and frees the tensor. A capsule with its original name was never
// consumed.
void drop_capsule(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, kVersionedName) != 0) {
    free_versioned(PyCapsule_GetPointer(capsule, kVersionedName));
  } else if (PyCapsule_IsValid(capsule, kUnversionedName) != 0) {
    free_unversioned(PyCapsule_GetPointer(capsule, kUnversionedName));
  }
}

constexpr const char* kTensorViewDoc =
    "Memory of a virtual tensor or a KV cache, for `from_dlpack` of numpy, torch or JAX.\n\n"
    "Nothing is copied. The view, and every array made of it, keeps the address range reserved.\n"
    "The owner maps and unmaps its pages: touch an element only while its block is allocated, or\n"
    "its range mapped. An export for another device raises BufferError.";

nb::object to_dlpack(const TensorView& view, nb::handle max_version) {
  check(view.region->vmm()->check_open());
  const bool versioned = !max_version.is_none() && nb::cast<int>(max_version[0]) >= 1;
  PyObject* capsule = versioned
                          ? PyCapsule_New(export_versioned(view), kVersionedName, drop_capsule)
                          : PyCapsule_New(export_unversioned(view), kUnversionedName, drop_capsule);
  return nb::steal(capsule);
}

// A consumer may ask for another device, but views are only exported on theirs.
void check_dlpack_device(const TensorView& view, nb::handle wanted) {
  if (wanted.is_none()) return;
  const DlDevice device = dlpack_device(view);
  if (nb::cast<int>(wanted[0]) == device.type && nb::cast<int>(wanted[1]) == device.id) return;
  throw nb::buffer_error(view.region->vmm()->location().on_gpu
                             ? "the memory of a cuda device is on that GPU; copy it from there"
                             : "the memory of a host device is CPU memory");
}

void bind_view(nb::module_& module) {
  nb::class_<TensorView>(module, "TensorView", kTensorViewDoc)
      .def_prop_ro(
          "shape", [](const TensorView& self) { return nb::tuple(nb::cast(self.extents.shape)); },
          "Tuple of the number of elements along each dimension.")
      .def_prop_ro(
          "strides",
          [](const TensorView& self) { return nb::tuple(nb::cast(self.extents.strides)); },
          "Tuple of the distances, in elements, between the indices of each dimension.")
      .def_ro("dtype", &TensorView::dtype, "The type of an element, such as \"bfloat16\".")
      .def_prop_ro("address", &TensorView::address,
                   "Virtual address of the first element, on the device.")
      .def(
          "__dlpack__",
          [](const TensorView& self, nb::handle, nb::handle max_version, nb::handle device,
             nb::handle copy) {
            if (copy.is(nb::handle(Py_True))) {
              throw nb::buffer_error("kvcached exports views; copy on the consumer's side");
            }
            check_dlpack_device(self, device);
            return to_dlpack(self, max_version);
          },
          nb::kw_only(), nb::arg("stream").none() = nb::none(),
          nb::arg("max_version").none() = nb::none(), nb::arg("dl_device").none() = nb::none(),
          nb::arg("copy").none() = nb::none())
      .def("__dlpack_device__", [](const TensorView& self) {
        const DlDevice device = dlpack_device(self);
        return std::tuple(device.type, device.id);
      });
}

void bind_tensor(nb::module_& module) {
  nb::class_<VirtualTensor>(module, "VirtualTensor")
      .def_static("create", unlocked(&VirtualTensor::create))
      .def("map", unlocked(&VirtualTensor::map))
      .def("unmap", unlocked(&VirtualTensor::unmap))
      .def_prop_ro("size_bytes", [](const VirtualTensor& self) { return self.region()->bytes(); })
      .def_prop_ro("mapped_bytes", &VirtualTensor::mapped_bytes)
      .def("view",
           [](VirtualTensor& self, uint64_t offset, std::vector<int64_t> shape, std::string dtype) {
             check(self.check_viewable());
             return take(TensorView::make(self.region(), offset, dense(std::move(shape)),
                                          std::move(dtype)));
           })
      .def("close", unlocked(&VirtualTensor::close));
}

}  // namespace

void bind_memory(nb::module_& module) {
  bind_view(module);
  bind_tensor(module);
}

}  // namespace kvcached
