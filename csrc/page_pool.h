// Physical pages of one client: each page is reserved in the ledger before it is created, and is
// charged until its memory is back with the OS. Pages that come back are kept for reuse (creating
// one is three quarters of the cost of a map on a GPU) while they are no more than `high`; above
// that, all but `low` are given back.
// Thread rule: the owner's.
#pragma once

#include "client.h"

namespace kvcached {

class PagePool {
 public:
  explicit PagePool(std::shared_ptr<Client> client) : client_(std::move(client)) {}

  // `count` pages, all or none; Code::no_room if the ledger does not grant them.
  Result<std::vector<Handle>> take(size_t count);
  // REQUIRES: taken from here and not mapped. On failure the pages stay in the pool as spares.
  Status give(std::span<const Handle> handles);
  // Gives spare pages back until at most `keep` are left. Returns how many went.
  Result<size_t> trim(size_t keep);

  Status set_watermarks(size_t low, size_t high);
  size_t spare_pages() const { return spares_.size(); }
  // Pages that take() would find now.
  Result<size_t> available_pages();

 private:
  Result<std::vector<Handle>> create(size_t count);

  const std::shared_ptr<Client> client_;
  std::vector<Handle> spares_;
  size_t low_ = 0;
  size_t high_ = 0;
};

}  // namespace kvcached
