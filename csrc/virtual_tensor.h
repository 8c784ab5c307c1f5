// A region whose pages its owner maps and unmaps by hand (the paper's Table 3): weights, say.
// Thread rule: any thread; calls are serialised.
#pragma once

#include "non_copyable.h"
#include "page_pool.h"
#include "region.h"

namespace kvcached {

class VirtualTensor : private NonCopyable {
 public:
  static Result<std::shared_ptr<VirtualTensor>> create(std::shared_ptr<Client> client,
                                                       uint64_t bytes);
  ~VirtualTensor();

  const std::shared_ptr<Region>& region() const { return region_; }
  uint64_t mapped_bytes() const;

  // Byte ranges in multiples of the page, all or nothing; Code::no_room as for any page. unmap and
  // close wait for the client's streams first: Code::in_use if they take too long.
  Status map(uint64_t offset, uint64_t bytes);
  Status unmap(uint64_t offset, uint64_t bytes);
  Status close();
  // Code::closed once its addresses are no tensor's.
  Status check_viewable();

 private:
  VirtualTensor(std::shared_ptr<Client> client, std::shared_ptr<Region> region);
  Result<PageRun> run_of(uint64_t offset, uint64_t bytes) const;

  const std::shared_ptr<Client> client_;
  const std::shared_ptr<Region> region_;
  PagePool pool_;
  bool closed_ = false;
  std::mutex mutex_;
};

}  // namespace kvcached
