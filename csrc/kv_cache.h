// The KV cache of one model: maps block ids to pages. Growing by a slab maps its pages in every
// buffer of the model in one batch, all or nothing.
//
// Memory that no block needs is kept in two tiers, each between watermarks: mapped slabs, which the
// next alloc takes without a call to the driver, and unmapped pages, whose creation is saved
// (page_pool.h). On a GPU whose client has a thread the first tier is on from the start, because
// growing takes hundreds of calls there. Otherwise both are off. Both are given back at once when
// the client needs the room elsewhere, when its limit falls below what it holds, and by trim.
// A low watermark starts the client's thread (spare_keeper.h), which then fills both tiers and
// unmaps the surplus.
//
// Where the client has streams (Client::streams), a slab that is to be unmapped waits in quarantine
// until the streams have completed all work submitted before that moment. So free is called after
// the last work on the blocks was submitted, by the thread that submits it. Blocks may be handed
// out again at once: new work on them follows the old work in the stream, or, with several streams,
// is ordered by the engine.
//
// Thread rule: any thread. A call that needs no page moved waits for no call to the driver. The
// intended use is one engine thread.
#pragma once

#include <atomic>

#include "eviction.h"
#include "kv_layout.h"
#include "page_pool.h"
#include "quarantine.h"
#include "region.h"

namespace kvcached {

// Outcome of try_free.
enum class TryFree { nothing, freed, freed_with_surplus };

class KvCache final : private SpareHolder {
 public:
  // Reserves the address space and maps the slabs of the reserved blocks, which hold zeros. Only
  // the client's thread maps more, ahead of need.
  static Result<std::shared_ptr<KvCache>> create(std::shared_ptr<Client> client,
                                                 const KvGeometry& geometry);
  ~KvCache() override;

  // Fills `ids` or changes nothing. Code::no_room if this client cannot have the pages now.
  Status alloc(std::span<int64_t> ids);
  // Frees all ids or none. Slabs without a live block above the high watermark are unmapped, with
  // streams after a fence (see above). If the OS refuses an unmap or a fence, the slabs stay
  // mapped, charged and in use, and trim reports the reason.
  Status free(std::span<const int64_t> ids);

  // alloc and free for callers that hold another lock (Python's GIL): they never wait and never
  // call the driver. The caller continues with alloc after false, with free after `nothing`, and
  // with settle after `freed_with_surplus`.
  bool try_alloc(std::span<int64_t> ids);
  TryFree try_free(std::span<const int64_t> ids);
  // Unmaps the surplus, and the quarantined slabs whose fence has passed; or wakes the client's
  // thread to do it.
  void settle();

  // For calls that several caches must all grant. Pages that alloc(blocks) would take from the
  // ledger, Code::no_room if the virtual space is too small; and the status of free(ids).
  Result<size_t> missing_pages(int64_t blocks) const;
  Status check_free(std::span<const int64_t> ids);
  // Code::no_room unless the client could have `pages` more at this moment. May give back spare
  // pages of other holders. Keeps nothing.
  Status find_room(size_t pages);

  // Blocks that alloc would grant now, including what the client's other caches would give back.
  Result<int64_t> available_blocks();
  // True if available_blocks is at least `blocks`. Reads the ledger only if the blocks on mapped
  // pages do not suffice.
  Result<bool> can_alloc(int64_t blocks);
  int64_t total_blocks() const { return blocks_.total_blocks(); }
  int64_t live_blocks() const;
  int64_t free_mapped_blocks() const;
  uint64_t mapped_bytes() const;
  // Part of mapped_bytes that waits for the streams. Its blocks count as free and mapped.
  uint64_t quarantined_bytes() const;
  // Bytes of the fewest slabs that can hold the live and the reserved blocks.
  uint64_t needed_bytes() const;
  uint64_t floor_bytes() const;

  // Sets the watermarks of mapped pages without a live block, in whole slabs: above `high`, all but
  // `low` are unmapped; refill maps up to `low`.
  Status set_mapped_spares(size_t low_pages, size_t high_pages);
  // Maps slabs ahead of need up to the low watermark, as far as the ledger grants them. Returns the
  // number of pages mapped. For clients without a thread.
  Result<size_t> refill();
  // Sets the watermarks of unmapped pages for reuse (page_pool.h).
  Status set_spare_pages(size_t low, size_t high);
  // Gives back every page that holds no live block. Waits for the streams up to their max_wait, and
  // leaves the rest in quarantine. Returns the number of pages given back.
  Result<size_t> trim();
  // Chooses evictable blocks whose eviction frees slabs of at least `bytes`, or as many as can be
  // (eviction.h). Code::unknown_block, Code::double_free for an id that is not live or named twice.
  Result<Eviction> choose_evictions(std::span<const int64_t> ids,
                                    std::span<const int64_t> last_used, uint64_t bytes) const;
  // Exports pages of the region for other processes to read. A page stays valid while a block on it
  // is live.
  Result<SharedPages> export_pages(std::span<const uint64_t> pages);
  // Copies out of a window. Targets are offsets in the region, all on mapped pages. Waits for the
  // streams first, so the target blocks may be newly allocated.
  Status copy_in(PageWindow& window, std::span<const CopyRun> runs);
  // Recounts the blocks and slabs, and compares them with the mapped pages.
  Status check();
  MapCounters counters();
  // Code::closed once the cache's addresses are no longer valid.
  Status check_viewable() const;
  // SpareKeeper::failed_looks of the client.
  uint64_t failed_looks() const { return client_->spares().failed_looks(); }

  const std::shared_ptr<Region>& region() const { return region_; }
  uint64_t buffer_offset(size_t buffer) const { return layout_.first_page(buffer) * page_bytes_; }
  // Waits for the streams, then gives everything back. The address range stays reserved while views
  // live. Code::in_use if the streams take too long, with nothing changed. Idempotent. After any
  // other failure the cache may be closed with pages that are still charged: call it again.
  Status close();

 private:
  KvCache(std::shared_ptr<Client> client, std::shared_ptr<Region> region,
          const KvGeometry& geometry);

  enum class Need { now, later };
  class PageMoveLock;

  // Turns the first tier on for a GPU whose client has a thread.
  Status set_default_spares();
  // Zeroes the reserved blocks, which engines read as padding, where new pages are not zeros.
  Status zero_reserved();
  void give_back_spares() override;
  size_t spare_pages() override;
  SpareWork balance_spares(const Slack& slack) override;
  Status check_open() const;
  void count_calls(const MapCounters& before);
  // Takes the ids and returns 0, or returns the number of slabs missing for that.
  Result<Slab> take_or_count_missing(std::span<int64_t> ids);

  // REQUIRES: moving_
  Status grow(Slab count, Need need);
  Status map(std::span<const Slab> slabs, std::span<const Handle> pages);
  // Sets aside up to `count` of the empty slabs above the lowest `keep`, so that no block is taken
  // there. REQUIRES: books_ as well
  std::vector<Slab> withdraw(size_t keep, size_t count);
  // Unmaps withdrawn slabs now or, through the quarantine, once the streams are done with them.
  Status unmap_after_fence(std::vector<Slab> withdrawn);
  Status unmap_passed();
  // Moves the pages of all blocks into the pool, which closes the cache.
  Status unmap_all();
  // Unmaps withdrawn slabs. They are in use again if that fails.
  Status shrink(std::span<const Slab> withdrawn);
  Result<size_t> trim_locked();
  void settle_locked();
  std::vector<Slab> withdraw_batch(bool all);
  SpareWork fill_batch(uint64_t fill_bytes);
  size_t batch_slabs() const;

  // trim, with one PageMoveLock for each check of the streams.
  template <class TakeLock>
  Result<size_t> trim_within(TakeLock take_lock);
  uint64_t held_pages() const { return region_->mapped_pages() + pool_.spare_pages(); }

  // REQUIRES: books_
  bool has_surplus() const {
    return blocks_.empty_slabs() > high_slabs_ || quarantine_.slabs() > 0;
  }
  int64_t free_mapped() const;
  // Takes slabs out of the quarantine as far as so many blocks need them.
  void take_back(int64_t blocks);
  // Slabs to map before so many blocks can be taken. Code::no_room if there are too few.
  Result<Slab> missing_slabs(int64_t blocks) const;
  // Slabs to map ahead of need up to the low watermark.
  size_t missing_spares() const;
  // REQUIRES: the blocks are free and mapped, or in quarantine
  void take(std::span<int64_t> ids);
  // Publishes in the ledger what could be given back without touching a live block.
  void publish_spares();

  const std::shared_ptr<Client> client_;
  const std::shared_ptr<Region> region_;
  const KvLayout layout_;
  const uint64_t page_bytes_;
  const uint64_t pages_per_slab_;
  std::atomic<bool> closed_ = false;

  // Held across the calls to the driver while pages move. Locked before books_.
  std::mutex moving_;
  std::atomic<int> waiting_ = 0;                  // threads that wait for moving_
  std::atomic<bool> keeper_turned_away_ = false;  // the client's thread did not get moving_
  PagePool pool_;

  // Held for moments. Slabs are mapped and unmapped under both mutexes.
  mutable std::mutex books_;
  KvAllocator blocks_;
  size_t low_slabs_ = 0;
  size_t high_slabs_ = 0;
  uint64_t published_spare_bytes_ = 0;
  Quarantine quarantine_;
  // By the holder of moving_. Their pages are in neither count of the allocator.
  Slab slabs_being_mapped_ = 0;
  Slab slabs_being_unmapped_ = 0;
  bool draining_ = false;  // from above the high watermark until the low one is reached
};

}  // namespace kvcached
