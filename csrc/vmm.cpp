#include "vmm.h"

#include <algorithm>
#include <cctype>

#include "vmm_cuda.h"
#include "vmm_host.h"

namespace kvcached {

namespace {

bool is_numbered(const std::string& device, const std::string& kind) {
  const std::string prefix = kind + ":";
  if (!device.starts_with(prefix) || device.size() == prefix.size()) return false;
  return device.size() <= prefix.size() + 4 &&
         std::all_of(device.begin() + static_cast<std::ptrdiff_t>(prefix.size()), device.end(),
                     [](unsigned char c) { return std::isdigit(c) != 0; });
}

}  // namespace

Status Vmm::map_accessible(uint64_t address, std::span<const Handle> handles) {
  KV_TRY(map(address, handles));
  const uint64_t bytes = handles.size() * page_bytes();
  Status access = set_access(address, bytes);
  if (access.ok()) return access;
  if (!unmap(address, bytes).ok()) {
    return failure(Code::stranded, "pages were mapped without access: ", access.message);
  }
  return access;
}

Status check_device_name(const std::string& device) {
  if (is_numbered(device, "host")) return {};
  if (is_numbered(device, "cuda")) {
    const Result<const CudaDriver*> driver = CudaDriver::load();
    return driver.ok() ? Status{} : driver.status();
  }
  return failure(Code::unknown_device, "device '", device,
                 "' is not known; write 'host:0' or 'cuda:0'");
}

Result<std::shared_ptr<Vmm>> make_vmm(const std::string& device, uint64_t page_bytes) {
  KV_TRY(check_device_name(device));
  if (device.starts_with("host:")) return HostVmm::make(page_bytes);
  return CudaVmm::make(std::stoi(device.substr(device.find(':') + 1)), page_bytes);
}

}  // namespace kvcached
