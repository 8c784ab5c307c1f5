-- ARGV: device, owner, epoch, ttl in ms.
local device, owner, epoch, ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local lost = lease_lost(device, epoch)
if lost then return lost end
redis.call('SET', lease_key(device), owner .. '|' .. epoch, 'PX', ttl_ms)
return 0
