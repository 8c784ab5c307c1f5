// Token blocks on slabs, as bookkeeping alone: which slabs are mapped, who owns which block.
//
// A slab is the smallest growth of a KV cache: the same run of pages in every buffer of the model,
// holding `blocks_per_slab` whole blocks. Blocks are taken from the fullest mapped slab that has
// room (best fit), so that the emptiest ones drain and can be unmapped; a new slab is the lowest
// unmapped one, so that mapped memory stays in few runs.
// Ids are dense: block b lies in slab b / blocks_per_slab. Blocks below `reserved_blocks` are never
// handed out (engines write padding there) and keep their slabs mapped.
// Thread rule: the owner's. Nothing here touches memory of the device.
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
  // REQUIRES: slabs > 0, blocks_per_slab > 0, reserved_blocks < slabs * blocks_per_slab
  KvAllocator(Slab slabs, uint32_t blocks_per_slab, int64_t reserved_blocks);

  int64_t total_blocks() const { return int64_t{slabs_} * blocks_per_slab_; }
  int64_t live_blocks() const { return live_blocks_; }
  int64_t free_mapped_blocks() const { return free_mapped_blocks_; }
  uint32_t blocks_per_slab() const { return blocks_per_slab_; }
  Slab unmapped_slabs() const { return unmapped_slabs_; }
  Slab floor_slabs() const;

  // The `count` lowest unmapped slabs, ascending. REQUIRES: count <= unmapped_slabs()
  std::vector<Slab> lowest_unmapped(Slab count) const;
  // Mapped slabs with no live block, ascending: spares whose unmap failed before.
  std::vector<Slab> empty_mapped() const;
  void add_mapped(std::span<const Slab> slabs);
  // REQUIRES: mapped, no live block
  void remove_mapped(std::span<const Slab> slabs);
  // Takes slabs out of use for good: part of their memory is in an unknown state.
  // REQUIRES: no live block
  void retire(std::span<const Slab> slabs);

  // Fills `ids`. REQUIRES: ids.size() <= free_mapped_blocks()
  void take(std::span<int64_t> ids);
  // Frees all ids or none: Code::unknown_block, Code::double_free (also for an id named twice).
  // `emptied` receives the slabs that have no live block any more.
  Status give(std::span<const int64_t> ids, std::vector<Slab>& emptied);

  // Recounts everything from the ownership bitmap; Code::internal if a count is wrong.
  Status check() const;

 private:
  struct Freed {
    Slab slab;
    uint32_t blocks;
  };
  enum class State : uint8_t { unmapped, mapped, retired };
  static constexpr Slab kNone = UINT32_MAX;

  int64_t first_block(Slab slab) const { return int64_t{slab} * blocks_per_slab_; }
  void set_owned(int64_t block, bool owned);
  uint32_t count_owned(Slab slab) const;
  // Clears the ownership bits of all ids, leaving in freed_ how many went from which slab, or
  // changes nothing.
  Status disown(std::span<const int64_t> ids);
  Status undo_disown(std::span<const int64_t> ids, int64_t refused);
  Status refuse(int64_t block) const;

  // Mapped slabs with room, in doubly linked lists by their number of free blocks.
  void link(Slab slab);
  void unlink(Slab slab);
  void set_free(Slab slab, uint32_t free);
  uint32_t fullest() const;
  void take_from(Slab slab, std::span<int64_t> ids);

  const Slab slabs_;
  const uint32_t blocks_per_slab_;
  const int64_t reserved_blocks_;
  const size_t words_per_slab_;
  int64_t live_blocks_ = 0;
  int64_t free_mapped_blocks_ = 0;
  Slab unmapped_slabs_;
  mutable Slab lowest_unmapped_hint_ = 0;  // no slab below it is unmapped
  std::vector<uint64_t> owned_;            // words_per_slab_ words for each slab
  std::vector<State> states_;
  std::vector<Freed> freed_;    // scratch of give, kept for its storage
  std::vector<uint32_t> free_;  // per slab
  std::vector<Slab> next_, previous_;
  std::vector<Slab> heads_;         // by number of free blocks
  std::vector<uint64_t> nonempty_;  // bitmap of heads_
};

}  // namespace kvcached
