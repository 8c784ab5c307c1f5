// Bookkeeping of token blocks on slabs: which slabs are mapped, and which blocks are allocated.
//
// A slab is the smallest growth of a KV cache: the same run of pages in every buffer of the model,
// holding `blocks_per_slab` whole blocks. Blocks are taken from the fullest mapped slab that has
// room (best fit), so that the emptiest slabs drain and can be unmapped. A new slab is the lowest
// unmapped one, so that mapped memory stays in few runs.
// Ids come in ascending runs, and take and give work on runs: a run within one word of the bitmap
// costs as much as one id. Ids are dense: block b is in slab b / blocks_per_slab. Blocks below
// `reserved_blocks` are never handed out (engines write padding there) and keep their slabs mapped.
// Thread rule: the owner's. Touches no memory of the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "status.h"

namespace kvcached {

using Slab = uint32_t;

class KvAllocator {
 public:
  static constexpr uint32_t kWordBits = 64;  // of the ownership bitmap

  // REQUIRES: slabs > 0, blocks_per_slab > 0, reserved_blocks < slabs * blocks_per_slab
  KvAllocator(Slab slabs, uint32_t blocks_per_slab, int64_t reserved_blocks);

  int64_t total_blocks() const { return int64_t{slabs_} * blocks_per_slab_; }
  int64_t live_blocks() const { return live_blocks_; }
  int64_t free_mapped_blocks() const { return free_mapped_blocks_; }
  uint32_t blocks_per_slab() const { return blocks_per_slab_; }
  Slab unmapped_slabs() const { return unmapped_slabs_; }
  // Mapped slabs without a live block. They cost memory, and their next use needs no map.
  Slab empty_slabs() const { return empty_slabs_; }
  Slab mapped_slabs() const { return mapped_slabs_; }
  Slab retired_slabs() const { return retired_slabs_; }
  // Number of slabs that the live and reserved blocks would fill without gaps.
  Slab needed_slabs() const;
  Slab floor_slabs() const;

  Slab slab_of(int64_t block) const;
  // True if the block is allocated. A reserved one is not.
  bool is_live(int64_t block) const;
  // Blocks of a mapped slab that are live or reserved.
  uint32_t owned_in(Slab slab) const { return blocks_per_slab_ - nodes_[slab].free; }
  // Failure for a block that is not live: Code::unknown_block or Code::double_free.
  Status refuse(int64_t block) const;

  // The `count` lowest unmapped slabs, ascending. REQUIRES: count <= unmapped_slabs()
  std::vector<Slab> lowest_unmapped(Slab count) const;
  // The slabs counted by empty_slabs(), ascending.
  std::vector<Slab> empty_mapped() const;
  // Puts slabs into use that were unmapped or set aside.
  void add_mapped(std::span<const Slab> slabs);
  // Takes slabs out of use that are still mapped. REQUIRES: mapped, no live block
  void set_aside(std::span<const Slab> slabs);
  // REQUIRES: mapped or set aside, no live block
  void remove_mapped(std::span<const Slab> slabs);
  // Takes slabs out of use permanently, because part of their memory is in an unknown state.
  // REQUIRES: no live block
  void retire(std::span<const Slab> slabs);

  // Fills `ids`. REQUIRES: ids.size() <= free_mapped_blocks()
  void take(std::span<int64_t> ids);
  // Frees all ids or none: Code::unknown_block, Code::double_free (also for an id named twice).
  Status give(std::span<const int64_t> ids);
  // Status that give would return.
  Status check_give(std::span<const int64_t> ids);

  // Recounts everything from the ownership bitmap and walks every list. Code::internal if a count
  // or a link is wrong.
  Status check() const;

 private:
  enum class State : uint8_t { unmapped, mapped, aside, retired };
  // Data of a slab that an engine step needs, in a quarter of a cache line.
  struct Node {
    Slab next;
    Slab previous;
    uint32_t free = 0;
    State state = State::unmapped;
  };
  static constexpr Slab kNone = UINT32_MAX;

  int64_t first_block(Slab slab) const { return int64_t{slab} * blocks_per_slab_; }
  void set_owned(int64_t block, bool owned);
  uint32_t count_owned(Slab slab) const;
  // Number of the first ids that are consecutive and in the slab whose first block is `first`.
  size_t run_length(std::span<const int64_t> ids, int64_t first) const;
  // Clears the ownership bits of the first ids that are in the slab. Returns their number, which is
  // 0 only if the first id is not owned.
  size_t disown_in(Slab slab, std::span<const int64_t> ids);
  size_t disown_narrow(Slab slab, std::span<const int64_t> ids);
  size_t disown_scattered(Slab slab, std::span<const int64_t> ids);
  uint32_t disown_run(Slab slab, uint32_t position, uint32_t count);
  // Frees ids up to the first that cannot be freed. Returns their number. The caller updates
  // live_blocks_ and free_mapped_blocks_.
  size_t release(std::span<const int64_t> ids);
  // The same for leading slabs that were full and get `count` consecutive blocks back each. Batches
  // mostly consist of these, and the head of their list stays in a register.
  size_t release_alike(std::span<const int64_t> ids, uint32_t count);
  // Undoes release.
  void take_back(std::span<const int64_t> ids);

  // Mapped slabs with room, in doubly linked lists by their number of free blocks.
  void link(Slab slab);
  void unlink(Slab slab);
  void set_free(Slab slab, uint32_t free);
  uint32_t fullest() const;
  Status check_lists() const;
  // Takes all free blocks of slabs with `free` of them each, as long as the ids need whole slabs.
  size_t take_whole(uint32_t free, std::span<int64_t> ids);
  void take_from(Slab slab, std::span<int64_t> ids);

  const Slab slabs_;
  const uint32_t blocks_per_slab_;
  const int64_t reserved_blocks_;
  const int slab_shift_;  // log2 of blocks_per_slab_, or -1 if it is not a power of two
  const size_t words_per_slab_;
  int64_t live_blocks_ = 0;
  int64_t free_mapped_blocks_ = 0;
  Slab unmapped_slabs_;
  Slab mapped_slabs_ = 0;
  Slab retired_slabs_ = 0;
  Slab empty_slabs_ = 0;
  mutable Slab lowest_unmapped_hint_ = 0;  // no slab below it is unmapped
  std::vector<uint64_t> owned_;            // words_per_slab_ words for each slab
  std::vector<Node> nodes_;                // by slab
  std::vector<Slab> heads_;                // by number of free blocks
  std::vector<uint64_t> nonempty_;         // bitmap of heads_
};

}  // namespace kvcached
