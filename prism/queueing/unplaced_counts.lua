-- Returns model, count, model, count, ... of the unplaced queue, without transferring bodies.
local counts, flat = {}, {}
for _, item in ipairs(redis.call('XRANGE', queue_key(UNPLACED), '-', '+')) do
  local model = item[2][4]
  counts[model] = (counts[model] or 0) + 1
end
for model, count in pairs(counts) do
  table.insert(flat, model)
  table.insert(flat, count)
end
return flat
