#include "backends.h"
#include "check.h"

int main() {
  using namespace kvcached::testing;
  test_vmm();
  test_events();
  test_wake_thread();
  test_ledger();
  test_ledger_lock();
  test_balloon();
  test_kv_allocator();
  test_region("host:0");
  test_kv_cache("host:0");
  test_spare_keeper("host:0");
  test_weights("host:0");
  if (can_steer_cuda()) {
    test_cuda_faults();
    test_region("cuda:0");
    test_kv_cache("cuda:0");
    test_spare_keeper("cuda:0");
    test_weights("cuda:0");
    test_weight_links();
    CHECK(nothing_leaked());
  } else {
    std::puts("skipped on cuda: what needs the test libcuda (KVCACHED_LIBCUDA)");
  }
  std::puts("all C++ tests passed");
  return 0;
}
