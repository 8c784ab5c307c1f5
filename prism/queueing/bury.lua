-- ARGV: frontend, which has ended. Its heartbeat, its claims and its requests for models that are
-- placed nowhere go; only the first call looks for these. Returns how many. Those of a device are
-- its agent's.
local frontend = ARGV[1]
redis.call('DEL', claims_key(frontend))
local known = redis.call('SREM', prefix .. 'frontends', frontend)
if known + redis.call('DEL', prefix .. 'frontend:' .. frontend) == 0 then return 0 end
local dropped = 0
for _, item in ipairs(redis.call('XRANGE', queue_key(UNPLACED), '-', '+')) do
  local readable, request = pcall(cmsgpack.unpack, item[2][8])
  if readable and type(request) == 'table' and request.frontend_id == frontend then
    drop_entry(UNPLACED, item[1])
    dropped = dropped + 1
  end
end
return dropped
