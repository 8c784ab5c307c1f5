-- ARGV: id, model, attempt, body of each request. Returns the queues' names.
local queues = {}
for i = 1, #ARGV, 4 do
  local id, model, attempt, body = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local record = open_read(id)
  local device
  if record and tonumber(record.attempt) >= tonumber(attempt) then
    device = record.device
  else
    if record then take_out(id, record) end
    device = target_of(model)
    add_waiting(device, id, model, attempt, body)
  end
  table.insert(queues, device)
end
return queues
