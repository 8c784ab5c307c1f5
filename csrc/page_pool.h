// Physical pages of one client. Each page is reserved in the ledger before it is created, and is
// charged until its memory is back with the OS. Returned pages are kept for reuse, because creating
// one is three quarters of the cost of a map on a GPU. Above the `high` watermark all but `low` are
// given back. Under memory pressure all are: PagePool asks the client's other holders of spare
// pages before it fails with Code::no_room.
// Thread rule: the owner's, except for calls marked as from any thread.
#pragma once

#include <atomic>

#include "client.h"

namespace kvcached {

// Code::invalid_argument
Status check_watermarks(size_t low, size_t high);

class PagePool {
 public:
  // `owner`, if any, is the holder of this pool's spares.
  explicit PagePool(std::shared_ptr<Client> client, const SpareHolder* owner = nullptr)
      : client_(std::move(client)), owner_(owner) {}

  // Takes `count` pages, all or none. Code::no_room if the ledger does not grant them.
  Result<std::vector<Handle>> take(size_t count) { return take_as(count, Need::now); }
  // The same ahead of need: asks no other holder for its spares, and does not wait.
  Result<std::vector<Handle>> take_ahead(size_t count) { return take_as(count, Need::later); }
  // Code::no_room unless the ledger would grant `count` pages at this moment. Keeps none.
  Status find_room(size_t count);
  // REQUIRES: taken from here and not mapped. On failure the pages stay in the pool as spares.
  Status give(std::span<const Handle> handles);
  // Gives spare pages back until at most `keep` are left. Returns the number given back.
  Result<size_t> trim(size_t keep);

  // REQUIRES: check_watermarks
  Status set_watermarks(size_t low, size_t high);
  // Number of spares missing up to the low watermark.
  size_t missing_pages() const { return low_ - std::min(low_, spares_.size()); }
  // Creates spares ahead of need.
  Status fill(size_t count);
  // From any thread.
  size_t spare_pages() const { return spare_count_; }
  // Pages that take() would find now. From any thread.
  Result<size_t> available_pages();

 private:
  enum class Need { now, later };

  // Takes spares out, ascending, in runs of adjacent handles (the backend maps such a run in one
  // call): the longest runs or the shortest, and part of the last run. REQUIRES: count <=
  // spare_pages()
  std::vector<Handle> remove_spares(size_t count, bool longest);
  void add_spares(std::span<const Handle> handles);
  Status keep_below_high();
  Result<std::vector<Handle>> take_as(size_t count, Need need);
  Status reserve(uint64_t bytes, Need need);
  Result<std::vector<Handle>> create(size_t count, Need need);

  const std::shared_ptr<Client> client_;
  const SpareHolder* const owner_;
  std::vector<Handle> spares_;           // ascending
  std::atomic<size_t> spare_count_ = 0;  // of spares_
  size_t low_ = 0;
  size_t high_ = 0;
};

}  // namespace kvcached
