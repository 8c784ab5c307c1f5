#include "quarantine.h"

#include <algorithm>

namespace kvcached {

void Quarantine::add(Fence fence, std::vector<Slab> slabs) {
  count_ += slabs.size();
  entries_.push_back({std::move(fence), std::move(slabs)});
}

std::vector<Slab> Quarantine::take_back(size_t count) {
  std::vector<Slab> taken;
  while (taken.size() < count && !entries_.empty()) {
    std::vector<Slab>& last = entries_.back().slabs;
    const size_t part = std::min(count - taken.size(), last.size());
    taken.insert(taken.end(), last.end() - static_cast<std::ptrdiff_t>(part), last.end());
    last.resize(last.size() - part);
    if (last.empty()) entries_.pop_back();
  }
  count_ -= taken.size();
  return taken;
}

Result<std::vector<Slab>> Quarantine::take_passed() {
  std::vector<Slab> taken;
  while (!entries_.empty()) {
    Result<bool> passed = entries_.front().fence.has_passed();
    if (!passed.ok() && taken.empty()) return passed.status();
    if (!passed.ok() || !passed.value()) break;
    const std::vector<Slab>& slabs = entries_.front().slabs;
    taken.insert(taken.end(), slabs.begin(), slabs.end());
    entries_.pop_front();
  }
  count_ -= taken.size();
  std::sort(taken.begin(), taken.end());
  return taken;
}

}  // namespace kvcached
