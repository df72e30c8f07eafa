-- Compare-and-append: see `RedisStore.append`, and codec.py for the format of a session.
-- KEYS: the keys of the session and of its state.
-- ARGV: 1 the revision that the session must have; 2 its next revision; 3 its next revision if Redis was restarted or
-- saved to disk since the session's last change; 4 the session's new head; 5 the tokens; 6 the number of bytes of the
-- tail to keep (0: all); 7 the time to live in milliseconds; 8 the state ("": unchanged).
-- If this call appended the tokens, now or when it was sent before, returns 1 (at the revision ARGV[2]) or 2 (at the
-- revision ARGV[3]). Returns false if the session does not exist, and otherwise the current session.
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
-- The time of the last save to disk or, before the first save, of the start. A restart may lose acknowledged changes.
-- The next revision may then have been used before the restart, and must not be used again.
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
