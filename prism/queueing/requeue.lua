-- ARGV: device, epoch, request ids. Running -> waiting, at the model's placement of now.
local device, epoch = ARGV[1], ARGV[2]
local lost = lease_lost(device, epoch)
if lost then return lost end
local moved = 0
for i = 3, #ARGV do
  moved = moved + requeue_running(device, ARGV[i])
end
return moved
