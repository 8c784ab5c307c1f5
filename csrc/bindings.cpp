// kvcached._core: the C++ layers for Python. The Python modules around it are the public surface.
#include "bindings.h"

#include <nanobind/stl/string.h>

namespace nb = nanobind;

namespace kvcached {

namespace {

const char* code_name(Code code) {
  switch (code) {
    case Code::ok:
      return "ok";
    case Code::invalid_argument:
      return "invalid_argument";
    case Code::not_aligned:
      return "not_aligned";
    case Code::unknown_device:
      return "unknown_device";
    case Code::unavailable:
      return "unavailable";
    case Code::mismatch:
      return "mismatch";
    case Code::busy:
      return "busy";
    case Code::gone:
      return "gone";
    case Code::version:
      return "version";
    case Code::corrupt:
      return "corrupt";
    case Code::permission:
      return "permission";
    case Code::shm_full:
      return "shm_full";
    case Code::too_many_clients:
      return "too_many_clients";
    case Code::unknown_client:
      return "unknown_client";
    case Code::ambiguous_client:
      return "ambiguous_client";
    case Code::already_mapped:
      return "already_mapped";
    case Code::not_mapped:
      return "not_mapped";
    case Code::unknown_handle:
      return "unknown_handle";
    case Code::stranded:
      return "stranded";
    case Code::unknown_block:
      return "unknown_block";
    case Code::double_free:
      return "double_free";
    case Code::no_room:
      return "no_room";
    case Code::closed:
      return "closed";
    case Code::forked:
      return "forked";
    case Code::system_call:
      return "system_call";
    case Code::internal:
      return "internal";
  }
  return "internal";
}

void raise_status(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const StatusError& error) {
    const Status& status = error.status;
    nb::object exception = nb::module_::import_("kvcached.errors")
                               .attr("from_status")(code_name(status.code), status.message,
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
}
