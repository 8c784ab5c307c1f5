-- ARGV: frontend, ttl in ms, a random value, the frontend's state. Returns the incarnation of the
-- data: the random value of the first heartbeat that this server got.
redis.call('SET', prefix .. 'frontend:' .. ARGV[1], ARGV[4], 'PX', ARGV[2])
redis.call('SADD', prefix .. 'frontends', ARGV[1])
local server = server_id()
if redis.call('GET', prefix .. 'server') ~= server then
  redis.call('SET', prefix .. 'server', server)
  redis.call('DEL', prefix .. 'incarnation')
end
redis.call('SET', prefix .. 'incarnation', ARGV[3], 'NX')
return redis.call('GET', prefix .. 'incarnation')
