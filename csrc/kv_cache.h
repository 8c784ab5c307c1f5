// The KV cache of one model: block ids above, pages below. Growing by a slab maps its pages in
// every buffer of the model in one batch, all or nothing.
//
// Memory that no block needs is kept in two tiers, each between watermarks: slabs that are still
// mapped, which the next alloc takes without a call to the driver, and unmapped pages, which save
// their creation (page_pool.h). Both go back at once when the client needs the room elsewhere, when
// its limit falls below what it holds, and in trim.
//
// Where the client has streams (Client::streams), a slab that is to be unmapped waits in quarantine
// until everything that they had been given at that moment is done. So free is called after the
// last work on the blocks was submitted, by the thread that submits it. Blocks may be handed out
// again at once: new work on them is behind the old one in the stream, or, with several streams, is
// ordered by whoever has several. Thread rule: any thread; calls are serialised. One engine thread
// is the intended user.
#pragma once

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
  // Reserves the address space and maps the slabs of the reserved blocks, nothing else.
  static Result<std::shared_ptr<KvCache>> create(std::shared_ptr<Client> client,
                                                 KvGeometry geometry);
  ~KvCache() override;
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  // Fills `ids` or changes nothing; Code::no_room if this client cannot have the pages now.
  Status alloc(std::span<int64_t> ids);
  // Frees all ids or none. Slabs without a live block above the high watermark are unmapped; one
  // whose unmap the OS refuses stays mapped and charged, is used again, and trim reports the
  // reason. With streams see above; a fence that cannot be made leaves the slabs mapped likewise.
  Status free(std::span<const int64_t> ids);

  // alloc and free for callers that hold a lock of their own (Python's): they wait for nobody and
  // leave the driver alone. alloc does the rest when try_alloc is false, free when nothing was
  // freed, settle when there is a surplus of mapped slabs.
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

  // Blocks that alloc would grant now, without the spare pages of the client's other caches.
  Result<int64_t> available_blocks();
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
  // Maps slabs ahead of need, as many as are missing and granted. Returns the pages mapped.
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
  Status check() const;
  MapCounters counters() const;

  const std::shared_ptr<Region>& region() const { return region_; }
  uint64_t buffer_offset(size_t buffer) const { return buffer_pages_[buffer] * page_bytes_; }
  // Waits for the streams, then gives everything back; the address range stays reserved while views
  // live. Code::in_use if the streams take too long: nothing changed. Idempotent.
  Status close();

 private:
  KvCache(std::shared_ptr<Client> client, std::shared_ptr<Region> region, KvGeometry geometry);

  void give_back_spares() override;
  // At the end of a call that moves pages.
  struct Publisher {
    explicit Publisher(KvCache& moved) : cache(moved) {}
    ~Publisher() { cache.publish_spares(); }
    KvCache& cache;
  };

  // Says in the ledger what could be given back without touching a live block.
  void publish_spares();
  Result<size_t> trim_locked();
  void settle_locked();
  bool has_surplus() const {
    return blocks_.empty_slabs() > high_slabs_ || quarantine_.slabs() > 0;
  }
  int64_t free_mapped() const;
  // Puts slabs of the quarantine into use again, as far as they are needed for so many blocks.
  void take_back(int64_t blocks);
  // Unmaps slabs without a live block: now, or once the streams are done with them.
  Status let_go(std::vector<Slab> slabs);
  Status unmap_passed();
  // trim, with `lock` made anew for each look at the streams.
  template <class Lock>
  Result<size_t> trim_within(Lock lock);
  uint64_t held_pages() const { return region_->mapped_pages() + pool_.spare_pages(); }
  Status check_open() const;
  // Slabs to map before so many blocks can be taken; Code::no_room if there are not as many.
  Result<Slab> missing_slabs(int64_t blocks) const;
  Status grow(Slab count);
  // REQUIRES: set aside. In use again if that fails.
  Status shrink(std::span<const Slab> slabs);
  std::vector<PageRun> runs_of(std::span<const Slab> slabs) const;
  void count_calls(const MapCounters& before);

  const std::shared_ptr<Client> client_;
  const std::shared_ptr<Region> region_;
  const KvGeometry geometry_;
  const uint64_t page_bytes_;
  uint64_t pages_per_slab_ = 0;
  std::vector<uint64_t> buffer_pages_;  // first page of each buffer in the region
  PagePool pool_;
  KvAllocator blocks_;
  Quarantine quarantine_;
  size_t low_slabs_ = 0;
  size_t high_slabs_ = 0;
  uint64_t published_spare_bytes_ = 0;
  bool closed_ = false;
  mutable std::mutex mutex_;
};

}  // namespace kvcached
