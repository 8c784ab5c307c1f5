#include "simulator.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <utility>

#include "identity.h"

namespace test_libcuda {

namespace {

constexpr uint64_t kFileBytes = uint64_t{1} << 60;

int make_memory() {
  const int fd = memfd_create("test-libcuda", MFD_CLOEXEC);
  return fd >= 0 && ftruncate(fd, static_cast<off_t>(kFileBytes)) == 0 ? fd : -1;
}

}  // namespace

Simulator& Simulator::instance() {
  static auto* simulator = new Simulator;  // outlives every client
  return *simulator;
}

Error Simulator::init() {
  if (dead_) return kNotInitialized;
  if (initialised_) return kSuccess;
  settings_ = read_settings();
  if (settings_.init_error != 0) {
    return refuse(static_cast<Error>(settings_.init_error), "cuInit: as the test wants it");
  }
  const std::vector<int> gpus =
      visible_gpus(settings_.devices, std::getenv("CUDA_VISIBLE_DEVICES"));
  settings_.devices = static_cast<int>(gpus.size());
  if (gpus.empty()) return refuse(kNoDevice, "cuInit: no device");
  for (const int gpu : gpus) {
    devices_.push_back({.gpu = gpu, .fd = make_memory()});
    if (devices_.back().fd < 0) return refuse(kOutOfMemory, "cuInit: no memory file");
  }
  if (!book_.open(settings_.book, settings_.teardown_ms, true)) {
    return refuse(kOutOfMemory, "cuInit: no book of the devices' memory");
  }
  if (!addresses_.open(settings_.address_bytes)) {
    return refuse(kOutOfMemory, "cuInit: no address space");
  }
  pthread_atfork(nullptr, nullptr, abandon_in_child);
  initialised_ = true;
  return kSuccess;
}

void Simulator::abandon_in_child() {
  Simulator& self = instance();
  self.dead_ = true;
  self.book_.abandon();
  for (Device& device : self.devices_) close(std::exchange(device.fd, -1));  // it may fork as well
}

Error Simulator::check_usable() const {
  return initialised_ && !dead_ ? kSuccess : kNotInitialized;
}

Error Simulator::refuse(Error error, std::string why) {
  refusal_ = std::move(why);
  return error;
}

Error Simulator::violate(std::string why) {
  ++violations_;
  return refuse(kInvalidValue, std::move(why));
}

bool Simulator::is_touched(uint64_t handle) const {
  for (const auto& [address, mapping] : mappings_) {
    if (mapping.handle == handle && streams_.is_touched(address, mapping.bytes)) return true;
  }
  return false;
}

uint64_t Simulator::used_bytes(int device) const {
  const auto index = static_cast<size_t>(device);
  return index < devices_.size() ? devices_[index].used_bytes : 0;
}

uint64_t Simulator::device_used_bytes(int device) { return book_.used_bytes(gpu_of(device)); }

bool Simulator::take(int device, uint64_t bytes) {
  if (!take_driver_memory(device, bytes)) return false;
  devices_[static_cast<size_t>(device)].used_bytes += bytes;
  return true;
}

void Simulator::give(int device, uint64_t bytes) {
  give_driver_memory(device, bytes);
  devices_[static_cast<size_t>(device)].used_bytes -= bytes;
}

bool Simulator::take_driver_memory(int device, uint64_t bytes) {
  return book_.take(gpu_of(device), bytes, settings_.device_bytes);
}

void Simulator::give_driver_memory(int device, uint64_t bytes) {
  book_.give(gpu_of(device), bytes);
}

std::string Simulator::leaks() const {
  if (dead_) return "";
  int contexts = 0;
  for (const Device& device : devices_) contexts += device.context_uses;
  const size_t streams = streams_.streams();
  const size_t events = streams_.events();
  const size_t buffers = copies_.pinned_ranges() + copies_.plain_ranges();
  const size_t reservations = addresses_.reservations() - copies_.plain_ranges();
  if (allocations_.empty() && mappings_.empty() && reservations == 0 && contexts == 0 &&
      streams == 0 && events == 0 && buffers == 0 && graphs_.empty()) {
    return "";
  }
  return std::to_string(allocations_.size()) + " allocations, " + std::to_string(mappings_.size()) +
         " mappings, " + std::to_string(reservations) + " reservations, " +
         std::to_string(contexts) + " contexts, " + std::to_string(streams) + " streams, " +
         std::to_string(events) + " events, " + std::to_string(buffers) + " buffers, " +
         std::to_string(graphs_.size()) + " graphs";
}

Error Simulator::retain_context(int device) {
  if (device < 0 || device >= settings_.devices) return refuse(kInvalidDevice, "no such device");
  int& uses = devices_[static_cast<size_t>(device)].context_uses;
  if (uses == 0 && !take_driver_memory(device, settings_.context_bytes)) {
    return refuse(kOutOfMemory, "cuDevicePrimaryCtxRetain: no memory left for the context");
  }
  ++uses;
  return kSuccess;
}

Error Simulator::release_context(int device) {
  if (!has_context(device)) return refuse(kInvalidContext, "the context was not retained");
  if (--devices_[static_cast<size_t>(device)].context_uses > 0) return kSuccess;
  give_driver_memory(device, settings_.context_bytes);
  give_driver_memory(device, settings_.table_bytes * std::erase_if(tables_, [=](const auto& table) {
                               return table.first == device;
                             }));
  copies_.forget_device(device);
  return kSuccess;
}

bool Simulator::has_context(int device) const {
  return device >= 0 && device < settings_.devices &&
         devices_[static_cast<size_t>(device)].context_uses > 0;
}

}  // namespace test_libcuda
