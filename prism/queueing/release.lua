-- ARGV: device, owner, epoch. A lease that is somebody else's by now is left alone.
if redis.call('GET', lease_key(ARGV[1])) == ARGV[2] .. '|' .. ARGV[3] then
  redis.call('DEL', lease_key(ARGV[1]))
end
return 0
