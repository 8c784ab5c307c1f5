// One process's stake in a device: a record in the ledger, the lock that proves it alive, and the
// virtual memory whose pages die with it. Several clients may live in one process.
// Thread rule: any thread. After a fork the child's copy is dead (Code::forked).
#pragma once

#include <mutex>

#include "fork_guard.h"
#include "ledger.h"
#include "vmm.h"

namespace kvcached {

class Client final : private ForkGuarded {
 public:
  static Result<std::shared_ptr<Client>> open(std::shared_ptr<Ledger> ledger,
                                              const std::string& device,
                                              const ClientOptions& options);
  // The same on a Vmm of the caller's, which has the ledger's page size and no other user.
  static Result<std::shared_ptr<Client>> open(std::shared_ptr<Ledger> ledger,
                                              std::shared_ptr<Vmm> vmm,
                                              const ClientOptions& options);
  ~Client() override;
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Gives everything back. Reserved addresses stay as long as views of them live. Idempotent.
  Status close();
  Status check_open() const { return vmm_->check_open(); }

  const std::shared_ptr<Vmm>& vmm() const { return vmm_; }
  uint64_t page_bytes() const { return vmm_->page_bytes(); }

  // The ledger's calls for this client's record; see ledger.h.
  Status reserve(uint64_t bytes);
  Status commit(uint64_t bytes);
  Status cancel(uint64_t bytes);
  Status release(uint64_t bytes);
  Result<uint64_t> available();
  Status reserve_static(uint64_t bytes);
  Status release_static(uint64_t bytes);
  Status set_limit(uint64_t bytes);
  Status set_min(uint64_t bytes);
  void count_maps(uint64_t maps, uint64_t unmaps);
  Result<ClientRecord> record();

 private:
  Client(std::shared_ptr<Ledger> ledger, std::shared_ptr<Vmm> vmm, int lock_fd, int slot);

  void lock_for_fork() override { mutex_.lock(); }
  void unlock_after_fork() override { mutex_.unlock(); }
  void abandon_in_child() override;

  const std::shared_ptr<Ledger> ledger_;
  const std::shared_ptr<Vmm> vmm_;
  int lock_fd_;
  const int slot_;
  std::mutex mutex_;  // of lock_fd_
};

}  // namespace kvcached
