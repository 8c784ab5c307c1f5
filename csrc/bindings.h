// What the binding files share.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "status.h"

namespace kvcached {

// Becomes the exception of kvcached.errors that stands for its code.
struct StatusError {
  Status status;
};

inline void check(Status status) {
  if (!status.ok()) throw StatusError{std::move(status)};
}

template <class T>
T take(Result<T> result) {
  if (!result.ok()) throw StatusError{result.status()};
  return std::move(result.value());
}

// What a segment says may be damaged: bytes that are no UTF-8 are replaced.
inline nanobind::object text(const std::string& bytes) {
  return nanobind::steal(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "replace"));
}

// Runs `call` without the GIL.
template <class Call>
auto without_gil(Call call) {
  const nanobind::gil_scoped_release release;
  return call();
}

void bind_device(nanobind::module_& module);
void bind_memory(nanobind::module_& module);
void bind_kv(nanobind::module_& module);
void bind_handover(nanobind::module_& module);
void bind_weights(nanobind::module_& module);
void bind_balloon(nanobind::module_& module);

}  // namespace kvcached
