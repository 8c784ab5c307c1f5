-- ARGV: device, epoch, then triples of request id, body and preferred device ('': none). Moves
-- running requests, with their new body, to waiting at the preferred device or at the model's
-- present placement. Ignores requests that do not run here. Returns the number of those that moved.
local device, epoch = ARGV[1], ARGV[2]
local lost = lease_lost(device, epoch)
if lost then return lost end
local moved = 0
for i = 3, #ARGV, 3 do
  if redis.call('HEXISTS', running_key(device), ARGV[i]) == 1 then
    redis.call('HSET', running_key(device), ARGV[i], ARGV[i + 1])
    moved = moved + requeue_running(device, ARGV[i], ARGV[i + 2])
  end
end
return moved
