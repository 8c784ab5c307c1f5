// Moving the pages of a KV cache, one thread at a time. The client's thread goes last: it leaves
// when another thread waits, and is woken when the lock is free.
#pragma once

#include "kv_cache.h"
#include "non_copyable.h"

namespace kvcached {

class KvCache::PageMoveLock : private kvcached::NonCopyable {
 public:
  explicit PageMoveLock(KvCache& cache) : cache_(cache) {
    ++cache_.waiting_;
    lock_ = std::unique_lock(cache_.moving_);
    --cache_.waiting_;
  }
  PageMoveLock(KvCache& cache, std::try_to_lock_t how) : cache_(cache), lock_(cache.moving_, how) {}
  ~PageMoveLock() {
    if (!is_mine()) return;
    {
      const std::lock_guard books(cache_.books_);
      cache_.publish_spares();
    }
    lock_.unlock();
    if (cache_.turned_away_.exchange(false)) cache_.client_->spares().wake();
  }

  bool is_mine() const { return lock_.owns_lock(); }

 private:
  KvCache& cache_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace kvcached
