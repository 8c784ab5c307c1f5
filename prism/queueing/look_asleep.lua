-- ARGV: owner, '1' to take over from another owner, URLs of external servers. Returns {'replaced'}
-- if another scheduler is the owner. Otherwise {'lost' or 'known', the hash `asleep`, for each URL
-- the number of entered requests and the ms since one entered or left, -1: unknown}. 'lost': the
-- data may be older than what was written before.
local owner, server = ARGV[1], server_id()
local before, writer = string.match(redis.call('GET', prefix .. 'sleeper') or '', '^([^|]*)|(.*)$')
if before and before ~= owner and ARGV[2] ~= '1' then return {'replaced'} end
redis.call('SET', prefix .. 'sleeper', owner .. '|' .. server)
local counts = {}
for i = 3, #ARGV do
  local used = redis.call('HGET', prefix .. 'used', ARGV[i])
  table.insert(counts, #entered_live(ARGV[i]))
  table.insert(counts, used and math.max(0, time_ms() - tonumber(used)) or -1)
end
return {writer == server and 'known' or 'lost', redis.call('HGETALL', prefix .. 'asleep'), counts}
