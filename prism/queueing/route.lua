-- ARGV: model, the devices of its copies (none: nowhere). Returns how many waiting requests moved.
-- Those on devices that stay move too where a copy is new: all copies share what waits.
local PAGE = 256
local model = ARGV[1]
local before = devices_of(model)
if #ARGV == 1 then
  redis.call('HDEL', prefix .. 'placement', model)
else
  redis.call('HSET', prefix .. 'placement', model, table.concat(ARGV, '|', 2))
end
local had, stays, joined = {}, {}, false
for _, device in ipairs(before) do had[device] = true end
for i = 2, #ARGV do
  stays[ARGV[i]] = true
  if not had[ARGV[i]] then joined = true end
end

local function move_all(source)
  local moved, from = 0, '-'
  repeat
    local page = redis.call('XRANGE', queue_key(source), from, '+', 'COUNT', PAGE)
    for _, item in ipairs(page) do
      local fields = item[2]
      local target = fields[4] == model and target_of(model) or source
      if target ~= source then
        move_waiting(source, item[1],
          {id = fields[2], model = model, attempt = fields[6], body = fields[8]}, target)
        moved = moved + 1
      end
      from = '(' .. item[1]
    end
  until #page < PAGE
  return moved
end

local moved = 0
for _, device in ipairs(before) do
  if joined or not stays[device] then moved = moved + move_all(device) end
end
-- An agent may have handed requests back while the placement still named its device.
if #ARGV > 1 then moved = moved + move_all(UNPLACED) end
return moved
