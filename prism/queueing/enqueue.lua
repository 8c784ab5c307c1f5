-- ARGV: slack, time to live of `begun` keys (ms); then id, model, attempt, body and the prompt's
-- beginning of each request. Returns the name of each request's queue.
local slack, remembered_ms = tonumber(ARGV[1]), ARGV[2]
local queues = {}
for i = 3, #ARGV, 5 do
  local id, model, attempt, body, beginning = unpack(ARGV, i, i + 4)
  local record = open_read(id)
  local device
  if record and tonumber(record.attempt) >= tonumber(attempt) then
    device = record.device
  else
    if record then take_out(id, record) end
    device = target_of_prompt(model, beginning, slack, remembered_ms)
    add_waiting(device, id, model, attempt, body)
  end
  table.insert(queues, device)
end
return queues
