-- ARGV: frontend, ttl in ms, a random value. Returns the incarnation of the data: the value that
-- was written by the first heartbeat which found none.
redis.call('SET', prefix .. 'frontend:' .. ARGV[1], '1', 'PX', ARGV[2])
redis.call('SADD', prefix .. 'frontends', ARGV[1])
redis.call('SET', prefix .. 'incarnation', ARGV[3], 'NX')
return redis.call('GET', prefix .. 'incarnation')
