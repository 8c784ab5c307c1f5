-- ARGV: keys of the namespace. Deletes keys whose type is not that of common.lua, and values that
-- no script could have written. Returns the names of the damaged keys.
local HASHES = {running = 1, admitted = 1, open = 1, load = 1, placement = 1, claims = 1, limit = 1,
  asleep = 1, used = 1}
local STREAMS = {queue = 1, left = 1, malformed = 1}
local STRINGS = {'begun', 'lease', 'epoch', 'frontend', 'incarnation', 'server', 'acquired',
  'answer', 'answers_bytes', 'held', 'image', 'images_bytes', 'status', 'writable', 'sleeper'}
local TYPES = {frontends = 'set', answers = 'list', images = 'zset', entered = 'set'}
for kind in pairs(HASHES) do TYPES[kind] = 'hash' end
for kind in pairs(STREAMS) do TYPES[kind] = 'stream' end
for _, kind in ipairs(STRINGS) do TYPES[kind] = 'string' end
local time = redis.call('TIME')
local tomorrow_ms = (tonumber(time[1]) + 86400) * 1000

local function is_count(text) return string.match(text, '^%-?%d+$') and #text <= 16 end

local function is_amount(text)
  local number = tonumber(text)
  return number and number > -1e15 and number < 1e15
end

local function is_open(text)
  local attempt, mark, entry = string.match(text, '^(%d+)|(=?)([^|]*)|[^|]*|')
  if not attempt or #attempt > 9 then return false end
  return string.match(entry, '^%d+%-%d+$') or (mark == '=' and entry == '')
end

local function is_request(fields)
  return #fields == 8 and fields[1] == 'id' and fields[3] == 'model' and fields[5] == 'attempt'
    and fields[7] == 'body' and is_count(fields[6])
end

local IS_VALUE = {open = is_open, load = is_count, limit = is_amount, used = is_count}
local IS_STRING = {epoch = is_count, answers_bytes = is_count, images_bytes = is_count}

local function repair_hash(key, is_value)
  local flat, found = redis.call('HGETALL', key), false
  for i = 1, #flat, 2 do
    if not is_value(flat[i + 1]) then
      redis.call('HDEL', key, flat[i])
      found = true
    end
  end
  return found
end

-- A stream whose last id is in the future may reject new entries, so it is deleted.
local function repair_stream(key, kind)
  local info = redis.call('XINFO', 'STREAM', key)
  for i = 1, #info, 2 do
    local ms = info[i] == 'last-generated-id' and string.match(info[i + 1], '^%d+')
    if ms and tonumber(ms) > tomorrow_ms then
      redis.call('DEL', key)
      return true
    end
  end
  local found = false
  for _, item in ipairs(kind == 'queue' and redis.call('XRANGE', key, '-', '+') or {}) do
    if not is_request(item[2]) then
      redis.call('XDEL', key, item[1])
      found = true
    end
  end
  return found
end

-- Returns whether the key was damaged.
local function repair(key)
  local kind = string.match(string.sub(key, #prefix + 1), '^[^:]*')
  local found = redis.call('TYPE', key).ok
  if not TYPES[kind] or found == 'none' then return false end
  local wrong = found ~= TYPES[kind]
  if not wrong and IS_STRING[kind] then wrong = not IS_STRING[kind](redis.call('GET', key)) end
  if wrong then return redis.call('DEL', key) end
  if IS_VALUE[kind] then return repair_hash(key, IS_VALUE[kind]) end
  return STREAMS[kind] and repair_stream(key, kind)
end

local damaged = {}
for _, key in ipairs(ARGV) do
  if repair(key) then table.insert(damaged, key) end
end
return damaged
