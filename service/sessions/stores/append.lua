-- Compare-and-append: see `RedisStore.append`, and codec.py for the format of a session.
-- KEYS: the session, its state. ARGV: the revision that it must be at, the next revision, the alternative revision if
-- Redis was restarted since the last change; the session's new head, the tokens, the bytes of the tail to keep
-- (0: all), milliseconds to live, the state ("": unchanged).
-- Returns 1 (at the next revision) or 2 (at the alternative one) if this call appended, now or when it was sent before;
-- false if the session does not exist; else the current session.
local held = redis.call('GET', KEYS[1])
if not held then
    return false
end
local at = string.sub(held, 1, 8)
local head = 14 + struct.unpack('>I2', held, 13)
if at == ARGV[2] or at == ARGV[3] then
    if string.sub(held, 15, head) ~= ARGV[4] then
        return held
    end
    return at == ARGV[2] and 1 or 2
end
if at ~= ARGV[1] then
    return held
end
-- The time of the last save to disk, or of the start. After a restart Redis may have lost acknowledged changes. Then
-- the next revision may have been used before, and must not be used again.
local run = struct.pack('>I4', redis.call('LASTSAVE'))
local done = string.sub(held, 9, 12) == run and 1 or 2
local tail = string.sub(held, head + 1) .. ARGV[5]
local keep = tonumber(ARGV[6])
if keep > 0 then
    tail = string.sub(tail, -keep)
end
local front = ARGV[1 + done] .. run .. struct.pack('>I2', #ARGV[4])
redis.call('SET', KEYS[1], front .. ARGV[4] .. tail, 'PX', ARGV[7])
if ARGV[8] ~= '' then
    redis.call('SET', KEYS[2], ARGV[8], 'PX', ARGV[7])
else
    redis.call('PEXPIRE', KEYS[2], ARGV[7])
end
return done
