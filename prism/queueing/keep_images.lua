-- ARGV: ttl in ms, limit in bytes, an image's tensors or '', digests. Keeps these images for the
-- ttl from now. Tensors are stored under the only digest, unless it is known or all images would
-- exceed the limit. Returns the digests of images that are not stored.
local ttl_ms, bytes_max, body = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local due, held = prefix .. 'images', prefix .. 'images_bytes'
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local until_ms = string.format('%.0f', now_ms + ttl_ms)

for _, member in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', string.format('%.0f', now_ms))) do
  local digest, size = string.match(member, '^(.*)|(%d+)$')
  redis.call('ZREM', due, member)
  if digest then
    redis.call('DECRBY', held, size)
    redis.call('UNLINK', image_key(digest))
  end
end
if redis.call('EXISTS', due) == 0 then redis.call('DEL', held) end

local function fits() return tonumber(redis.call('GET', held) or '0') + #body <= bytes_max end

local missing = {}
for i = 4, #ARGV do
  local key = image_key(ARGV[i])
  local size = redis.call('STRLEN', key)
  if size == 0 and body ~= '' and fits() then
    redis.call('SET', key, body)
    size = #body
  end
  if size == 0 then
    table.insert(missing, ARGV[i])
  else
    redis.call('PEXPIRE', key, ttl_ms)
    local added = redis.call('ZADD', due, until_ms, string.format('%s|%d', ARGV[i], size))
    if added == 1 then redis.call('INCRBY', held, size) end
  end
end
redis.call('PEXPIRE', due, ttl_ms)
redis.call('PEXPIRE', held, ttl_ms)
return missing
