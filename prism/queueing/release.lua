-- ARGV: device, owner, epoch. Deletes the lease, unless another owner or epoch has it.
if redis.call('GET', lease_key(ARGV[1])) == ARGV[2] .. '|' .. ARGV[3] then
  redis.call('DEL', lease_key(ARGV[1]))
end
return 0
