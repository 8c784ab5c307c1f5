// Device memory for the weights of one model. It is not elastic: all of it is leased in the ledger
// as static memory before its first page exists, until its last page is freed. Pages are created in
// ascending order, so that copying can begin before all exist. Thread rule: any thread. Calls are
// serialised.
#pragma once

#include "client.h"
#include "non_copyable.h"

namespace kvcached {

class WeightArena : private NonCopyable {
 public:
  // Leases the memory and reserves addresses for it (Client::reserve_region). `bytes` is rounded up
  // to whole pages. Code::no_room if the ledger does not grant them.
  static Result<std::shared_ptr<WeightArena>> create(std::shared_ptr<Client> client,
                                                     uint64_t bytes);
  ~WeightArena();

  const std::shared_ptr<Client>& client() const { return client_; }
  const std::shared_ptr<Region>& region() const { return region_; }
  uint64_t bytes() const { return region_->bytes(); }
  // Never waits, although a load may hold the lock across a call to the driver.
  uint64_t backed_bytes() const;

  // Creates and maps pages until the first `bytes` bytes are backed, and up to `ahead_bytes` more
  // in the same call. Pages created before a failure stay until close. Code::no_room if the device
  // is full in spite of the lease.
  Status back(uint64_t bytes, uint64_t ahead_bytes = 0);
  // Backs the whole arena and sets every byte of it, because new pages of a GPU are not zero.
  Status fill(unsigned char value);
  // Waits for the client's streams, then gives every page and the lease back. Code::in_use, with
  // nothing changed, if the streams take too long. Views keep the addresses, not the memory.
  // Idempotent.
  Status close();

 private:
  WeightArena(std::shared_ptr<Client> client, std::shared_ptr<Region> region);
  Status check_usable() const;
  Status grow(uint64_t pages);
  Status give_pages_back();

  const std::shared_ptr<Client> client_;
  const std::shared_ptr<Region> region_;
  std::vector<Handle> unreleased_;  // unused pages whose release failed
  bool closed_ = false;
  std::mutex mutex_;
};

}  // namespace kvcached
