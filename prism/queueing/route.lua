-- ARGV: model, device ('' for nowhere). Returns how many waiting requests moved.
local PAGE = 256
local model, device = ARGV[1], ARGV[2]
local before = target_of(model)
if device == '' then
  redis.call('HDEL', prefix .. 'placement', model)
else
  redis.call('HSET', prefix .. 'placement', model, device)
end
local target = target_of(model)

local function move_all(source)
  local moved, from = 0, '-'
  repeat
    local page = redis.call('XRANGE', queue_key(source), from, '+', 'COUNT', PAGE)
    for _, item in ipairs(page) do
      local fields = item[2]
      if fields[4] == model then
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
if before ~= target then moved = moved + move_all(before) end
-- An agent may have handed requests back while the placement still named its device.
if target ~= UNPLACED and before ~= UNPLACED then moved = moved + move_all(UNPLACED) end
return moved
