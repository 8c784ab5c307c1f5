// kvcached._core: the C++ layers for Python. The Python modules around it are the public surface.
#include "bindings.h"

#include <nanobind/stl/string.h>

#include <iterator>

namespace nb = nanobind;

namespace kvcached {

namespace {

// In the order of Code.
constexpr const char* kCodeNames[] = {
    "ok",
    "invalid_argument",
    "not_aligned",
    "unknown_device",
    "unavailable",
    "mismatch",
    "busy",
    "gone",
    "version",
    "corrupt",
    "permission",
    "shm_full",
    "too_many_clients",
    "unknown_client",
    "ambiguous_client",
    "already_mapped",
    "not_mapped",
    "unknown_handle",
    "in_use",
    "stranded",
    "unknown_block",
    "double_free",
    "no_room",
    "closed",
    "weight_file",
    "cancelled",
    "forked",
    "system_call",
    "internal",
};
static_assert(std::size(kCodeNames) == static_cast<size_t>(Code::internal) + 1);

void raise_status(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const StatusError& error) {
    const Status& status = error.status;
    nb::object exception =
        nb::module_::import_("kvcached.errors")
            .attr("from_status")(kCodeNames[static_cast<size_t>(status.code)], text(status.message),
                                 status.need_bytes, status.free_bytes);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  }
}

}  // namespace

}  // namespace kvcached

NB_MODULE(_core, module) {
  // Engines end with objects alive; that is no leak to report to their users.
  nb::set_leak_warnings(false);
  nb::register_exception_translator(kvcached::raise_status);
  kvcached::bind_device(module);
  kvcached::bind_memory(module);
  kvcached::bind_kv(module);
  kvcached::bind_handover(module);
  kvcached::bind_weights(module);
  kvcached::bind_balloon(module);
}
