-- ARGV: device, owner, ttl in ms, an epoch, ids that stay running. Returns the new epoch as text;
-- or '' and the holder if another owner's lease is valid, or if a lease was acquired after the
-- given epoch (0: not checked).
local device, owner, ttl_ms, since = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
-- A lease that is damaged, or has no time to live, does not count.
local holder = string.match(redis.call('GET', lease_key(device)) or '', '^(.*)|')
if holder and holder ~= owner and redis.call('PTTL', lease_key(device)) >= 0 then
  return {'', holder}
end
-- At least the wall clock, so that no epoch is given out twice after the server lost its data.
local time = redis.call('TIME')
local wall_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local last = tonumber(string.match(redis.call('GET', epoch_key(device)) or '', '^%d+$') or '0')
if last > 2 ^ 53 then last = 0 end
if since > 0 and last > since then return {'', 'another agent since epoch ' .. ARGV[4]} end
local epoch = string.format('%.0f', math.max(wall_ms, last + 1))
local keep = {}
for i = 5, #ARGV do keep[ARGV[i]] = true end
for _, id in ipairs(redis.call('HKEYS', running_key(device))) do
  if not keep[id] then requeue_running(device, id) end
end
-- Last, so that a call that failed on damaged data can be repeated.
redis.call('SET', epoch_key(device), epoch)
redis.call('SET', acquired_key(device), server_id())
redis.call('SET', lease_key(device), owner .. '|' .. epoch, 'PX', ttl_ms)
return {epoch, owner}
