-- ARGV: key's name, requests and tokens per minute (0: unlimited), requests and tokens to take
-- (below 0: to give back), and 1 to take them even if they are not there. Two token buckets of a
-- minute's size each, whose level may be negative. Returns 0, or the milliseconds to wait.
local key = prefix .. 'limit:' .. ARGV[1]
local rates = {tonumber(ARGV[2]), tonumber(ARGV[3])}
local costs, spent = {tonumber(ARGV[4]), tonumber(ARGV[5])}, ARGV[6] == '1'
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local known = redis.call('HMGET', key, 'requests', 'tokens', 'ms')
local passed_ms = math.max(0, now_ms - (tonumber(known[3]) or now_ms))
local left, wait_ms, owed_ms = {}, 0, 0
for i = 1, 2 do
  local rate = rates[i]
  if rate > 0 then
    left[i] = math.min(rate, (tonumber(known[i]) or rate) + passed_ms * rate / 60000)
    local missing = math.min(costs[i], rate) - left[i]
    if missing > 0 then wait_ms = math.max(wait_ms, math.ceil(missing * 60000 / rate)) end
  else
    left[i], costs[i] = 0, 0
  end
end
if spent then wait_ms = 0 end
for i = 1, 2 do
  if wait_ms == 0 then left[i] = left[i] - costs[i] end
  if left[i] < 0 then owed_ms = math.max(owed_ms, -left[i] * 60000 / rates[i]) end
end
redis.call('HSET', key, 'requests', left[1], 'tokens', left[2], 'ms', now_ms)
redis.call('PEXPIRE', key, math.ceil(60000 + owed_ms))
return wait_ms
