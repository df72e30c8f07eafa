-- The session, milliseconds that it has to live, and its state, as they are at one moment. KEYS: the session, its state.
return { redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1]), redis.call('GET', KEYS[2]) }
