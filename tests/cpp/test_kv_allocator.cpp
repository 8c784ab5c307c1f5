#include <algorithm>
#include <random>
#include <set>

#include "check.h"
#include "kv_allocator.h"

namespace kvcached::testing {

namespace {

std::vector<int64_t> take(KvAllocator& blocks, size_t count) {
  std::vector<int64_t> ids(count);
  blocks.take(ids);
  return ids;
}

void the_fullest_slab_is_used_first() {
  KvAllocator blocks(4, 4, 1);
  blocks.add_mapped(blocks.lowest_unmapped(3));
  CHECK(blocks.free_mapped_blocks() == 11 && blocks.unmapped_slabs() == 1);
  CHECK((take(blocks, 2) == std::vector<int64_t>{1, 2}));  // slab 0 holds the reserved block
  const std::vector<int64_t> rest = take(blocks, 9);
  const int64_t two_of_slab_1[] = {4, 6};
  const int64_t one_of_slab_2[] = {9};
  CHECK_OK(blocks.give(two_of_slab_1));
  CHECK_OK(blocks.give(one_of_slab_2));
  CHECK(blocks.empty_slabs() == 0);
  CHECK((take(blocks, 2) == std::vector<int64_t>{9, 4}));
  CHECK_OK(blocks.check());
}

void bad_ids_change_nothing() {
  KvAllocator blocks(2, 4, 1);
  blocks.add_mapped(blocks.lowest_unmapped(1));
  CHECK(take(blocks, 2).size() == 2);
  const auto give = [&](std::vector<int64_t> ids) { return blocks.give(ids); };
  CHECK_CODE(give({1, 1}), Code::double_free);
  CHECK_CODE(give({1, 3}), Code::double_free);
  CHECK_CODE(give({1, 7}), Code::double_free);
  CHECK_CODE(give({1, 0}), Code::unknown_block);
  CHECK_CODE(give({1, 8}), Code::unknown_block);
  CHECK_CODE(give({1, -1}), Code::unknown_block);
  CHECK(blocks.live_blocks() == 2 && blocks.free_mapped_blocks() == 1);
  CHECK_OK(blocks.check());
  CHECK_OK(give({2, 1}));
  CHECK(blocks.empty_slabs() == 0);  // the reserved block keeps its slab
}

// Runs that cross a slab or a word, or overlap blocks that the same call freed.
void bad_runs_change_nothing(uint32_t blocks_per_slab) {
  KvAllocator blocks(4, blocks_per_slab, 2);
  blocks.add_mapped(blocks.lowest_unmapped(3));
  const int64_t live = 3 * int64_t{blocks_per_slab} - 2;
  std::vector<int64_t> ids = take(blocks, static_cast<size_t>(live));
  std::sort(ids.begin(), ids.end());
  for (const int64_t bad : {int64_t{0}, int64_t{1}, ids.front(), ids.back(), ids.back() + 1,
                            blocks.total_blocks(), int64_t{-1}}) {
    std::vector<int64_t> with_bad = ids;
    with_bad.push_back(bad);
    CHECK(!blocks.give(with_bad).ok());
    CHECK(blocks.live_blocks() == live && blocks.free_mapped_blocks() == 0);
    CHECK_OK(blocks.check());
  }
  CHECK_OK(blocks.give(ids));
  CHECK_OK(blocks.check());
  CHECK(blocks.empty_slabs() == 2 && blocks.needed_slabs() == 1);
}

void retired_slabs_are_never_used_again() {
  KvAllocator blocks(3, 2, 0);
  blocks.add_mapped(blocks.lowest_unmapped(1));
  const Slab slabs[] = {0, 1};
  blocks.retire(slabs);
  CHECK(blocks.unmapped_slabs() == 1 && blocks.free_mapped_blocks() == 0);
  CHECK(blocks.lowest_unmapped(1) == std::vector<Slab>{2});
  CHECK_OK(blocks.check());
}

// Widths around the words of the bitmap, against a set.
void random_steps_agree_with_a_set(uint32_t blocks_per_slab, unsigned seed) {
  std::mt19937 random(seed);
  KvAllocator blocks(8, blocks_per_slab, 3);
  blocks.add_mapped(blocks.lowest_unmapped(blocks.floor_slabs()));
  std::vector<int64_t> live;
  for (int step = 0; step < 3000; ++step) {
    const size_t count = random() % (blocks_per_slab + 2);
    if (random() % 2 == 0) {
      while (blocks.free_mapped_blocks() < static_cast<int64_t>(count)) {
        if (blocks.unmapped_slabs() == 0) break;
        blocks.add_mapped(blocks.lowest_unmapped(1));
      }
      if (blocks.free_mapped_blocks() < static_cast<int64_t>(count)) continue;
      for (const int64_t id : take(blocks, count)) live.push_back(id);
    } else {
      std::shuffle(live.begin(), live.end(), random);
      const size_t freed = std::min(count, live.size());
      const bool ascending = random() % 2 == 0;
      if (ascending) std::sort(live.begin(), live.end());
      CHECK_OK(blocks.give(std::span(live).first(freed)));
      live.erase(live.begin(), live.begin() + static_cast<std::ptrdiff_t>(freed));
      if (random() % 2 == 0) blocks.remove_mapped(blocks.empty_mapped());
    }
    const std::set<int64_t> distinct(live.begin(), live.end());
    CHECK(distinct.size() == live.size());
    CHECK(distinct.empty() ||
          (*distinct.begin() >= 3 && *distinct.rbegin() < blocks.total_blocks()));
    CHECK(blocks.live_blocks() == static_cast<int64_t>(live.size()));
    CHECK_OK(blocks.check());
  }
}

}  // namespace

void test_kv_allocator() {
  the_fullest_slab_is_used_first();
  bad_ids_change_nothing();
  retired_slabs_are_never_used_again();
  for (const uint32_t width : {4, 16, 17, 64, 65, 200}) bad_runs_change_nothing(width);
  for (const uint32_t width : {1, 5, 63, 64, 65, 128, 200}) {
    random_steps_agree_with_a_set(width, width);
  }
}

}  // namespace kvcached::testing
