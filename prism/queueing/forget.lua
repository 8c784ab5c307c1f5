-- ARGV: pairs of request id and attempt. Removes these and older attempts if they wait, and returns
-- their ids. A newer attempt stays.
local dropped = {}
for i = 1, #ARGV, 2 do
  local id = ARGV[i]
  local record = open_read(id)
  if record and not record.running and tonumber(record.attempt) <= tonumber(ARGV[i + 1]) then
    take_out(id, record)
    open_drop(id, record)
    table.insert(dropped, id)
  end
end
return dropped
