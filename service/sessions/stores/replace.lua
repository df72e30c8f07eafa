-- Compare-and-replace: see `RedisStore.replace`, and codec.py for the format of a session.
-- KEYS: the keys of the session and of its state. ARGV: the session's new, unique revision; the new session's bytes
-- after the field `run`; the time to live in milliseconds; the position up to which the session stays unchanged; then
-- the marks (`codec.mark`) of which the session must have one. The mark "" stands for a session that does not exist. A
-- state at a position after the unchanged part is deleted.
-- Returns 1 if this call replaced the session, now or when it was sent before. Returns false if the session does not
-- exist, and otherwise the current session.
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
