-- Counts a session against its owner's quota, and returns 1, if the owner has fewer sessions than the quota or if the
-- session is already counted. Otherwise returns the first sessions whose expiry time has passed or is uncertain, each
-- with its score.
--
-- Before that, updates the expiry times of the sessions that the caller looked up, and removes those that have expired.
-- A session whose score has changed since the look-up is skipped, because it may have been created again.
--
-- KEYS: the set of the owner's sessions, with their expiry times as scores. ARGV: the session, the quota, the time to
-- live in milliseconds; then, for each session that the caller looked up: the session, its score before the look-up,
-- and its remaining time in milliseconds (negative: expired).
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
