// Tools of the binding files.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <type_traits>

#include "status.h"

namespace kvcached {

// Becomes the exception of kvcached.errors for its code.
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

// Text of a segment, which may be damaged: bytes that are not UTF-8 are replaced.
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

// Wraps a function or method for nanobind: runs it without the GIL and raises its failure.
template <class Call>
auto checked(Call call) {
  using Answer = decltype(call());
  if constexpr (std::is_void_v<Answer>) {
    without_gil(call);
  } else if constexpr (std::is_same_v<Answer, Status>) {
    check(without_gil(call));
  } else if constexpr (requires(Answer answer) { answer.status(); }) {
    return take(without_gil(call));
  } else {
    return without_gil(call);
  }
}

template <class Answer, class... Arguments>
auto unlocked(Answer (*function)(Arguments...)) {
  return [function](Arguments... arguments) {
    return checked([&] { return function(arguments...); });
  };
}

template <class Self, class Answer, class... Arguments>
auto unlocked(Answer (Self::*method)(Arguments...)) {
  return [method](Self& self, Arguments... arguments) {
    return checked([&] { return (self.*method)(arguments...); });
  };
}

template <class Self, class Answer, class... Arguments>
auto unlocked(Answer (Self::*method)(Arguments...) const) {
  return [method](const Self& self, Arguments... arguments) {
    return checked([&] { return (self.*method)(arguments...); });
  };
}

}  // namespace kvcached
