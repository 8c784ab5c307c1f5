#include "backends.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "check.h"
#include "control.h"
#include "vmm_fault.h"

namespace kvcached::testing {

namespace {

constexpr uint64_t kGpuPage = 2 << 20;
constexpr uint64_t kDriversOwn = 2 * kGpuPage;  // taken by its page tables
uint64_t cuda_bytes_before = 0;

void* open_cuda() {
  const char* path = std::getenv("KVCACHED_LIBCUDA");
  void* library = dlopen(path != nullptr ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return nullptr;
  const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(library, "cuInit"));
  return init != nullptr && init(0) == 0 ? library : nullptr;
}

bool enter_context() {
  void* context = nullptr;
  CHECK(cuda_function<int(void**, int)>("cuDevicePrimaryCtxRetain")(&context, 0) == 0);
  CHECK(cuda_function<int(void*)>("cuCtxPushCurrent_v2")(context) == 0);
  return true;
}

uint64_t cuda_used_bytes() {
  size_t free = 0;
  size_t total = 0;
  CHECK(cuda_function<int(size_t*, size_t*)>("cuMemGetInfo_v2")(&free, &total) == 0);
  return total - free;
}

std::shared_ptr<Vmm> make_host() { return value_of(make_vmm("host:0", kPage)); }

uint64_t cuda_page_bytes() {
  static const uint64_t bytes = make_vmm("cuda:0", kPage).ok() ? kPage : kGpuPage;
  return bytes;
}

// The driver allocates its own memory at the first memset, which no Vmm counts.
bool fill_once(Vmm& vmm) {
  const uint64_t page = vmm.page_bytes();
  const uint64_t address = value_of(vmm.reserve(page));
  const auto pages = value_of(vmm.create(1));
  CHECK_OK(vmm.map_accessible(address, pages));
  CHECK_OK(vmm.fill(address, page, 0));
  CHECK_OK(vmm.unmap(address, page));
  CHECK_OK(vmm.release(pages));
  return true;
}

std::shared_ptr<Vmm> make_cuda() {
  auto vmm = value_of(make_vmm("cuda:0", cuda_page_bytes()));
  static const bool is_warm = fill_once(*vmm);
  CHECK(is_warm);
  cuda_bytes_before = cuda_used_bytes();
  return vmm;
}

template <std::shared_ptr<Vmm> (*make)()>
std::shared_ptr<Vmm> make_below_faults() {
  return std::make_shared<FaultVmm>(make());
}

void fill_host(uint64_t address, uint64_t bytes, int value) {
  std::memset(reinterpret_cast<void*>(address), value, bytes);
}

int read_host(uint64_t address) { return *reinterpret_cast<volatile unsigned char*>(address); }

uint64_t held_on_host(const Vmm& vmm) { return resident_bytes(vmm.memory_fd()); }

bool is_readable_cuda(uint64_t address) {
  struct {
    int type, id;
  } location = {1, 0};
  unsigned long long flags = 0;
  const auto get = cuda_function<int(unsigned long long*, void*, uint64_t)>("cuMemGetAccess");
  return get(&flags, &location, address) == 0 && flags == 3;
}

void fill_cuda(uint64_t address, uint64_t bytes, int value) {
  const auto set = cuda_function<int(uint64_t, unsigned char, size_t)>("cuMemsetD8_v2");
  CHECK(set(address, static_cast<unsigned char>(value), bytes) == 0);
  // Neither the host nor an unmap waits for a memset.
  CHECK(cuda_function<int()>("cuCtxSynchronize")() == 0);
}

int read_cuda(uint64_t address) {
  unsigned char byte = 0;
  const auto copy = cuda_function<int(void*, uint64_t, size_t)>("cuMemcpyDtoH_v2");
  CHECK(copy(&byte, address, 1) == 0);
  return byte;
}

uint64_t held_on_cuda(const Vmm&) {
  const uint64_t used = cuda_used_bytes();
  return used - std::min(used, cuda_bytes_before);
}

}  // namespace

void* cuda_library() {
  static void* library = open_cuda();
  return library;
}

void* find_cuda_symbol(const char* name) {
  void* found = dlsym(cuda_library(), name);
  if (found == nullptr) std::fprintf(stderr, "libcuda has no %s\n", name);
  CHECK(found != nullptr);
  return found;
}

bool can_steer_cuda() {
  return cuda_library() != nullptr && dlsym(cuda_library(), "test_cuda_leaks") != nullptr &&
         cuda_page_bytes() == kPage;
}

uint64_t slack_bytes(const Backend& backend) {
  return backend.on_gpu && !can_steer_cuda() ? kDriversOwn : 0;
}

bool holds(const Backend& backend, const Vmm& vmm, uint64_t bytes) {
  const uint64_t held = backend.held_bytes(vmm);
  const uint64_t slack = slack_bytes(backend);
  if (held <= bytes + slack && bytes <= held + slack) return true;
  std::fprintf(stderr, "%s holds %llu bytes and not %llu\n", backend.name.c_str(),
               static_cast<unsigned long long>(held), static_cast<unsigned long long>(bytes));
  return false;
}

uint64_t cpu_view(uint64_t address) {
  if (!can_steer_cuda()) return address;
  void* view =
      cuda_function<decltype(test_cuda_kernel_view)>("test_cuda_kernel_view")(address, 1, 0);
  return view != nullptr ? reinterpret_cast<uint64_t>(view) : address;
}

bool is_accessible(uint64_t address) { return is_readable(cpu_view(address)); }

bool nothing_leaked() {
  if (!can_steer_cuda()) return true;
  void* context = nullptr;
  CHECK(cuda_function<int(void**)>("cuCtxPopCurrent_v2")(&context) == 0);
  CHECK(cuda_function<int(int)>("cuDevicePrimaryCtxRelease_v2")(0) == 0);
  const char* leaks = cuda_function<const char*()>("test_cuda_leaks")();
  if (*leaks != '\0') std::fprintf(stderr, "leaked on the test libcuda: %s\n", leaks);
  return *leaks == '\0';
}

std::vector<Backend> backends() {
  std::vector<Backend> found = {
      {"host", false, make_host, is_readable, fill_host, read_host, held_on_host},
      {"host below faults", false, make_below_faults<make_host>, is_readable, fill_host, read_host,
       held_on_host},
  };
  if (cuda_library() == nullptr) return found;
  static const bool entered = enter_context();
  CHECK(entered);
  found.push_back({"cuda", true, make_cuda, is_readable_cuda, fill_cuda, read_cuda, held_on_cuda});
  found.push_back({"cuda below faults", true, make_below_faults<make_cuda>, is_readable_cuda,
                   fill_cuda, read_cuda, held_on_cuda});
  return found;
}

}  // namespace kvcached::testing
