-- ARGV: device, epoch, entry ids. Moves entries from waiting to running and returns the ids of
-- those that run now. They include entries admitted by an earlier call, so that a call whose answer
-- was lost can be repeated.
local device, epoch = ARGV[1], ARGV[2]
local lost = lease_lost(device, epoch)
if lost then return lost end
local admitted = {}
for i = 3, #ARGV do
  local entry = ARGV[i]
  local fields = waiting_entry(device, entry)
  if fields then
    redis.call('HSET', running_key(device), fields.id, fields.body)
    redis.call('HSET', admitted_key(device), entry, fields.id)
    redis.call('XDEL', queue_key(device), entry)
    open_write(fields.id, fields.attempt, '=' .. entry, device, fields.model)
  end
  if fields or redis.call('HEXISTS', admitted_key(device), entry) == 1 then
    table.insert(admitted, entry)
  end
end
return admitted
