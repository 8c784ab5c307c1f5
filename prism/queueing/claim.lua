-- ARGV: key, frontend, fingerprint, ttl in ms. Who computes the answer: {'answered', answer},
-- {'open', its fingerprint} while another frontend that lives does, or {'mine', ''}: from now on.
local key, me, fingerprint, ttl_ms = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local answer = redis.call('GET', answer_key(key))
if answer then return {'answered', answer} end
for _, frontend in ipairs(redis.call('SMEMBERS', prefix .. 'frontends')) do
  if frontend ~= me and redis.call('EXISTS', prefix .. 'frontend:' .. frontend) == 1 then
    local claimed = redis.call('HGET', claims_key(frontend), key)
    if claimed then return {'open', claimed} end
  end
end
redis.call('HSET', claims_key(me), key, fingerprint)
redis.call('PEXPIRE', claims_key(me), ttl_ms)
return {'mine', ''}
