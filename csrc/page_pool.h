// Physical pages of one client: each page is reserved in the ledger before it is created, and is
// charged until its memory is back with the OS. Pages that come back are kept for reuse (creating
// one is three quarters of the cost of a map on a GPU) while they are no more than `high`; above
// that, all but `low` are given back. Under pressure all of them are: PagePool asks the client's
// other holders of spare pages before it says no_room.
// Thread rule: the owner's, but for what is said to be for any thread.
#pragma once

#include <atomic>

#include "client.h"

namespace kvcached {

// Code::invalid_argument
Status check_watermarks(size_t low, size_t high);

class PagePool {
 public:
  // `owner`, if any, holds this pool's spares for others to ask.
  explicit PagePool(std::shared_ptr<Client> client, const SpareHolder* owner = nullptr)
      : client_(std::move(client)), owner_(owner) {}

  // `count` pages, all or none; Code::no_room if the ledger does not grant them.
  Result<std::vector<Handle>> take(size_t count) { return take_as(count, Need::now); }
  // The same ahead of need: asks for no spare pages, and waits for nothing.
  Result<std::vector<Handle>> take_ahead(size_t count) { return take_as(count, Need::later); }
  // Code::no_room unless the ledger would grant `count` pages at this moment. Keeps none.
  Status find_room(size_t count);
  // REQUIRES: taken from here and not mapped. On failure the pages stay in the pool as spares.
  Status give(std::span<const Handle> handles);
  // Gives spare pages back until at most `keep` are left. Returns how many went.
  Result<size_t> trim(size_t keep);

  // REQUIRES: check_watermarks
  Status set_watermarks(size_t low, size_t high);
  // How many spares are missing up to the low watermark.
  size_t missing_pages() const { return low_ - std::min(low_, spares_.size()); }
  // Creates spares ahead of need.
  Status fill(size_t count);
  // From any thread.
  size_t spare_pages() const { return spare_count_; }
  // Pages that take() would find now. From any thread.
  Result<size_t> available_pages();

 private:
  enum class Need { now, later };

  // Takes spares out, runs of adjacent handles together (the backend maps such a run in one call):
  // the longest runs or the shortest, the last of them in part. Ascending.
  // REQUIRES: count <= spare_pages()
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
