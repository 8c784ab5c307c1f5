// Outcome of every call below the bindings. Nothing in csrc/ throws on purpose, aborts or exits. A
// failure is a Status whose message tells the user what to change, and leaves state as it was.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

namespace kvcached {

// Kind of failure. kvcached.errors has an exception for each name except ok.
// clang-format off
#define KV_CODES(code) \
  code(ok)                                                                                    \
  code(invalid_argument)  /* a size, count or name that can never work */                     \
  code(not_aligned)       /* not a multiple of the page size */                               \
  code(unknown_device)    /* no such device name, or no ledger to attach to */                \
  code(unavailable)       /* a backend that this build or machine lacks */                    \
  code(no_driver)         /* NVIDIA's driver is missing or shows no GPU */                    \
  code(old_driver)        /* it lacks calls that are needed */                                \
  code(unsupported)       /* a GPU without virtual memory management, or a part of one */     \
  code(hidden_device)     /* CUDA_VISIBLE_DEVICES leaves no such GPU */                       \
  code(mismatch)          /* the ledger exists with other capacity or page size */            \
  code(busy)              /* the device still has live clients */                             \
  code(gone)              /* the ledger was destroyed, or its file was removed */              \
  code(version)           /* the ledger was made by another library version */                \
  code(corrupt)           /* the ledger is not one, or is damaged */                          \
  code(permission)        /* the OS does not let this user open the ledger */                 \
  code(shm_full)          /* no room in shared memory for the ledger itself */                \
  code(too_many_clients)  /* every client record is taken */                                  \
  code(unknown_client)    /* no live client of that name or process */                        \
  code(ambiguous_client)  /* several clients of that name or process */                       \
  code(already_mapped)    /* map on a mapped address, or of a mapped handle */                \
  code(not_mapped)        /* unmap or set_access on an address with nothing mapped */         \
  code(unknown_handle)    /* released or never created */                                     \
  code(in_use)            /* the engine's streams may still touch the pages */                \
  code(stranded)          /* a batch failed half way and could not be rolled back */          \
  code(unknown_block)     /* a block id of no allocatable block */                            \
  code(double_free)       /* a block id that is not allocated */                              \
  code(no_room)           /* expected: the device has no room for this client now */          \
  code(closed)            /* the object was closed or freed before */                         \
  code(weight_file)       /* a file of weights is missing, short or not what it should be */  \
  code(cancelled)         /* the caller ended it */                                           \
  code(forked)            /* the object belongs to the parent process */                      \
  code(system_call)       /* the OS refused; the message names call and errno */              \
  code(internal)          /* a broken invariant */
// clang-format on

enum class Code {
#define KV_NAMED(name) name,
  KV_CODES(KV_NAMED)
#undef KV_NAMED
};

inline const char* name_of(Code code) {
  constexpr const char* kNames[] = {
#define KV_NAMED(name) #name,
      KV_CODES(KV_NAMED)
#undef KV_NAMED
  };
  return kNames[static_cast<size_t>(code)];
}

struct [[nodiscard]] Status {
  Code code = Code::ok;
  std::string message;
  uint64_t need_bytes = 0;  // no_room only
  uint64_t free_bytes = 0;  // no_room only

  bool ok() const { return code == Code::ok; }
};

// Returns a failure whose message concatenates the parts, strings and integers. Out of line, so
// that the success path stays small.
template <class... Parts>
[[gnu::cold, gnu::noinline]] Status failure(Code code, const Parts&... parts) {
  std::string message;
  const auto append = [&message](const auto& part) {
    if constexpr (std::is_integral_v<std::remove_cvref_t<decltype(part)>>) {
      message += std::to_string(part);
    } else {
      message += part;
    }
  };
  (append(parts), ...);
  return {code, std::move(message), 0, 0};
}

// "<what>: <strerror> (errno <n>)"
inline Status system_failure(const char* what, int error) {
  return failure(Code::system_call, what, ": ", strerror(error), " (errno ", error, ")");
}

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : content_(std::move(value)) {}
  Result(Status status) : content_(std::move(status)) {}

  bool ok() const { return std::holds_alternative<T>(content_); }
  // REQUIRES: ok()
  T& value() { return std::get<T>(content_); }
  // REQUIRES: !ok()
  const Status& status() const { return std::get<Status>(content_); }

 private:
  std::variant<T, Status> content_;
};

}  // namespace kvcached

// Returns from the calling function with the Status of the expression unless it is ok.
#define KV_TRY(...)                                                                \
  do {                                                                             \
    if (::kvcached::Status kv_try_status_ = (__VA_ARGS__); !kv_try_status_.ok()) { \
      return kv_try_status_;                                                       \
    }                                                                              \
  } while (false)

// KV_ASSIGN(int fd, open_file(path)): declares a variable with the value of a Result, or returns
// its Status from the calling function.
#define KV_ASSIGN(variable, ...) KV_ASSIGN_(KV_JOIN_(kv_result_, __LINE__), variable, __VA_ARGS__)
#define KV_ASSIGN_(result, variable, ...)   \
  auto result = (__VA_ARGS__);              \
  if (!result.ok()) return result.status(); \
  variable = std::move(result.value())
#define KV_JOIN_(name, line) KV_JOIN_AGAIN_(name, line)
#define KV_JOIN_AGAIN_(name, line) name##line
