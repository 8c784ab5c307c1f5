-- ARGV: id, model, attempt, body. Returns the queue's name.
local id, model, attempt, body = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local record = open_read(id)
if record then
  if tonumber(record.attempt) >= tonumber(attempt) then return record.device end
  take_out(id, record)
end
local device = target_of(model)
add_waiting(device, id, model, attempt, body)
return device
