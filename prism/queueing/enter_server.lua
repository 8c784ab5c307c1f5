-- ARGV: URL of an external server, "frontend|number" of a request. Records that the request may be
-- sent from now on. Returns the server's sleep, or '' if it is awake: only then it may be.
note_use(ARGV[1])
redis.call('SADD', entered_key(ARGV[1]), ARGV[2])
return redis.call('HGET', prefix .. 'asleep', ARGV[1]) or ''
