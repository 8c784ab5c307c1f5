-- ARGV: owner, URL of an external server, its sleep. Returns 1 if no live frontend has entered a
-- request; from then on requests that enter see the sleep.
if not is_sleeper(ARGV[1]) or #entered_live(ARGV[2]) > 0 then return 0 end
redis.call('DEL', entered_key(ARGV[2]))  -- those of dead frontends
redis.call('HSET', prefix .. 'asleep', ARGV[2], ARGV[3])
return 1
