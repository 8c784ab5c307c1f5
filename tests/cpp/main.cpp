#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "backends.h"
#include "check.h"

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

int main() {
  using namespace kvcached::testing;
  test_vmm();
  test_events();
  test_ledger();
  test_balloon();
  test_kv_allocator();
  test_region("host:0");
  test_kv_cache("host:0");
  if (can_steer_cuda()) {
    test_cuda_faults();
    test_region("cuda:0");
    test_kv_cache("cuda:0");
    CHECK(nothing_leaked());
  } else {
    std::puts("skipped on cuda: what needs the test libcuda (KVCACHED_LIBCUDA)");
  }
  std::puts("all C++ tests passed");
  return 0;
}
