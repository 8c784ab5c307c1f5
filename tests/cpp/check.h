// A test is a function; CHECK ends the program with file and line when it fails.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "status.h"

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                               \
    }                                                                             \
  } while (false)

// The status must have this code; prints the message if it has another.
#define CHECK_CODE(expression, expected)                                     \
  do {                                                                       \
    const ::kvcached::Status status_ = (expression);                         \
    if (status_.code != (expected)) {                                        \
      std::fprintf(stderr, "%s:%d: code %d: %s\n", __FILE__, __LINE__,       \
                   static_cast<int>(status_.code), status_.message.c_str()); \
      std::exit(1);                                                          \
    }                                                                        \
  } while (false)

#define CHECK_OK(expression) CHECK_CODE(expression, ::kvcached::Code::ok)

namespace kvcached::testing {

inline constexpr uint64_t kPage = 65536;

template <class T>
T value_of(Result<T> result) {
  if (!result.ok()) std::fprintf(stderr, "%s\n", result.status().message.c_str());
  CHECK(result.ok());
  return std::move(result.value());
}

// Returns the bytes that the OS holds for a file.
uint64_t resident_bytes(int fd);
// Returns whether this process can read the byte at `address`, according to the kernel.
bool is_readable(uint64_t address);
// Returns a ledger path of this process that does not exist yet.
std::string fresh_ledger_path();

void test_vmm();
void test_events();
void test_wake_thread();
void test_cuda_faults();
void test_ledger();
void test_ledger_lock();
void test_balloon();
void test_kv_allocator();
// On pages of kPage bytes of this device.
void test_region(const std::string& device);
void test_kv_cache(const std::string& device);
void test_spare_keeper(const std::string& device);
void test_weights(const std::string& device);
void test_weight_links();

}  // namespace kvcached::testing
