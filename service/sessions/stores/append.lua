-- Compare-and-append for each session of a batch: see `RedisStore.append_many`, and codec.py for the format of a session.
-- KEYS: for each session, the keys of the session and of its state.
-- ARGV: 1 the time to live in milliseconds; then for each session: 1 the revision that the session must have; 2 its next
-- revision; 3 its next revision if Redis was restarted or saved to disk since the session's last change; 4 the session's
-- new head; 5 the tokens; 6 the number of bytes of the tail to keep (0: all); 7 the state ("": unchanged).
-- Returns a reply for each session. If this call appended the tokens, now or when it was sent before, the reply is 1 (at
-- the next revision) or 2 (at the other next revision). It is false if the session does not exist, an error if the
-- session's append failed, and otherwise the current session. It is also the current session if the session has another
-- format, or not the length that its head states: such a session is damaged.

-- The time of the last save to disk or, before the first save, of the start. A restart may lose acknowledged changes. The
-- next revision may then have been used before the restart, and must not be used again.
local run = struct.pack('>I4', redis.call('LASTSAVE'))
local ttl = ARGV[1]

local function append(key, state, before, after, other, about, tokens, keep, snapshot)
    local held = redis.call('GET', key)
    if not held then
        return false
    end
    if #held < 77 or string.byte(held, 13) ~= 2 then
        return held
    end
    local at = string.sub(held, 1, 8)
    local head = 77 + struct.unpack('>I2', held, 22)
    if #held ~= head + struct.unpack('>I4', held, 24) then
        return held
    end
    if at == after or at == other then
        if string.sub(held, 13, head) ~= about then
            return held
        end
        return at == after and 1 or 2
    end
    if at ~= before then
        return held
    end
    local done = string.sub(held, 9, 12) == run and 1 or 2
    local tail = string.sub(held, head + 1) .. tokens
    keep = tonumber(keep)
    if keep > 0 then
        tail = string.sub(tail, -keep)
    end
    local front = (done == 1 and after or other) .. run
    redis.call('SET', key, front .. about .. tail, 'PX', ttl)
    if snapshot ~= '' then
        redis.call('SET', state, snapshot, 'PX', ttl)
    else
        redis.call('PEXPIRE', state, ttl)
    end
    return done
end

local replies = {}
for row = 1, #KEYS / 2 do
    local at = 7 * row - 5
    local ok, reply = pcall(append, KEYS[2 * row - 1], KEYS[2 * row], unpack(ARGV, at, at + 6))
    if not ok then
        reply = type(reply) == 'table' and reply or redis.error_reply(tostring(reply))
    end
    replies[row] = reply
end
return replies
