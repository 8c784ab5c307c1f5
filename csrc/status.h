// Outcome of every call below the bindings. Nothing in csrc/ throws on purpose, aborts or exits:
// a failure is a Status whose message tells the user what to change, and state is as before.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>

namespace kvcached {

enum class Code {
  ok,
  invalid_argument,  // a size, count or name that can never work
  not_aligned,       // not a multiple of the page size
  unknown_device,    // no such device name, or no ledger to attach to
  unavailable,       // a backend that this build or machine lacks
  mismatch,          // the ledger exists with other capacity or page size
  busy,              // the device still has live clients
  gone,              // the ledger was destroyed by another process
  version,           // the ledger was made by another library version
  corrupt,           // the ledger is not one, or is damaged
  permission,        // the OS does not let this user open the ledger
  shm_full,          // no room in shared memory for the ledger itself
  too_many_clients,  // every client record is taken
  unknown_client,    // no live client of that name or process
  ambiguous_client,  // several clients of that name or process
  already_mapped,    // map on a mapped address, or of a mapped handle
  not_mapped,        // unmap or set_access on an address with nothing mapped
  unknown_handle,    // released or never created
  in_use,            // the engine's streams may still touch the pages
  stranded,          // a batch failed half way and could not be rolled back
  unknown_block,     // a block id of no allocatable block
  double_free,       // a block id that is not allocated
  no_room,           // expected: the device has no room for this client now
  closed,            // the object was closed or freed before
  weight_file,       // a file of weights is missing, short or not what it should be
  cancelled,         // the caller ended it
  forked,            // the object belongs to the parent process
  system_call,       // the OS refused; the message names call and errno
  internal,          // a broken invariant
};

struct [[nodiscard]] Status {
  Code code = Code::ok;
  std::string message;
  uint64_t need_bytes = 0;  // no_room only
  uint64_t free_bytes = 0;  // no_room only

  bool ok() const { return code == Code::ok; }
};

inline Status failure(Code code, std::string message) { return {code, std::move(message), 0, 0}; }

// "<what>: <strerror> (errno <n>)"
Status system_failure(const char* what, int error);

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

// Returns from the calling function with the Status of `expression` unless it is ok.
#define KV_TRY(expression)                                                        \
  do {                                                                            \
    if (::kvcached::Status kv_try_status_ = (expression); !kv_try_status_.ok()) { \
      return kv_try_status_;                                                      \
    }                                                                             \
  } while (false)
