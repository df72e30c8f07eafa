-- Counts a session among its owner's, if there are fewer than the most, or it is one of them already: 1. Else the first
-- of those whose time has come or is in doubt, each with its score; none where there are none.
--
-- Before that, those that were looked at are given the time that they have left, or are forgotten if they have none:
-- but not one whose score is another by now, for it may have been made since.
--
-- KEYS[1] the owner's sessions    ARGV session, how many there may be, time to live in milliseconds; then of each that
-- was looked at: session, its score before, what PTTL says of it
local at_once = 256
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
for at = 4, #ARGV, 3 do
    local score = redis.call('ZSCORE', KEYS[1], ARGV[at])
    if score and tonumber(score) == tonumber(ARGV[at + 1]) then
        local left = tonumber(ARGV[at + 2])
        if left < 0 then
            redis.call('ZREM', KEYS[1], ARGV[at])
        else
            redis.call('ZADD', KEYS[1], now + left + 1, ARGV[at])
        end
    end
end
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then
    if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[2]) then
        return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'WITHSCORES', 'LIMIT', 0, at_once)
    end
end
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[3]), ARGV[1])
return 1
