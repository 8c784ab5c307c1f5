// torch's interfaces of a device: allocator, streams and events, generators, pinned memory.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <map>
#include <mutex>

#include "allocator.h"
#include "driver.h"
#include "graphs.h"
#include "operators.h"

namespace torchcuda {

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

void* handle(uint64_t stream) { return reinterpret_cast<void*>(stream); }

uint64_t id(const Stream& stream) { return static_cast<uint64_t>(stream.id()); }

void release_memory(void* address) { release(reinterpret_cast<uint64_t>(address)); }

c10::CachingAllocator::Stat stat(const Counter& counter) {
  c10::CachingAllocator::Stat made;
  made.current = counter.current;
  made.peak = counter.peak;
  made.allocated = counter.allocated;
  made.freed = counter.freed;
  return made;
}

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    void* address = reinterpret_cast<void*>(torchcuda::allocate(device, bytes));
    return {address, address, &release_memory,
            Device(c10::kCUDA, static_cast<DeviceIndex>(device))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_memory; }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "the front copies storages by copy_ only");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { empty_cache(); }
  void recordStream(const c10::DataPtr& pointer, Stream stream) override {
    record_use(reinterpret_cast<uint64_t>(pointer.get()), id(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    const Usage from = usage(device);
    c10::CachingDeviceAllocator::DeviceStats made;
    made.allocation[0] = stat(from.allocation);
    made.segment[0] = stat(from.segment);
    made.active[0] = stat(from.active);
    made.inactive_split[0] = stat(from.inactive_split);
    made.allocated_bytes[0] = stat(from.allocated_bytes);
    made.reserved_bytes[0] = stat(from.reserved_bytes);
    made.active_bytes[0] = stat(from.active_bytes);
    made.inactive_split_bytes[0] = stat(from.inactive_split_bytes);
    made.requested_bytes[0] = stat(from.requested_bytes);
    made.num_ooms = from.ooms;
    return made;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { reset_peaks(device); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return memory_info(device);
  }
};

Memory memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    if (device.index() != before.index()) set_current_device(device.index());
    return before;
  }
  Device getDevice() const override {
    return {c10::kCUDA, static_cast<DeviceIndex>(current_device())};
  }
  void setDevice(Device device) const override {
    if (device.index() != current_device()) set_current_device(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() != current_device()) set_current_device(device.index());
  }
  Stream stream(uint64_t number, DeviceIndex device) const {
    return Stream(Stream::UNSAFE, Device(c10::kCUDA, device), static_cast<c10::StreamId>(number));
  }
  DeviceIndex index(Device device) const {
    return device.has_index() ? device.index() : static_cast<DeviceIndex>(current_device());
  }
  Stream getStream(Device device) const override {
    return stream(current_stream(index(device)), index(device));
  }
  Stream getDefaultStream(Device device) const override { return stream(0, index(device)); }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return stream(pooled_stream(index(device)), index(device));
  }
  Stream getNewStream(Device device, int) const override {
    return stream(pooled_stream(index(device)), index(device));
  }
  Stream exchangeStream(Stream next) const override {
    const DeviceIndex device = next.device_index();
    return stream(exchange_stream(device, id(next)), device);
  }
  void* getStreamNativeHandle(const Stream stream) const override { return handle(id(stream)); }
  void destroyEvent(void* event, DeviceIndex device) const noexcept override {
    if (event == nullptr || is_in_bad_fork()) return;
    const OnDevice context(device);
    (void)driver().cuEventDestroy_v2(event);
  }
  void record(void** event, const Stream& stream, DeviceIndex device,
              c10::EventFlag) const override {
    const DeviceIndex on = stream.device_index();
    TORCH_CHECK(device == -1 || device == on, "Event device ", device,
                " does not match recording stream's device ", on, ".");
    const OnDevice context(on);
    if (*event == nullptr) check(driver().cuEventCreate(event, 0), "cudaEventCreate");
    note_recorded(*event, on, id(stream));
    check(driver().cuEventRecord(*event, handle(id(stream))), "cudaEventRecord");
  }
  void block(void* event, const Stream& stream) const override {
    if (event == nullptr) return;
    join_capture(event, stream.device_index(), id(stream));
    const OnDevice context(stream.device_index());
    check(driver().cuStreamWaitEvent(handle(id(stream)), event, 0), "cudaStreamWaitEvent");
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const OnDevice context(current_device());
    const int result = driver().cuEventQuery(event);
    if (result != kNotReady) check(result, "cudaEventQuery");
    return result == 0;
  }
  DeviceIndex deviceCount() const noexcept override {
    return static_cast<DeviceIndex>(device_count());
  }
  bool queryStream(const Stream& stream) const override {
    const OnDevice context(stream.device_index());
    const int result = driver().cuStreamQuery(handle(id(stream)));
    if (result != kNotReady) check(result, "cudaStreamQuery");
    return result == 0;
  }
  void synchronizeStream(const Stream& stream) const override {
    synchronize_stream(stream.device_index(), id(stream));
  }
  bool isStreamCapturing(const Stream& stream) const override {
    return capturing(stream.device_index(), id(stream)) != nullptr;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const OnDevice context(current_device());
    check(driver().cuEventSynchronize(event), "cudaEventSynchronize");
  }
  void synchronizeDevice(DeviceIndex device) const override {
    synchronize_device(device >= 0 ? device : current_device());
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    record_use(reinterpret_cast<uint64_t>(pointer.get()), id(stream));
  }
  double elapsedTime(void*, void*, DeviceIndex) const override { return 0.01; }
};

// torch's own CPU generator under a CUDA device: another sequence of numbers than a GPU's.
struct CudaGenerator final : c10::GeneratorImpl {
  explicit CudaGenerator(DeviceIndex device, at::Generator numbers)
      : c10::GeneratorImpl(Device(c10::kCUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        on_cpu(std::move(numbers)) {}
  void set_current_seed(uint64_t seed) override { on_cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return on_cpu.current_seed(); }
  uint64_t seed() override { return on_cpu.unsafeGetGeneratorImpl()->seed(); }
  void set_state(const c10::TensorImpl& state) override {
    on_cpu.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return on_cpu.unsafeGetGeneratorImpl()->get_state();
  }
  CudaGenerator* clone_impl() const override {
    return new CudaGenerator(device_.index(), on_cpu.clone());
  }
  at::Generator on_cpu;
};

std::map<void*, size_t>& pinned() {
  static auto* instance = new std::map<void*, size_t>;
  return *instance;
}

std::mutex& pinned_mutex() {
  static auto* instance = new std::mutex;
  return *instance;
}

void free_pinned(void* memory) {
  if (is_in_bad_fork()) return;
  const std::lock_guard lock(pinned_mutex());
  const OnDevice context(current_device());
  // torch's cache waits for the copies of a freed buffer; here they are made at once.
  for (int device = 0; device < device_count(); ++device) {
    if (!has_context(device)) continue;
    const OnDevice of(device);
    for (const uint64_t stream : streams_of(device)) {
      (void)driver().cuStreamSynchronize(handle(stream));
    }
  }
  check(driver().cuMemFreeHost(memory), "cudaFreeHost");
  pinned().erase(memory);
}

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, Device(c10::kCPU)};
    const OnDevice context(current_device());
    void* made = nullptr;
    check(driver().cuMemAllocHost_v2(&made, bytes), "cudaHostAlloc");
    const std::lock_guard lock(pinned_mutex());
    pinned()[made] = bytes;
    return {made, made, &free_pinned, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedMemory pinned_memory;

bool is_pinned(const void* data) {
  const std::lock_guard lock(pinned_mutex());
  const auto after = pinned().upper_bound(const_cast<void*>(data));
  if (after == pinned().begin()) return false;
  const auto& [start, bytes] = *std::prev(after);
  return static_cast<const char*>(data) < static_cast<const char*>(start) + bytes;
}

at::Generator generator_of(DeviceIndex device) {
  const auto seed = c10::default_rng_seed_val;
  return at::make_generator<CudaGenerator>(device, at::detail::createCPUGenerator(seed));
}

}  // namespace

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override { torchcuda::init(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return deviceCount() > 0; }
  bool hasPrimaryContext(DeviceIndex device) const override { return has_context(device); }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasCuBLASLt() const override { return true; }
  std::string showConfig() const override { return "the double of torch's CUDA front"; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count()); }
  int getNumGPUs() const override { return device_count(); }
  DeviceIndex current_device() const override { return getCurrentDevice(); }
  DeviceIndex getCurrentDevice() const override {
    return static_cast<DeviceIndex>(torchcuda::current_device());
  }
  void setCurrentDevice(DeviceIndex device) const override { set_current_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const DeviceIndex before = getCurrentDevice();
    if (device >= 0) set_current_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Allocator* getCUDADeviceAllocator() const override { return &memory; }
  Device getDeviceFromPtr(void*) const override {
    return {c10::kCUDA, static_cast<DeviceIndex>(torchcuda::current_device())};
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    static auto* made = new std::map<DeviceIndex, at::Generator>;
    const DeviceIndex index = device >= 0 ? device : getCurrentDevice();
    if (!made->contains(index)) made->emplace(index, generator_of(index));
    return made->at(index);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return generator_of(device >= 0 ? device : getCurrentDevice());
  }
  void deviceSynchronize(DeviceIndex device) const override { synchronize_device(device); }
  long versionCUDART() const override { return 13000; }
};

at::Generator numbers_of(const at::Generator& generator) {
  return static_cast<CudaGenerator*>(generator.unsafeGetGeneratorImpl())->on_cpu;
}

bool is_pinned_memory(const void* data) { return is_pinned(data); }

}  // namespace torchcuda

namespace at {
using CUDAHooks = torchcuda::Hooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
REGISTER_HOST_ALLOCATOR(at::kCUDA, &torchcuda::pinned_memory)
}  // namespace at

namespace torchcuda {
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
static const auto set_allocator = [] {
  c10::SetAllocator(c10::kCUDA, &memory);
  return 0;
}();
}  // namespace torchcuda

struct _object;
// Of torch's Python bindings: the object of a generator.
_object* THPGenerator_initDefaultGenerator(const at::Generator& generator);

extern "C" {
_object* torchcuda_default_generator(int device) {
  const auto index = static_cast<c10::DeviceIndex>(device);
  return THPGenerator_initDefaultGenerator(at::detail::getCUDAHooks().getDefaultGenerator(index));
}
// For the Python part (front.py), by ctypes. Those that can fail return CUDA's error.
// Asking the driver spoils forks, as cudaGetDeviceCount does.
int torchcuda_device_count() {
  int count = 0;
  if (torchcuda::is_in_bad_fork() || torchcuda::driver().cuInit(0) != 0) return 0;
  torchcuda::spoil_forks();
  return torchcuda::driver().cuDeviceGetCount(&count) == 0 ? count : 0;
}
void torchcuda_lazy_init() { at::globalContext().lazyInitDevice(at::kCUDA); }
// Work that is pending until a call waits for the current stream.
void torchcuda_sleep() {
  const int device = torchcuda::current_device();
  static auto* scratch = new std::map<int, uint64_t>;
  uint64_t& address = (*scratch)[device];
  if (address == 0) address = torchcuda::allocate(device, 1);
  torchcuda::launch(device, address, 1, false);
}
int torchcuda_is_allocated(uint64_t address) { return torchcuda::is_allocated(address) ? 1 : 0; }
int torchcuda_is_in_bad_fork() { return torchcuda::is_in_bad_fork() ? 1 : 0; }
int torchcuda_current_device() { return torchcuda::current_device(); }
uint64_t torchcuda_current_stream(int device) { return torchcuda::current_stream(device); }
uint64_t torchcuda_kernel_distance() { return torchcuda::driver().test_cuda_kernel_distance(); }
void torchcuda_set_memory_fraction(int device, double fraction) {
  torchcuda::set_memory_fraction(device, fraction);
}
double torchcuda_memory_fraction(int device) { return torchcuda::memory_fraction(device); }
void torchcuda_begin_pool(int device, unsigned long long a, unsigned long long b) {
  torchcuda::begin_pool(device, {a, b});
}
void torchcuda_end_pool(int device, unsigned long long a, unsigned long long b) {
  torchcuda::end_pool(device, {a, b});
}
void torchcuda_release_pool(int device, unsigned long long a, unsigned long long b) {
  torchcuda::release_pool(device, {a, b});
}
// 27 numbers: current, peak, allocated and freed of nine counters; then four single ones.
void torchcuda_usage(int device, int64_t* out) {
  const torchcuda::Usage of = torchcuda::usage(device);
  for (const torchcuda::Counter* counter :
       {&of.allocation, &of.segment, &of.active, &of.inactive_split, &of.allocated_bytes,
        &of.reserved_bytes, &of.active_bytes, &of.inactive_split_bytes, &of.requested_bytes}) {
    for (const int64_t value :
         {counter->current, counter->peak, counter->allocated, counter->freed}) {
      *out++ = value;
    }
  }
  for (const int64_t value : {of.ooms, of.retries, of.device_allocs, of.device_frees}) {
    *out++ = value;
  }
}
}
