// Counts driver calls and picks those that must fail. Called with the library's lock held.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <thread>

namespace test_libcuda {

class CallLog {
 public:
  static CallLog& instance();

  // Returns 0, or the error that this call must return in a context of that device.
  int record(const char* function, int device);
  uint64_t count(const char* function) const { return count_in(counts_, function); }
  uint64_t count_of_thread(const char* function) const;
  void reset();
  void fail_at(uint64_t call, uint64_t times, int error);
  // After `calls` more, all calls in contexts of the device fail permanently.
  void lose(int device, uint64_t calls) { until_lost_[device] = calls; }

 private:
  CallLog();

  using Counts = std::map<std::string, uint64_t>;

  bool is_lost(int device);
  static uint64_t count_in(const Counts& counts, const char* function);

  Counts counts_;
  std::map<std::thread::id, Counts> counts_of_threads_;
  std::map<int, uint64_t> until_lost_;
  uint64_t until_failure_ = 0;  // 0: none planned
  uint64_t failures_ = 0;
  int error_ = 0;
};

}  // namespace test_libcuda
