-- ARGV: device, owner, epoch, ttl in ms. Fails if this is not the server that gave the lease out:
-- its data may be old, so the agent has to acquire the queue again.
local device, owner, epoch, ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local lost = lease_lost(device, epoch)
if lost then return lost end
if redis.call('GET', acquired_key(device)) ~= server_id() then
  return redis.error_reply('LEASELOST the queue of ' .. device .. ' is on another server')
end
redis.call('SET', lease_key(device), owner .. '|' .. epoch, 'PX', ttl_ms)
return 0
