-- Compare-and-replace: see `RedisStore.replace`, and codec.py for the format of a session.
-- KEYS: the keys of the session and of its state. ARGV: the session's new, unique revision; the new session's bytes
-- after the field `run`; the time to live in milliseconds; the position up to which the session stays unchanged; the
-- revision that the session must have ("": the session must not exist); the session's state ("": none is given). An older
-- state at a position after the unchanged part is deleted.
-- Returns 1 if this call replaced the session, now or when it was sent before. Returns false if the session does not
-- exist, and otherwise the current session.
local held = redis.call('GET', KEYS[1])
local at = held and string.sub(held, 1, 8) or ''
if at == ARGV[1] then
    return 1
end
if at ~= ARGV[5] then
    return held
end
local run = struct.pack('>I4', redis.call('LASTSAVE'))
redis.call('SET', KEYS[1], ARGV[1] .. run .. ARGV[2], 'PX', ARGV[3])
local state = redis.call('GETRANGE', KEYS[2], 0, 7)
if ARGV[6] ~= '' then
    redis.call('SET', KEYS[2], ARGV[6], 'PX', ARGV[3])
elseif #state == 8 and struct.unpack('>I8', state) <= tonumber(ARGV[4]) then
    redis.call('PEXPIRE', KEYS[2], ARGV[3])
else
    redis.call('DEL', KEYS[2])
end
return 1
