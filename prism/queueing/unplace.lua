-- ARGV: device, epoch, entry ids. Moves waiting entries to the unplaced queue and returns how many
-- moved. Does not change the placement, which is the scheduler's.
local device, epoch = ARGV[1], ARGV[2]
local lost = lease_lost(device, epoch)
if lost then return lost end
local moved = 0
for i = 3, #ARGV do
  local fields = waiting_entry(device, ARGV[i])
  if fields then
    move_waiting(device, ARGV[i], fields, UNPLACED)
    moved = moved + 1
  end
end
return moved
