// Counts driver calls and picks those that must fail. Called with the library's lock held.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace test_libcuda {

class CallLog {
 public:
  static CallLog& instance();

  // 0, or the error that this call must answer.
  int record(const char* function);
  uint64_t count(const char* function) const;
  void reset();
  void fail_at(uint64_t call, uint64_t times, int error);

 private:
  CallLog();

  std::map<std::string, uint64_t> counts_;
  uint64_t total_ = 0;
  uint64_t until_failure_ = 0;  // 0: none planned
  uint64_t failures_ = 0;
  int error_ = 0;
};

}  // namespace test_libcuda
