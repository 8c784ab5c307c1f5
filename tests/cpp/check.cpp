#include "check.h"

#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "steps.h"

#ifdef KVCACHED_STEPS
// Does nothing, except in a program that defines its own step().
__attribute__((weak)) void kvcached::step(const char*) {}
#endif

namespace kvcached::testing {

uint64_t resident_bytes(int fd) {
  struct stat info = {};
  CHECK(fstat(fd, &info) == 0);
  return static_cast<uint64_t>(info.st_blocks) * 512;
}

bool is_readable(uint64_t address) {
  char byte = 0;
  struct iovec local = {&byte, 1};
  struct iovec remote = {reinterpret_cast<void*>(address), 1};
  return process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == 1;
}

std::string fresh_ledger_path() {
  static int count = 0;
  return "/dev/shm/prism-kvcached.cpp-test-" + std::to_string(getpid()) + "-" +
         std::to_string(count++) + ".host:0";
}

}  // namespace kvcached::testing
