// Counts driver calls and picks those that must fail. Called with the library's lock held.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace test_libcuda {

class CallLog {
 public:
  static CallLog& instance();

  // 0, or the error that this call, in a context of that device, must answer.
  int record(const char* function, int device);
  uint64_t count(const char* function) const;
  void reset();
  void fail_at(uint64_t call, uint64_t times, int error);
  // After `calls` more, all calls in contexts of the device fail for good.
  void lose(int device, uint64_t calls) { until_lost_[device] = calls; }

 private:
  CallLog();

  bool is_lost(int device);

  std::map<std::string, uint64_t> counts_;
  std::map<int, uint64_t> until_lost_;
  uint64_t total_ = 0;
  uint64_t until_failure_ = 0;  // 0: none planned
  uint64_t failures_ = 0;
  int error_ = 0;
};

}  // namespace test_libcuda
