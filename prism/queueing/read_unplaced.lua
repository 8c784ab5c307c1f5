-- ARGV: an entry's id, number of entries, devices. Returns the size of the unplaced queue, entries
-- after that id, and the number of requests that wait or run on each device. From now on requests
-- are held.
redis.call('SET', held_key(), 1)
local open = {}
for i = 3, #ARGV do
  local running = redis.call('HLEN', running_key(ARGV[i]))
  table.insert(open, running + redis.call('XLEN', queue_key(ARGV[i])))
end
local after = '(' .. ARGV[1]
return {redis.call('XLEN', queue_key(UNPLACED)),
  redis.call('XRANGE', queue_key(UNPLACED), after, '+', 'COUNT', ARGV[2]), open}
