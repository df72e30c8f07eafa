-- Counts a session among its owner's, if there are fewer than so many, or it is one of them already: 1. Else the first
-- of those whose time has come, unless they were used since; none where there are none.
--
-- KEYS[1] the owner's sessions    ARGV session, how many there may be, time to live in milliseconds
local at_once = 256
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then
    if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[2]) then
        return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, at_once)
    end
end
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[3]), ARGV[1])
return 1
