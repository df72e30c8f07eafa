-- Returns the session, its time to live in milliseconds, and its state, atomically. KEYS: the keys of the session and of
-- its state.
return { redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1]), redis.call('GET', KEYS[2]) }
