-- ARGV: device, epoch, request ids. Moves requests from running to waiting at the model's present
-- placement. Returns the number of requests that moved.
local device, epoch = ARGV[1], ARGV[2]
local lost = lease_lost(device, epoch)
if lost then return lost end
local moved = 0
for i = 3, #ARGV do
  moved = moved + requeue_running(device, ARGV[i])
end
return moved
