-- ARGV: model, the devices of its copies (none: unplaced). Sets the placement, moves the model's
-- waiting requests and returns the number of those that moved. If a copy is new, requests on
-- devices that keep theirs are distributed again, too, unless requests are held.
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
  if not had[ARGV[i]] then joined = not is_held() end
end

-- Gathered requests leave the load, so that `choose` sees only those already distributed.
local waiting = {}
local function gather(source)
  local from = '-'
  repeat
    local page = redis.call('XRANGE', queue_key(source), from, '+', 'COUNT', PAGE)
    for _, item in ipairs(page) do
      local id = item[2][2]
      if item[2][4] == model then
        local record = open_read(id)
        local counts = record and record.entry == item[1] and not record.running
        if counts then count(source, model, -1) end
        table.insert(waiting, {source = source, entry = item[1], counts = counts,
          ms = tonumber(string.match(item[1], '^%d+')), place = #waiting})
      end
      from = '(' .. item[1]
    end
  until #page < PAGE
end

for _, device in ipairs(before) do
  if joined or not stays[device] then gather(device) end
end
-- An agent may have handed requests back while the placement still named its device.
if #ARGV > 1 and not is_held() then gather(UNPLACED) end
table.sort(waiting, function(a, b) return a.ms < b.ms or a.ms == b.ms and a.place < b.place end)

local moved, left = 0, {}
for _, each in ipairs(waiting) do
  local source, target = each.source, target_of(model)
  if each.counts then count(source, model, 1) end
  if target ~= source then
    move_waiting(source, each.entry, waiting_entry(source, each.entry), target)
    moved, left[source] = moved + 1, true
  end
end
-- Agents that keep a copy know these requests and must read their queues again.
for source in pairs(left) do
  if stays[source] then redis.call('XADD', left_key(source), 'MAXLEN', 1, '*', 'model', model) end
end
return moved
