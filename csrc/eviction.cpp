#include "eviction.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace kvcached {

namespace {

// The evictable blocks of one slab: a range of the sorted ids.
struct Candidate {
  Slab slab;
  size_t first;
  uint32_t blocks;
  int64_t newest;
};

bool goes_before(const Candidate& a, const Candidate& b) {
  return std::tie(a.blocks, a.newest, a.slab) < std::tie(b.blocks, b.newest, b.slab);
}

std::vector<size_t> in_order(std::span<const int64_t> ids) {
  std::vector<size_t> order(ids.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto before = [&](size_t a, size_t b) { return ids[a] < ids[b]; };
  // Callers often pass sorted ids, and checking is cheaper than sorting.
  if (!std::is_sorted(ids.begin(), ids.end())) std::sort(order.begin(), order.end(), before);
  return order;
}

Status check_ids(const KvAllocator& blocks, std::span<const int64_t> ids,
                 std::span<const size_t> order) {
  for (size_t i = 0; i < order.size(); ++i) {
    const int64_t id = ids[order[i]];
    if (!blocks.is_live(id)) return blocks.refuse(id);
    if (i > 0 && ids[order[i - 1]] == id) {
      return failure(Code::double_free, "block ", id, " is named twice");
    }
  }
  return {};
}

// Slabs all of whose blocks are evictable.
std::vector<Candidate> candidates(const KvAllocator& blocks, std::span<const int64_t> ids,
                                  std::span<const int64_t> last_used,
                                  std::span<const size_t> order) {
  std::vector<Candidate> found;
  for (size_t first = 0, end = 0; first < order.size(); first = end) {
    const Slab slab = blocks.slab_of(ids[order[first]]);
    int64_t newest = INT64_MIN;
    for (end = first; end < order.size() && blocks.slab_of(ids[order[end]]) == slab; ++end) {
      newest = std::max(newest, last_used[order[end]]);
    }
    const auto count = static_cast<uint32_t>(end - first);
    if (count == blocks.owned_in(slab)) found.push_back({slab, first, count, newest});
  }
  return found;
}

}  // namespace

Result<Eviction> choose_evictions(const KvAllocator& blocks, std::span<const int64_t> ids,
                                  std::span<const int64_t> last_used, uint64_t slabs) {
  if (ids.size() != last_used.size()) {
    return failure(Code::invalid_argument, "ids and last_used must have the same length");
  }
  const std::vector<size_t> order = in_order(ids);
  KV_TRY(check_ids(blocks, ids, order));
  std::vector<Candidate> found = candidates(blocks, ids, last_used, order);
  const size_t count = std::min<uint64_t>(slabs, found.size());
  std::partial_sort(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(count), found.end(),
                    goes_before);
  Eviction chosen;
  chosen.slabs = count;
  for (const Candidate& candidate : std::span(found).first(count)) {
    for (size_t i = 0; i < candidate.blocks; ++i) {
      chosen.ids.push_back(ids[order[candidate.first + i]]);
    }
  }
  return chosen;
}

}  // namespace kvcached
