-- Compare-and-replace: see `RedisStore.replace`, and codec.py for how a session is laid out.
-- KEYS: the session, its state. ARGV: its revision from now on, which nothing else has; all that comes after the run;
-- milliseconds to live, the position up to which it is what it was, then what it may be at: revisions, or revisions with
-- the stamp behind, or "" for no session. A state of a later position than that is forgotten.
-- 1: done, now or by this very call before. false: there is no such session. Else the session as it is.
local held = redis.call('GET', KEYS[1])
local at = held and string.sub(held, 1, 8) .. string.sub(held, 16, 23) or ''
if string.sub(at, 1, 8) == ARGV[1] then
    return 1
end
for index = 5, #ARGV do
    local mark = ARGV[index]
    if mark == string.sub(at, 1, #mark) and (mark ~= '' or not held) then
        local run = struct.pack('>I4', redis.call('LASTSAVE'))
        redis.call('SET', KEYS[1], ARGV[1] .. run .. ARGV[2], 'PX', ARGV[3])
        local state = redis.call('GETRANGE', KEYS[2], 0, 7)
        if #state == 8 and struct.unpack('>I8', state) <= tonumber(ARGV[4]) then
            redis.call('PEXPIRE', KEYS[2], ARGV[3])
        else
            redis.call('DEL', KEYS[2])
        end
        return 1
    end
end
return held
