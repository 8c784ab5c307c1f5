-- ARGV: owner, URL of an external server, its sleep, or '' if it is awake. Returns 0 if another
-- scheduler is the owner.
if not is_sleeper(ARGV[1]) then return 0 end
if ARGV[3] == '' then
  redis.call('HDEL', prefix .. 'asleep', ARGV[2])
else
  redis.call('HSET', prefix .. 'asleep', ARGV[2], ARGV[3])
end
return 1
