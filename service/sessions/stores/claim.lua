-- Counts a session among its owner's and returns 1, if the owner is below its quota or the session is counted already.
-- Else returns the first sessions whose time has come or is in doubt, each with its score.
--
-- Before that, sessions that the caller looked up get their remaining time, or are removed if they have expired. A
-- session whose score has changed is skipped, because it may have been created since.
--
-- KEYS[1] the owner's sessions    ARGV session, quota, time to live in milliseconds; then for each session that the
-- caller looked up: session, its earlier score, its PTTL
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
