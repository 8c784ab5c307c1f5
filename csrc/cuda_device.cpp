#include "cuda_device.h"

namespace kvcached {

namespace {

constexpr int kDeviceLocation = 1;
constexpr int kPinned = 1;
constexpr int kMinimumGranularity = 0;
constexpr int kHasVirtualMemory = 102;  // CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
constexpr int kHasFileHandles =
    103;  // CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED

}  // namespace

Result<std::unique_ptr<CudaDevice>> CudaDevice::open(int ordinal) {
  Result<const CudaDriver*> driver = CudaDriver::load();
  if (!driver.ok()) return driver.status();
  if (Status status = driver.value()->init(); !status.ok()) return status;
  std::unique_ptr<CudaDevice> device(new CudaDevice(*driver.value(), ordinal));
  if (Status status = device->find_device(); !status.ok()) return status;
  if (Status status = device->find_granularity(); !status.ok()) return status;
  const CuResult retained =
      driver.value()->functions().primary_ctx_retain(&device->context_, device->device_);
  Status status = driver.value()->check(retained, "cuDevicePrimaryCtxRetain");
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
  if (ordinal_ >= count) {
    return failure(
        Code::unknown_device,
        "device 'cuda:" + std::to_string(ordinal_) + "' does not exist; the driver " +
            (count == 0 ? "shows no GPU" : "shows cuda:0 to cuda:" + std::to_string(count - 1)) +
            " (see CUDA_VISIBLE_DEVICES)");
  }
  KV_TRY(driver_.check(cuda.device_get(&device_, ordinal_), "cuDeviceGet"));
  int supported = 0;
  KV_TRY(driver_.check(cuda.device_get_attribute(&supported, kHasVirtualMemory, device_),
                       "cuDeviceGetAttribute"));
  int files = 0;
  exports_ =
      cuda.device_get_attribute(&files, kHasFileHandles, device_) == kCuSuccess && files != 0;
  if (supported != 0) return {};
  return failure(Code::unavailable, "device 'cuda:" + std::to_string(ordinal_) +
                                        "' has no virtual memory management; use another GPU or a "
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
  return failure(Code::invalid_argument,
                 "cannot reserve " + std::to_string(bytes) +
                     " bytes of address space; ask for a smaller virtual size (" +
                     driver_.describe(result) + ")");
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
    // The ledger granted the page; somebody outside of it holds the memory.
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

Status CudaDevice::zero(uint64_t address, uint64_t bytes) {
  const CuFunctions& cuda = driver_.functions();
  if (own_stream_ == nullptr) {
    KV_TRY(driver_.check(call(cuda.stream_create, &own_stream_, kCuStreamNonBlocking),
                         "cuStreamCreate"));
  }
  const CuResult filled =
      call(cuda.memset_d8_async, address, static_cast<unsigned char>(0), bytes, own_stream_);
  KV_TRY(driver_.check(filled, "cuMemsetD8Async"));
  return driver_.check(call(cuda.stream_synchronize, own_stream_), "cuStreamSynchronize");
}

Result<CuEvent> CudaDevice::record_event(uint64_t stream) const {
  const CuFunctions& cuda = driver_.functions();
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

Result<bool> CudaDevice::has_passed(CuEvent event) const {
  const CuResult result = call(driver_.functions().event_query, event);
  if (result == kCuNotReady) return false;
  if (Status status = driver_.check(result, "cuEventQuery"); !status.ok()) return status;
  return true;
}

void CudaDevice::destroy_event(CuEvent event) const {
  // One that cannot be destroyed goes with its context.
  if (!abandoned_) (void)call(driver_.functions().event_destroy, event);
}

Status CudaDevice::enable_peer(const CudaDevice& peer) const {
  int can = 0;
  KV_TRY(driver_.check(functions().device_can_access_peer(&can, device_, peer.device_),
                       "cuDeviceCanAccessPeer"));
  if (can == 0) {
    return failure(Code::unavailable,
                   "cuda:" + std::to_string(ordinal_) +
                       " cannot read the memory of cuda:" + std::to_string(peer.ordinal_) +
                       "; load over links of GPUs that are connected");
  }
  const CuResult result = call(functions().ctx_enable_peer_access, peer.context_, 0U);
  return result == kCuPeerAlreadyEnabled ? Status{}
                                         : driver_.check(result, "cuCtxEnablePeerAccess");
}

}  // namespace kvcached
