-- ARGV: device, owner, epoch, ttl in ms. Another server than the one that gave the lease out has it
-- taken again: it may not know what runs here, or that it has ended.
local device, owner, epoch, ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local lost = lease_lost(device, epoch)
if lost then return lost end
if redis.call('GET', acquired_key(device)) ~= server_id() then
  return redis.error_reply('LEASELOST the queue of ' .. device .. ' is on another server')
end
redis.call('SET', lease_key(device), owner .. '|' .. epoch, 'PX', ttl_ms)
return 0
