-- ARGV: device, epoch, request ids. A request that is open elsewhere again (a newer attempt) stays.
local device, epoch = ARGV[1], ARGV[2]
local lost = lease_lost(device, epoch)
if lost then return lost end
for i = 3, #ARGV do
  local id = ARGV[i]
  local record = open_read(id)
  if record and record.running and record.device == device then
    take_out(id, record)
    open_drop(id, record)
  end
end
return 0
