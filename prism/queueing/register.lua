-- ARGV: device, epoch, then id, model, attempt and body of each request that runs here. Records
-- requests as running that are unknown or wait in any queue. Those that run, or are newer, stay.
local device, epoch = ARGV[1], ARGV[2]
local lost = lease_lost(device, epoch)
if lost then return lost end
for i = 3, #ARGV, 4 do
  local id, model, attempt, body = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local record = open_read(id)
  local known = record and tonumber(record.attempt) or 0
  if known < tonumber(attempt) or (known == tonumber(attempt) and not record.running) then
    if record then take_out(id, record) end
    redis.call('HSET', running_key(device), id, body)
    open_write(id, attempt, '=', device, model)
  end
end
return 0
