-- ARGV: a frontend that has ended. Removes its heartbeat, its claims and its requests in UNPLACED,
-- and returns the number of these requests. Only the first call looks for them. Requests in the
-- queue of a device are left to its agent.
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
