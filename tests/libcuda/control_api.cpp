// Functions for tests, in addition to CUDA's own: control.h.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "control.h"
#include "served.h"

using test_libcuda::CallLog;
using test_libcuda::mutex;
using test_libcuda::Simulator;

namespace {

constexpr int kExitLeaked = 97;

// KVCACHED_TEST_CUDA_LEAKS=report prints what is left when the process ends; =fail also ends it
// with status 97.
__attribute__((destructor)) void report_leaks() {
  const char* wanted = std::getenv("KVCACHED_TEST_CUDA_LEAKS");
  const std::string leaks = Simulator::instance().leaks();
  if (wanted == nullptr || leaks.empty()) return;
  std::fprintf(stderr, "test libcuda: leaked %s\n", leaks.c_str());
  std::fflush(nullptr);
  if (std::strcmp(wanted, "fail") == 0) _exit(kExitLeaked);
}

}  // namespace

EXPORT uint64_t test_cuda_calls(const char* function) {
  const std::lock_guard lock(mutex());
  return CallLog::instance().count(function);
}

EXPORT uint64_t test_cuda_thread_calls(const char* function) {
  const std::lock_guard lock(mutex());
  return CallLog::instance().count_of_thread(function);
}

EXPORT void test_cuda_reset_calls() {
  const std::lock_guard lock(mutex());
  CallLog::instance().reset();
}

EXPORT void test_cuda_fail_at(uint64_t call, uint64_t times, int error) {
  const std::lock_guard lock(mutex());
  CallLog::instance().fail_at(call, times, error);
}

EXPORT void test_cuda_lose(int device, uint64_t calls) {
  const std::lock_guard lock(mutex());
  CallLog::instance().lose(device, calls);
}

EXPORT uint64_t test_cuda_used_bytes(int device) {
  const std::lock_guard lock(mutex());
  return Simulator::instance().used_bytes(device);
}

EXPORT const char* test_cuda_refusal() {
  const std::lock_guard lock(mutex());
  return Simulator::instance().refusal().c_str();
}

EXPORT const char* test_cuda_leaks() {
  static thread_local std::string leaks;
  const std::lock_guard lock(mutex());
  leaks = Simulator::instance().leaks();
  return leaks.c_str();
}

EXPORT void* test_cuda_kernel_view(uint64_t address, uint64_t bytes, int write) {
  Simulator& cuda = Simulator::instance();
  if (cuda.check_usable() != 0) return nullptr;
  const std::lock_guard lock(mutex());
  return cuda.kernel_view(address, bytes, write != 0);
}

EXPORT uint64_t test_cuda_kernel_distance() {
  const std::lock_guard lock(mutex());
  return Simulator::instance().kernel_distance();
}

EXPORT int test_cuda_kernel_start(uint64_t stream) {
  return test_libcuda::served_in_context([=](Simulator& cuda) {
    const int device = test_libcuda::current_device();
    if (!cuda.streams().exists(stream, device)) return test_libcuda::kInvalidHandle;
    cuda.streams().complete(stream, device, UINT64_MAX);
    return test_libcuda::kSuccess;
  });
}
