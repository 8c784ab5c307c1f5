// kvcached._core: the C++ layers for Python. The Python modules of kvcached are the public API.
#include <nanobind/stl/string.h>

#include "binding_tools.h"

namespace nb = nanobind;

namespace kvcached {

// Each is in a separate file: bindings_device.cpp and so on.
void bind_device(nb::module_& module);
void bind_memory(nb::module_& module);
void bind_kv(nb::module_& module);
void bind_handover(nb::module_& module);
void bind_weights(nb::module_& module);
void bind_balloon(nb::module_& module);

namespace {

void raise_status(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const StatusError& error) {
    const Status& status = error.status;
    nb::object exception = nb::module_::import_("kvcached.errors")
                               .attr("from_status")(name_of(status.code), text(status.message),
                                                    status.need_bytes, status.free_bytes);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  }
}

}  // namespace

}  // namespace kvcached

NB_MODULE(_core, module) {
  // Engines exit with live objects, which is not a leak to report to their users.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(kvcached::raise_status);
  kvcached::bind_device(module);
  kvcached::bind_memory(module);
  kvcached::bind_kv(module);
  kvcached::bind_handover(module);
  kvcached::bind_weights(module);
  kvcached::bind_balloon(module);
}
