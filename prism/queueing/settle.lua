-- ARGV: key, frontend, answer or '', ttl in ms. Removes the frontend's claim and stores the answer,
-- unless the key has one. Beyond a number or a size of answers, the oldest are removed.
local COUNT_MAX, BYTES_MAX = 10000, 64 * 1024 * 1024
local key, me, answer, ttl_ms = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
redis.call('HDEL', claims_key(me), key)
if answer == '' or redis.call('EXISTS', answer_key(key)) == 1 then return 0 end
local order, held = prefix .. 'answers', prefix .. 'answers_bytes'
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

-- Removes the oldest answer if it expires by then. Returns whether it did.
local function remove_oldest(expired_by_ms)
  local first = redis.call('LINDEX', order, 0)
  local name, size, until_ms = string.match(first or '', '^(.*)|(%d+)|(%d+)$')
  if not first or name and tonumber(until_ms) > expired_by_ms then return false end
  redis.call('LPOP', order)
  if not name then return true end
  redis.call('DECRBY', held, size)
  redis.call('DEL', answer_key(name))
  return true
end

while remove_oldest(now_ms) do end
redis.call('SET', answer_key(key), answer, 'PX', ttl_ms)
redis.call('RPUSH', order, string.format('%s|%d|%.0f', key, #answer, now_ms + ttl_ms))
redis.call('INCRBY', held, #answer)
local function is_full()
  return redis.call('LLEN', order) > COUNT_MAX or tonumber(redis.call('GET', held)) > BYTES_MAX
end
while is_full() and remove_oldest(math.huge) do end
redis.call('PEXPIRE', order, ttl_ms)
redis.call('PEXPIRE', held, ttl_ms)
return 0
