-- Sends the requests of a file in turn, each a line of path, tab, body; prints what was counted as one line of JSON.
local requests = {}
local last = 0

function init(arguments)
    wrk.method = "POST"
    wrk.headers["content-type"] = "application/json"
    for line in io.lines(arguments[1]) do
        local path, body = line:match("^(.-)\t(.*)$")
        requests[#requests + 1] = wrk.format(nil, path, nil, body)
    end
end

function request()
    last = last % #requests + 1
    return requests[last]
end

function done(summary, latency)
    local errors = summary.errors
    io.write(string.format(
        '\n{"requests":%d,"seconds":%.6f,"failed":%d,"p50_ms":%.4f,"p90_ms":%.4f,"p99_ms":%.4f,"longest_ms":%.4f}\n',
        summary.requests, summary.duration / 1e6,
        errors.connect + errors.read + errors.write + errors.status + errors.timeout,
        latency:percentile(50) / 1e3, latency:percentile(90) / 1e3, latency:percentile(99) / 1e3, latency.max / 1e3))
end
