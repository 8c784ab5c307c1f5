// The KV cache of one model: block ids above, pages below. Growing by a slab maps its pages in
// every buffer of the model in one batch, all or nothing.
//
// Memory that no block needs is kept in two tiers, each between watermarks: slabs that are still
// mapped, which the next alloc takes without a call to the driver, and unmapped pages, which save
// their creation (page_pool.h). On a GPU whose client has a thread the first tier is on from the
// start, since growing takes hundreds of calls there; elsewhere both are off. Both go back at once
// when the client needs the room elsewhere, when its limit falls below what it holds, and in trim.
// A low watermark starts the client's thread (spare_keeper.h), which then fills both tiers and
// unmaps what is too much.
//
// Where the client has streams (Client::streams), a slab that is to be unmapped waits in quarantine
// until everything that they had been given at that moment is done. So free is called after the
// last work on the blocks was submitted, by the thread that submits it. Blocks may be handed out
// again at once: new work on them is behind the old one in the stream, or, with several streams, is
// ordered by the engine. Thread rule: any thread. A call that needs no page moved waits
// for no call to the driver. One engine thread is the intended user.
#pragma once

#include <atomic>

#include "eviction.h"
#include "page_pool.h"
#include "quarantine.h"
#include "region.h"

namespace kvcached {

struct KvGeometry {
  std::vector<uint64_t> slab_pages;  // per buffer (K and V of each layer): pages of one slab
  Slab slabs = 0;
  uint32_t blocks_per_slab = 0;
  int64_t reserved_blocks = 0;
};

// What try_free did.
enum class TryFree { nothing, freed, freed_with_surplus };

class KvCache final : private SpareHolder {
 public:
  // Reserves the address space and maps the slabs of the reserved blocks, which hold zeros; nothing
  // else, but for what the client's thread maps ahead.
  static Result<std::shared_ptr<KvCache>> create(std::shared_ptr<Client> client,
                                                 KvGeometry geometry);
  ~KvCache() override;

  // Fills `ids` or changes nothing; Code::no_room if this client cannot have the pages now.
  Status alloc(std::span<int64_t> ids);
  // Frees all ids or none. Slabs without a live block above the high watermark are unmapped; one
  // whose unmap the OS refuses stays mapped and charged, is used again, and trim reports the
  // reason. With streams see above; a fence that cannot be made leaves the slabs mapped likewise.
  Status free(std::span<const int64_t> ids);

  // alloc and free for callers that hold a lock of their own (Python's): they never wait and
  // never call the driver. alloc does the rest when try_alloc is false, free when nothing was
  // freed, settle when there is a surplus of mapped slabs that no thread takes care of.
  bool try_alloc(std::span<int64_t> ids);
  TryFree try_free(std::span<const int64_t> ids);
  // Unmaps the surplus, and of the quarantine what the streams have done with.
  void settle();

  // For calls that several caches must all grant: the pages that alloc(blocks) would take from the
  // ledger (Code::no_room if the virtual space is too small), and what free(ids) would answer.
  Result<size_t> missing_pages(int64_t blocks) const;
  Status check_free(std::span<const int64_t> ids);
  // Code::no_room unless the client could have `pages` more at this moment; other holders' spare
  // pages may go back for it. Nothing is kept.
  Status find_room(size_t pages);

  // Blocks that alloc would grant now, with what the client's other caches would give back.
  Result<int64_t> available_blocks();
  // Whether that many are. Asks the ledger for none that lie on mapped pages.
  Result<bool> can_alloc(int64_t blocks);
  int64_t total_blocks() const { return blocks_.total_blocks(); }
  int64_t live_blocks() const;
  int64_t free_mapped_blocks() const;
  uint64_t mapped_bytes() const;
  // Those of mapped_bytes that wait for the streams. Their blocks count as free and mapped.
  uint64_t quarantined_bytes() const;
  // Bytes of the fewest slabs that could hold the live and the reserved blocks.
  uint64_t needed_bytes() const;
  uint64_t floor_bytes() const;

  // Mapped pages without a live block to keep, in whole slabs: when more than `high` are left, all
  // but `low` are unmapped; refill maps up to `low`.
  Status set_mapped_spares(size_t low_pages, size_t high_pages);
  // Maps slabs ahead of need, as many as are missing and granted. Returns the pages mapped. For
  // those who have no thread for that.
  Result<size_t> refill();
  // Unmapped pages to keep for reuse; see page_pool.h.
  Status set_spare_pages(size_t low, size_t high);
  // Gives back every page that holds no live block; waits for the streams, up to their max_wait,
  // and then leaves the rest in quarantine. Returns how many went.
  Result<size_t> trim();
  // Which of the evictable blocks to evict so that slabs of `bytes` together come free, or as many
  // as can (eviction.h). Code::unknown_block, Code::double_free for an id that is not live or
  // twice.
  Result<Eviction> choose_evictions(std::span<const int64_t> ids,
                                    std::span<const int64_t> last_used, uint64_t bytes) const;
  // Pages of the region, for others to read. They stay as they are while a block on them is live.
  Result<SharedPages> export_pages(std::span<const uint64_t> pages);
  // Copies out of a window; targets are offsets in the region, all on mapped pages. Waits for the
  // streams first, so that the blocks there may be new ones.
  Status copy_in(PageWindow& window, std::span<const CopyRun> runs);
  // Recounts the books and compares them with the pages that are mapped.
  Status check();
  MapCounters counters();
  // Code::closed once its addresses are no cache's.
  Status check_viewable() const;
  // Of the thread that keeps its client's spares (SpareKeeper).
  uint64_t failed_looks() const { return client_->spares().failed_looks(); }

  const std::shared_ptr<Region>& region() const { return region_; }
  uint64_t buffer_offset(size_t buffer) const { return buffer_pages_[buffer] * page_bytes_; }
  // Waits for the streams, then gives everything back; the address range stays reserved while views
  // live. Code::in_use if the streams take too long: nothing changed. Idempotent, and to be tried
  // again after any other failure: the cache may be closed then with pages that are still charged.
  Status close();

 private:
  KvCache(std::shared_ptr<Client> client, std::shared_ptr<Region> region, KvGeometry geometry);

  enum class Need { now, later };
  class PageMoveLock;

  // The first tier as it is from the start.
  Status keep_ready();
  // What the reserved blocks hold, which others read as padding, where fresh pages hold anything.
  Status zero_reserved();
  void give_back_spares() override;
  size_t spare_pages() override;
  Tended tend_spares(const Slack& slack) override;
  Status check_open() const;
  std::vector<PageRun> runs_of(std::span<const Slab> slabs) const;
  void count_calls(const MapCounters& before);
  // Takes the ids and answers 0, or how many slabs are missing for that.
  Result<Slab> take_or_count_missing(std::span<int64_t> ids);

  // REQUIRES: moving_
  Status grow(Slab count, Need need);
  Status map(std::span<const Slab> slabs, std::span<const Handle> pages);
  // Sets the empty slabs aside, but for the lowest `keep`, at most `count` of them: nobody takes
  // blocks there. REQUIRES: books_ as well
  std::vector<Slab> withdraw(size_t keep, size_t count);
  // Unmaps withdrawn slabs: now, or once the streams are done with them.
  Status let_go(std::vector<Slab> withdrawn);
  Status unmap_passed();
  // Takes the pages of all blocks into the pool; the cache is closed then.
  Status unmap_all();
  // In use again if that fails.
  Status shrink(std::span<const Slab> withdrawn);
  Result<size_t> trim_locked();
  void settle_locked();
  std::vector<Slab> withdraw_batch(bool all);
  Tended fill_batch(uint64_t fill_bytes);
  size_t batch_slabs() const;

  // trim, with a PageMoveLock for each look at the streams.
  template <class TakeLock>
  Result<size_t> trim_within(TakeLock take_lock);
  uint64_t held_pages() const { return region_->mapped_pages() + pool_.spare_pages(); }

  // REQUIRES: books_
  bool has_surplus() const {
    return blocks_.empty_slabs() > high_slabs_ || quarantine_.slabs() > 0;
  }
  int64_t free_mapped() const;
  // Puts slabs of the quarantine into use again, as far as they are needed for so many blocks.
  void take_back(int64_t blocks);
  // Slabs to map before so many blocks can be taken; Code::no_room if there are not as many.
  Result<Slab> missing_slabs(int64_t blocks) const;
  // Those to map ahead of need up to the low watermark.
  size_t missing_spares() const;
  // REQUIRES: the blocks are free and mapped, or in quarantine
  void take(std::span<int64_t> ids);
  // Says in the ledger what could be given back without touching a live block.
  void publish_spares();

  const std::shared_ptr<Client> client_;
  const std::shared_ptr<Region> region_;
  const KvGeometry geometry_;
  const uint64_t page_bytes_;
  uint64_t pages_per_slab_ = 0;
  std::vector<uint64_t> buffer_pages_;  // first page of each buffer in the region
  std::atomic<bool> closed_ = false;

  // Held across the calls to the driver while pages move; before books_.
  std::mutex moving_;
  std::atomic<int> waiting_ = 0;           // for moving_
  std::atomic<bool> turned_away_ = false;  // the client's thread was, and waits for a wake
  PagePool pool_;

  // Held for moments. Slabs change between mapped and not under both.
  mutable std::mutex books_;
  KvAllocator blocks_;
  size_t low_slabs_ = 0;
  size_t high_slabs_ = 0;
  uint64_t published_spare_bytes_ = 0;
  Quarantine quarantine_;
  // By the holder of moving_: their pages are in neither count.
  Slab slabs_being_mapped_ = 0;
  Slab slabs_being_unmapped_ = 0;
  bool draining_ = false;  // a surplus was found, and the low watermark is not reached
};

}  // namespace kvcached
