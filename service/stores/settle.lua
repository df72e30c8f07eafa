-- Gives an owner's sessions the time that they have left, and forgets those that have none.
--
-- KEYS[1] the owner's sessions    ARGV session, what PTTL says of it, and so on
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
for at = 1, #ARGV, 2 do
    local left = tonumber(ARGV[at + 1])
    if left < 0 then
        redis.call('ZREM', KEYS[1], ARGV[at])
    else
        redis.call('ZADD', KEYS[1], 'XX', now + left + 1, ARGV[at])
    end
end
return 1
