// One reservation of addresses that a client takes ranges from and returns them to, model after
// model, so that a new layout of virtual space makes no reservation (Prism §5.2). Independent of
// pages. Thread rule: any thread. In a forked child every call does nothing, because the parent's
// addresses are not valid there.
#pragma once

#include <map>
#include <mutex>

#include "non_copyable.h"
#include "vmm.h"

namespace kvcached {

class AddressSpace : private NonCopyable {
 public:
  // REQUIRES: bytes is a positive multiple of the page
  static Result<std::shared_ptr<AddressSpace>> reserve(std::shared_ptr<Vmm> vmm, uint64_t bytes);
  ~AddressSpace();

  // Takes a free range, the smallest that fits and among equals the lowest. Returns its address, or
  // 0 if none fits. REQUIRES: bytes is a positive multiple of the page
  uint64_t take(uint64_t bytes);
  // REQUIRES: taken from here, with nothing mapped in it
  void give(uint64_t address, uint64_t bytes);

  uint64_t bytes() const { return bytes_; }
  uint64_t free_bytes() const;
  uint64_t largest_free_bytes() const;

 private:
  AddressSpace(std::shared_ptr<Vmm> vmm, uint64_t address, uint64_t bytes);
  bool is_dead() const { return vmm_->check_open().code == Code::forked; }

  const std::shared_ptr<Vmm> vmm_;
  const uint64_t address_;
  const uint64_t bytes_;
  std::map<uint64_t, uint64_t> free_;  // address -> bytes; no two are adjacent
  mutable std::mutex mutex_;
};

}  // namespace kvcached
