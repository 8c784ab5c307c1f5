-- ARGV: device, 1 if any device will do, entry ids of the unplaced queue. Moves those whose model
-- has a copy on the device to its queue, in this order, and returns their ids.
local device, anywhere, moved = ARGV[1], ARGV[2] == '1', {}
for i = 3, #ARGV do
  local fields = waiting_entry(UNPLACED, ARGV[i])
  local is_there = anywhere
  for _, copy in ipairs(fields and devices_of(fields.model) or {}) do
    is_there = is_there or copy == device
  end
  if fields and is_there then
    move_waiting(UNPLACED, ARGV[i], fields, device)
    table.insert(moved, ARGV[i])
  end
end
return moved
