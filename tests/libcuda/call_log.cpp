#include "call_log.h"

#include <cstdio>
#include <cstdlib>

#include "abi.h"

namespace test_libcuda {

CallLog& CallLog::instance() {
  static auto* log = new CallLog;  // outlives every client
  return *log;
}

CallLog::CallLog() {
  const char* at = std::getenv("KVCACHED_TEST_CUDA_FAIL_AT");
  if (at != nullptr) fail_at(std::strtoull(at, nullptr, 0), 1, kInvalidValue);
  const char* lost = std::getenv("KVCACHED_TEST_CUDA_LOSE");
  int device = 0;
  unsigned long long calls = 0;
  if (lost != nullptr && std::sscanf(lost, "%d:%llu", &device, &calls) == 2) lose(device, calls);
}

bool CallLog::is_lost(int device) {
  const auto found = until_lost_.find(device);
  if (found == until_lost_.end()) return false;
  if (found->second == 0) return true;
  --found->second;
  return false;
}

int CallLog::record(const char* function, int device) {
  ++counts_[function];
  ++counts_of_threads_[std::this_thread::get_id()][function];
  if (is_lost(device)) return kLaunchFailed;
  if (until_failure_ == 0 || failures_ == 0) return 0;
  if (until_failure_ > 1) {
    --until_failure_;
    return 0;
  }
  --failures_;
  return error_;
}

uint64_t CallLog::count_in(const Counts& counts, const char* function) {
  uint64_t total = 0;
  for (const auto& [name, count] : counts) {
    if (function == nullptr || name == function) total += count;
  }
  return total;
}

uint64_t CallLog::count_of_thread(const char* function) const {
  const auto found = counts_of_threads_.find(std::this_thread::get_id());
  return found == counts_of_threads_.end() ? 0 : count_in(found->second, function);
}

void CallLog::reset() {
  counts_.clear();
  counts_of_threads_.clear();
}

void CallLog::fail_at(uint64_t call, uint64_t times, int error) {
  until_failure_ = call;
  failures_ = call == 0 ? 0 : times;
  error_ = error;
}

}  // namespace test_libcuda
