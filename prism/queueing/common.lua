-- Prefix of every script. KEYS[1]: the namespace's prefix, with its colon.
-- Scripts build their keys from it, so they need a single server, not a Redis cluster.
--
-- queue:<device>     stream of waiting requests: id, model, attempt, body
-- left:<device>      stream of one entry, a new one when waiting requests went to another copy
-- running:<device>   hash request id -> body
-- admitted:<device>  hash entry id -> request id, of running requests
-- open               hash id -> "attempt|place|device|model"; place is the stream entry's id while
--                    waiting and "=" .. the entry's id while running
-- load               hash device|model -> number of requests that wait or run there
-- placement          hash model -> devices of its copies, separated by '|'
-- held               set while requests wait in UNPLACED, whatever the placement of their model,
--                    until the cluster scheduler moves each to a device (bind.lua)
-- begun:<model>|<beginning>  the copy that got the last prompt with this beginning; expires
-- lease:<device>     "owner|epoch"; expires
-- epoch:<device>     the last epoch given out
-- frontend:<id>      heartbeat: the frontend's state; expires
-- frontends          set of frontends that sent a heartbeat, less those found dead
-- incarnation        random value; a new one means that the data may be lost or old
-- server             run id of the server with this incarnation
-- acquired:<device>  run id of the server that gave the lease out
-- claims:<frontend>  hash key -> fingerprint of the request it computes; void without a heartbeat
-- answer:<key>       stored answer; expires
-- answers            list of the keys of stored answers, oldest first
-- answers_bytes      size of all stored answers
-- image:<digest>     tensors of an image of open requests; expires
-- images             sorted set of "digest|size" of stored images, by the time they expire (ms)
-- images_bytes       size of all stored images
-- limit:<key>        rest of an API key's rates: requests, tokens, and the time of the count (ms)
-- entered:<server>   set of "frontend|number": requests that an external server may have
-- asleep             hash external server's URL -> its sleep; not of servers that are awake
-- used               hash external server's URL -> when a request last entered or left it (ms)
-- sleeper            "owner|run id of the server", of the scheduler that writes `asleep`
-- malformed          stream of entries whose body is not a request
local prefix = KEYS[1]
local UNPLACED = 'unplaced'

local function queue_key(device) return prefix .. 'queue:' .. device end
local function left_key(device) return prefix .. 'left:' .. device end
local function running_key(device) return prefix .. 'running:' .. device end
local function admitted_key(device) return prefix .. 'admitted:' .. device end
local function lease_key(device) return prefix .. 'lease:' .. device end
local function claims_key(frontend) return prefix .. 'claims:' .. frontend end
local function answer_key(key) return prefix .. 'answer:' .. key end
local function image_key(digest) return prefix .. 'image:' .. digest end
local function held_key() return prefix .. 'held' end
local function epoch_key(device) return prefix .. 'epoch:' .. device end

local function entered_key(url) return prefix .. 'entered:' .. url end
local function acquired_key(device) return prefix .. 'acquired:' .. device end

-- Changes with every start of the server: a new id means that the data may be older than before.
local function server_id()
  local info = redis.pcall('INFO', 'server')  -- a user may be denied it
  return type(info) == 'string' and string.match(info, 'run_id:(%w+)') or 'unknown'
end

local function devices_of(model)
  local found = {}
  local placed = redis.call('HGET', prefix .. 'placement', model)
  for device in string.gmatch(placed or '', '[^|]+') do table.insert(found, device) end
  return found
end

-- Returns the copy with the fewest waiting and running requests; or `preferred` if it is a copy and
-- has at most `slack` requests more.
local function choose(model, devices, preferred, slack)
  local best, least, preferred_open
  for _, device in ipairs(devices) do
    local open = tonumber(redis.call('HGET', prefix .. 'load', device .. '|' .. model) or '0')
    if not least or open < least then best, least = device, open end
    if device == preferred then preferred_open = open end
  end
  if preferred_open and preferred_open <= least + slack then return preferred end
  return best
end

local function is_held() return redis.call('EXISTS', held_key()) == 1 end

local function target_of(model)
  local devices = devices_of(model)
  if #devices == 0 or is_held() then return UNPLACED end
  return #devices == 1 and devices[1] or choose(model, devices)
end

-- Prefers the copy that got the last prompt with this beginning: it may be in its prefix cache.
local function target_of_prompt(model, beginning, slack, remembered_ms)
  local devices = devices_of(model)
  if beginning == '' or #devices < 2 or is_held() then return target_of(model) end
  local key = prefix .. 'begun:' .. model .. '|' .. beginning
  local target = choose(model, devices, redis.call('GET', key), slack)
  redis.call('SET', key, target, 'PX', remembered_ms)
  return target
end

local function open_read(id)
  local value = redis.call('HGET', prefix .. 'open', id)
  if not value then return nil end
  local attempt, mark, entry, device, model =
    string.match(value, '^(%d+)|(=?)([^|]*)|([^|]*)|(.*)$')
  return {attempt = attempt, running = mark == '=', entry = entry, device = device, model = model}
end

local function count(device, model, change)
  local now = redis.call('HINCRBY', prefix .. 'load', device .. '|' .. model, change)
  -- Requests that are older than the count.
  if now < 0 then redis.call('HSET', prefix .. 'load', device .. '|' .. model, 0) end
end

local function open_write(id, attempt, place, device, model)
  local before = open_read(id)
  if not before or before.device ~= device or before.model ~= model then
    if before then count(before.device, before.model, -1) end
    count(device, model, 1)
  end
  redis.call('HSET', prefix .. 'open', id, table.concat({attempt, place, device, model}, '|'))
end

local function open_drop(id, record)
  count(record.device, record.model, -1)
  redis.call('HDEL', prefix .. 'open', id)
end

local function add_waiting(device, id, model, attempt, body)
  local entry = redis.call('XADD', queue_key(device), '*',
    'id', id, 'model', model, 'attempt', attempt, 'body', body)
  open_write(id, attempt, entry, device, model)
end

-- Removes the request from the queue or from the running ones. Its `open` record stays.
local function take_out(id, record)
  if record.running then
    redis.call('HDEL', running_key(record.device), id)
    redis.call('HDEL', admitted_key(record.device), record.entry)
  else
    redis.call('XDEL', queue_key(record.device), record.entry)
  end
end

-- Returns the entry's fields id, model, attempt and body, or nil if it has left this queue.
local function waiting_entry(device, entry)
  local found = redis.call('XRANGE', queue_key(device), entry, entry)[1]
  if not found then return nil end
  local fields = found[2]
  return {id = fields[2], model = fields[4], attempt = fields[6], body = fields[8]}
end

local function move_waiting(source, entry, fields, target)
  redis.call('XDEL', queue_key(source), entry)
  add_waiting(target, fields.id, fields.model, fields.attempt, fields.body)
end

-- Removes a waiting entry. Returns its fields as stored, or nil if it has left this queue.
local function drop_entry(device, entry)
  local found = redis.call('XRANGE', queue_key(device), entry, entry)[1]
  if not found then return nil end
  redis.call('XDEL', queue_key(device), entry)
  local id = found[2][2]
  local record = open_read(id)
  if record and record.entry == entry then open_drop(id, record) end
  return found[2]
end

-- Returns an error if the epoch is not the last one. The fencing token is the epoch, not the lease:
-- a lease may expire unnoticed as long as no other agent acquires the queue.
local function lease_lost(device, epoch)
  if redis.call('GET', epoch_key(device)) == epoch then return nil end
  return redis.error_reply('LEASELOST the queue of ' .. device .. ' is no longer held with epoch '
    .. epoch)
end

-- Moves a running request to waiting, on device `wanted` if that has a copy, else at the model's
-- placement.
local function requeue_running(device, id, wanted)
  local body = redis.call('HGET', running_key(device), id)
  local record = open_read(id)
  if not body or not record then return 0 end
  take_out(id, record)
  local target = target_of(record.model)
  for _, copy in ipairs(devices_of(record.model)) do
    if copy == wanted then target = copy end
  end
  add_waiting(target, id, record.model, record.attempt, body)
  return 1
end

local function time_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function note_use(url)
  redis.call('HSET', prefix .. 'used', url, string.format('%.0f', time_ms()))
end

-- Returns the requests of live frontends that an external server may have.
local function entered_live(url)
  local found, lives = {}, {}
  for _, member in ipairs(redis.call('SMEMBERS', entered_key(url))) do
    local frontend = string.match(member, '^(.*)|') or ''
    if lives[frontend] == nil then
      lives[frontend] = redis.call('EXISTS', prefix .. 'frontend:' .. frontend) == 1
    end
    if lives[frontend] then table.insert(found, member) end
  end
  return found
end

-- Returns whether this scheduler writes `asleep`, to the server that it has looked at.
local function is_sleeper(owner)
  return redis.call('GET', prefix .. 'sleeper') == owner .. '|' .. server_id()
end
