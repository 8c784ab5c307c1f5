-- ARGV: device, epoch, entry ids. Moves waiting entries to the stream `malformed`, which keeps the
-- last ones for inspection. Returns the live frontends.
local KEPT = 100
local device, epoch = ARGV[1], ARGV[2]
local lost = lease_lost(device, epoch)
if lost then return lost end
for i = 3, #ARGV do
  local fields = drop_entry(device, ARGV[i])
  if fields then
    redis.call('XADD', prefix .. 'malformed', 'MAXLEN', KEPT, '*', unpack(fields))
  end
end
local frontends = {}
for _, frontend in ipairs(redis.call('SMEMBERS', prefix .. 'frontends')) do
  if redis.call('EXISTS', prefix .. 'frontend:' .. frontend) == 1 then
    table.insert(frontends, frontend)
  else
    redis.call('SREM', prefix .. 'frontends', frontend)
  end
end
return frontends
