#include "cuda_device.h"

#include <cstdlib>

namespace kvcached {

namespace {

constexpr int kDeviceLocation = 1;
constexpr int kPinned = 1;
constexpr int kMinimumGranularity = 0;
constexpr int kHasVirtualMemory = 102;  // CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
constexpr int kHasFileHandles =
    103;  // CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
constexpr int kNameBytes = 256;

// Failure for an ordinal that none of the driver's `count` GPUs has.
Status not_shown(int ordinal, int count) {
  std::string message = "device 'cuda:" + std::to_string(ordinal) + "' does not exist; the driver ";
  message += count == 0   ? "shows no GPU"
             : count == 1 ? "shows cuda:0 alone"
                          : "shows cuda:0 to cuda:" + std::to_string(count - 1);
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) return failure(Code::unknown_device, std::move(message));
  return failure(Code::hidden_device, message, ", as CUDA_VISIBLE_DEVICES is '", visible,
                 "'; name the GPU there or use a lower number");
}

}  // namespace

Result<std::unique_ptr<CudaDevice>> CudaDevice::open(int ordinal) {
  KV_ASSIGN(const CudaDriver* driver, CudaDriver::load());
  KV_TRY(driver->init());
  std::unique_ptr<CudaDevice> device(new CudaDevice(*driver, ordinal));
  KV_TRY(device->find_device());
  KV_TRY(device->find_granularity());
  const CuResult retained =
      driver->functions().primary_ctx_retain(&device->context_, device->device_);
  Status status = driver->check(retained, "cuDevicePrimaryCtxRetain");
  if (!status.ok()) return status;
  return device;
}

CudaDevice::~CudaDevice() {
  if (context_ == nullptr || abandoned_) return;
  if (own_stream_ != nullptr) (void)call(driver_.functions().stream_destroy, own_stream_);
  driver_.functions().primary_ctx_release(device_);
}

Status CudaDevice::find_device() {
  const CuFunctions& cuda = driver_.functions();
  int count = 0;
  KV_TRY(driver_.check(cuda.device_get_count(&count), "cuDeviceGetCount"));
  if (ordinal_ >= count) return not_shown(ordinal_, count);
  KV_TRY(driver_.check(cuda.device_get(&device_, ordinal_), "cuDeviceGet"));
  int files = 0;
  exports_ =
      cuda.device_get_attribute(&files, kHasFileHandles, device_) == kCuSuccess && files != 0;
  return check_supported();
}

Status CudaDevice::check_supported() const {
  const CuFunctions& cuda = driver_.functions();
  char name[kNameBytes] = {};
  KV_TRY(driver_.check(cuda.device_get_name(name, kNameBytes, device_), "cuDeviceGetName"));
  const std::string device = "device 'cuda:" + std::to_string(ordinal_) + "', " + name + ",";
  // The name of a MIG instance contains its profile: "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
  if (std::string(name).find(" MIG ") != std::string::npos) {
    return failure(Code::unsupported, device,
                   " is a MIG instance; kvcached shares whole GPUs: disable MIG "
                   "(nvidia-smi -mig 0) or name another GPU in CUDA_VISIBLE_DEVICES");
  }
  int supported = 0;
  KV_TRY(driver_.check(cuda.device_get_attribute(&supported, kHasVirtualMemory, device_),
                       "cuDeviceGetAttribute"));
  if (supported != 0) return {};
  return failure(Code::unsupported, device,
                 " does not support virtual memory management; use another GPU or a "
                 "host device such as 'host:0'");
}

Status CudaDevice::find_granularity() {
  const CuAllocationProp prop = allocation();
  size_t bytes = 0;
  KV_TRY(driver_.check(
      driver_.functions().mem_get_allocation_granularity(&bytes, &prop, kMinimumGranularity),
      "cuMemGetAllocationGranularity"));
  granularity_bytes_ = bytes;
  return {};
}

CuAllocationProp CudaDevice::allocation() const {
  CuAllocationProp prop = {};
  prop.type = kPinned;
  prop.requested_handle_types = exports_ ? kCuPosixFile : 0;
  prop.location = {kDeviceLocation, device_};
  return prop;
}

Result<uint64_t> CudaDevice::reserve(uint64_t bytes, uint64_t alignment) {
  uint64_t address = 0;
  const CuResult result =
      call(driver_.functions().mem_address_reserve, &address, bytes, alignment, uint64_t{0}, 0ULL);
  if (result == kCuSuccess) return address;
  return failure(Code::invalid_argument, "cannot reserve ", bytes,
                 " bytes of address space; ask for a smaller virtual size (",
                 driver_.describe(result), ")");
}

Status CudaDevice::free_address(uint64_t address, uint64_t bytes) {
  return driver_.check(call(driver_.functions().mem_address_free, address, bytes),
                       "cuMemAddressFree");
}

Result<CuHandle> CudaDevice::create(uint64_t bytes) {
  const CuAllocationProp prop = allocation();
  CuHandle handle = 0;
  const CuResult result = call(driver_.functions().mem_create, &handle, bytes, &prop, 0ULL);
  if (result == kCuSuccess) return handle;
  Status status = driver_.check(result, "cuMemCreate");
  if (result == kCuOutOfMemory) {
    // The ledger granted the page, so a process outside of the ledger holds the memory.
    status.code = Code::no_room;
    status.need_bytes = bytes;
  }
  return status;
}

Status CudaDevice::release(CuHandle handle) {
  return driver_.check(call(driver_.functions().mem_release, handle), "cuMemRelease");
}

bool CudaDevice::exports_to(int ordinal) const {
  if (!exports_ || ordinal == ordinal_) return exports_;
  const CuFunctions& cuda = driver_.functions();
  CuOrdinal other = 0;
  int can = 0;
  return cuda.device_get(&other, ordinal) == kCuSuccess &&
         cuda.device_can_access_peer(&can, other, device_) == kCuSuccess && can != 0;
}

Result<int> CudaDevice::export_file(CuHandle handle) {
  int fd = -1;
  Status status = driver_.check(call(driver_.functions().mem_export_to_shareable_handle,
                                     static_cast<void*>(&fd), handle, kCuPosixFile, 0ULL),
                                "cuMemExportToShareableHandle");
  if (!status.ok()) return status;
  return fd;
}

Result<CuHandle> CudaDevice::import_file(int fd) {
  CuHandle handle = 0;
  void* const shared = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
  Status status = driver_.check(
      call(driver_.functions().mem_import_from_shareable_handle, &handle, shared, kCuPosixFile),
      "cuMemImportFromShareableHandle");
  if (!status.ok()) return status;
  return handle;
}

Status CudaDevice::map(uint64_t address, uint64_t bytes, CuHandle handle) {
  return driver_.check(call(driver_.functions().mem_map, address, bytes, size_t{0}, handle, 0ULL),
                       "cuMemMap");
}

Status CudaDevice::unmap(uint64_t address, uint64_t bytes) {
  return driver_.check(call(driver_.functions().mem_unmap, address, bytes), "cuMemUnmap");
}

Status CudaDevice::set_access(uint64_t address, uint64_t bytes, Access access) {
  const CuAccess wanted = {{kDeviceLocation, device_}, static_cast<int>(access)};
  return driver_.check(call(driver_.functions().mem_set_access, address, bytes, &wanted, size_t{1}),
                       "cuMemSetAccess");
}

Status CudaDevice::fill(uint64_t address, uint64_t bytes, unsigned char value) {
  const CuFunctions& cuda = driver_.functions();
  if (own_stream_ == nullptr) {
    KV_TRY(driver_.check(call(cuda.stream_create, &own_stream_, kCuStreamNonBlocking),
                         "cuStreamCreate"));
  }
  KV_TRY(driver_.check(call(cuda.memset_d8_async, address, value, bytes, own_stream_),
                       "cuMemsetD8Async"));
  Status done = driver_.check(call(cuda.stream_synchronize, own_stream_), "cuStreamSynchronize");
  // Also after a failure: memory that is still being filled may be unmapped next.
  if (!done.ok()) (void)call(cuda.stream_synchronize, own_stream_);
  return done;
}

// The default stream cannot be queried while a stream that synchronises with it captures.
Status CudaDevice::check_not_capturing(CuStream stream) const {
  int capturing = 0;
  const CuResult asked = call(driver_.functions().stream_is_capturing, stream, &capturing);
  if (asked != kCuCaptureImplicit) KV_TRY(driver_.check(asked, "cuStreamIsCapturing"));
  if (asked == kCuSuccess && capturing == 0) return {};
  return failure(Code::in_use,
                 "a stream of the engine is capturing a graph; try again after the capture");
}

Result<CuEvent> CudaDevice::record_event(uint64_t stream) const {
  const CuFunctions& cuda = driver_.functions();
  KV_TRY(check_not_capturing(reinterpret_cast<CuStream>(stream)));
  CuEvent event = nullptr;
  Status status =
      driver_.check(call(cuda.event_create, &event, kCuEventDisableTiming), "cuEventCreate");
  if (!status.ok()) return status;
  status = driver_.check(call(cuda.event_record, event, reinterpret_cast<CuStream>(stream)),
                         "cuEventRecord");
  if (status.ok()) return event;
  destroy_event(event);
  return status;
}

Result<bool> CudaDevice::has_passed(CuEvent event, uint64_t stream) const {
  const CuFunctions& cuda = driver_.functions();
  const CuResult result = call(cuda.event_query, event);
  if (result == kCuNotReady || result == kCuCaptureUnsupported) return false;
  if (result == kCuCapturedEvent) {
    // A capture began between the query and the record. A later event is safe as well.
    const auto handle = reinterpret_cast<CuStream>(stream);
    if (check_not_capturing(handle).ok()) (void)call(cuda.event_record, event, handle);
    return false;
  }
  KV_TRY(driver_.check(result, "cuEventQuery"));
  return true;
}

void CudaDevice::destroy_event(CuEvent event) const {
  // An event that cannot be destroyed is freed with its context.
  if (!abandoned_) (void)call(driver_.functions().event_destroy, event);
}

Status CudaDevice::enable_peer(const CudaDevice& peer) const {
  int can = 0;
  KV_TRY(driver_.check(functions().device_can_access_peer(&can, device_, peer.device_),
                       "cuDeviceCanAccessPeer"));
  if (can == 0) {
    return failure(Code::unavailable, "cuda:", ordinal_,
                   " cannot read the memory of cuda:", peer.ordinal_,
                   "; load over links of GPUs that are connected");
  }
  const CuResult result = call(functions().ctx_enable_peer_access, peer.context_, 0U);
  return result == kCuPeerAlreadyEnabled ? Status{}
                                         : driver_.check(result, "cuCtxEnablePeerAccess");
}

}  // namespace kvcached
