-- Joined in front of every script. KEYS[1]: the namespace's prefix, with its colon.
-- Keys are built from it here, so these scripts need one server, not a Redis cluster.
--
-- queue:<device>     stream of waiting requests: id, model, attempt, body
-- left:<device>      stream of one entry, a new one when waiting requests went to another copy
-- running:<device>   hash id -> body;   admitted:<device>  hash entry id -> id, its inverse
-- open               hash id -> "attempt|place|device|model"; place is the stream entry's id while
--                    waiting and "=" .. the entry's id while running
-- load               hash device|model -> requests that wait or run there
-- placement          hash model -> devices of its copies, with '|' between them
-- begun:<model>|<beginning>  the copy that got the last prompt with this beginning, for a while
-- lease:<device>     "owner|epoch" with a time to live;   epoch:<device>  the last one given out
-- frontend:<id>      a heartbeat with a time to live
-- frontends          set of those whose heartbeat has ever come, less those found dead
-- incarnation        a random value: another one than before means that the data may be lost or old
-- server             run id of the server that has this incarnation
-- acquired:<device>  run id of the server that gave its lease out
-- claims:<frontend>  hash key -> fingerprint, of answers it computes; void without its heartbeat
-- answer:<key>       what was answered, for a while;   answers, answers_bytes: which, their size
-- limit:<key>        what is left of an API key's rates: requests, tokens, and when that was (ms)
-- malformed          stream of entries whose body is no request
local prefix = KEYS[1]
local UNPLACED = 'unplaced'

local function queue_key(device) return prefix .. 'queue:' .. device end
local function left_key(device) return prefix .. 'left:' .. device end
local function running_key(device) return prefix .. 'running:' .. device end
local function admitted_key(device) return prefix .. 'admitted:' .. device end
local function lease_key(device) return prefix .. 'lease:' .. device end
local function claims_key(frontend) return prefix .. 'claims:' .. frontend end
local function answer_key(key) return prefix .. 'answer:' .. key end
local function epoch_key(device) return prefix .. 'epoch:' .. device end

local function acquired_key(device) return prefix .. 'acquired:' .. device end

-- A server that was started again, or another one, may have older data than before.
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

-- Of several copies the one with the least expected wait: fewest of its requests wait or run. The
-- second one where that has `slack` more at most, and is a copy.
local function choose(model, devices, second, slack)
  local best, least, there
  for _, device in ipairs(devices) do
    local open = tonumber(redis.call('HGET', prefix .. 'load', device .. '|' .. model) or '0')
    if not least or open < least then best, least = device, open end
    if device == second then there = open end
  end
  if there and there <= least + slack then return second end
  return best
end

local function target_of(model)
  local devices = devices_of(model)
  if #devices < 2 then return devices[1] or UNPLACED end
  return choose(model, devices)
end

-- The copy that had a prompt with this beginning before may have it in its cache.
local function target_of_prompt(model, beginning, slack, remembered_ms)
  local devices = devices_of(model)
  if beginning == '' or #devices < 2 then return target_of(model) end
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
  -- Requests that were there before anybody counted.
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

-- Takes the request out of wherever it is; its `open` record stays.
local function take_out(id, record)
  if record.running then
    redis.call('HDEL', running_key(record.device), id)
    redis.call('HDEL', admitted_key(record.device), record.entry)
  else
    redis.call('XDEL', queue_key(record.device), record.entry)
  end
end

-- The entry's fields id, model, attempt, body, or nil when it has left this queue.
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

-- Takes a waiting entry out for good; returns its fields as they are, or nil when it has left.
local function drop_entry(device, entry)
  local found = redis.call('XRANGE', queue_key(device), entry, entry)[1]
  if not found then return nil end
  redis.call('XDEL', queue_key(device), entry)
  local id = found[2][2]
  local record = open_read(id)
  if record and record.entry == entry then open_drop(id, record) end
  return found[2]
end

-- The fencing token is the epoch, not the lease: a lease that ran out while nobody else took the
-- queue does no harm.
local function lease_lost(device, epoch)
  if redis.call('GET', epoch_key(device)) == epoch then return nil end
  return redis.error_reply('LEASELOST the queue of ' .. device .. ' is no longer held with epoch '
    .. epoch)
end

-- To `wanted`, if a copy is there.
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
