-- ARGV: key, frontend, fingerprint, ttl in ms. Returns {'answered', answer}; or {'open',
-- fingerprint} while another live frontend computes the answer; or {'mine', ''} if the key is now
-- claimed by this frontend.
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
