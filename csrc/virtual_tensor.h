// A region whose pages its owner maps and unmaps explicitly (Prism, Table 3), for example for
// weights. Thread rule: any thread. Calls are serialised.
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

  // Byte ranges are multiples of the page. All or nothing. Code::no_room if the pages are not
  // granted. unmap and close wait for the client's streams first: Code::in_use if they take too
  // long.
  Status map(uint64_t offset, uint64_t bytes);
  Status unmap(uint64_t offset, uint64_t bytes);
  Status close();
  // Code::closed once the tensor's addresses are no longer valid.
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
