-- ARGV: URL of an external server, "frontend|number" of a request that ended.
note_use(ARGV[1])
return redis.call('SREM', entered_key(ARGV[1]), ARGV[2])
