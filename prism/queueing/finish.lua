-- ARGV: device, epoch, request ids. Removes requests that ran here and ended. A newer attempt that
-- waits or runs elsewhere stays.
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
