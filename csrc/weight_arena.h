// Device memory for the weights of one model. It is non-elastic: the whole of it is leased in the
// ledger as static memory before its first page exists, and the lease ends after its last page.
// Pages are made in ascending order, so that copying can begin while the rest is still being made.
// Thread rule: any thread; calls are serialised.
#pragma once

#include "client.h"
#include "non_copyable.h"

namespace kvcached {

class WeightArena : private NonCopyable {
 public:
  // Leases the memory and takes addresses for it (Client::reserve_region); `bytes` is rounded up
  // to whole pages. Code::no_room if the ledger does not grant it.
  static Result<std::shared_ptr<WeightArena>> create(std::shared_ptr<Client> client,
                                                     uint64_t bytes);
  ~WeightArena();

  const std::shared_ptr<Client>& client() const { return client_; }
  const std::shared_ptr<Region>& region() const { return region_; }
  uint64_t bytes() const { return region_->bytes(); }
  // Never waits, as a load may hold the lock across a call to the driver.
  uint64_t backed_bytes() const;

  // Makes and maps pages until the first `bytes` bytes are backed, and some more in the same call
  // (`ahead_bytes`, as far as the arena goes). What was made before a failure stays until close.
  // Code::no_room if the device is full in spite of the lease.
  Status back(uint64_t bytes, uint64_t ahead_bytes = 0);
  // Backs the whole arena and sets every byte of it: fresh pages of a GPU hold anything.
  Status fill(unsigned char value);
  // Waits for the client's streams (Code::in_use if they take too long: nothing changed), then
  // gives every page and the lease back. Views keep the addresses, not the memory. Idempotent.
  Status close();

 private:
  WeightArena(std::shared_ptr<Client> client, std::shared_ptr<Region> region);
  Status check_usable() const;
  Status grow(uint64_t pages);
  Status give_pages_back();

  const std::shared_ptr<Client> client_;
  const std::shared_ptr<Region> region_;
  std::vector<Handle> owed_;  // pages out of use whose release failed
  bool closed_ = false;
  std::mutex mutex_;
};

}  // namespace kvcached
