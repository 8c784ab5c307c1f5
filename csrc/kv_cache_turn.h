// Moving the pages of a KV cache, one thread at a time. The client's thread goes last: it leaves
// when somebody waits, and is woken when the way is free.
#pragma once

#include "kv_cache.h"

namespace kvcached {

class KvCache::Turn {
 public:
  explicit Turn(KvCache& cache) : cache_(cache) {
    ++cache_.waiting_;
    lock_ = std::unique_lock(cache_.moving_);
    --cache_.waiting_;
  }
  Turn(KvCache& cache, std::try_to_lock_t how) : cache_(cache), lock_(cache.moving_, how) {}
  ~Turn() {
    if (!is_mine()) return;
    {
      const std::lock_guard books(cache_.books_);
      cache_.publish_spares();
    }
    lock_.unlock();
    if (cache_.turned_away_.exchange(false)) cache_.client_->spares().wake();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  bool is_mine() const { return lock_.owns_lock(); }

 private:
  KvCache& cache_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace kvcached
