-- ARGV: request ids. Returns those that were waiting and are gone now.
local dropped = {}
for _, id in ipairs(ARGV) do
  local record = open_read(id)
  if record and not record.running then
    take_out(id, record)
    redis.call('HDEL', prefix .. 'open', id)
    table.insert(dropped, id)
  end
end
return dropped
