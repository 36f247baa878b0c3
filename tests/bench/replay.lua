-- wrk posts the requests of a file in their order, then from the start again. One thread only.
local requests, sent = {}, 0

function init(arguments)
  local file = assert(io.open(arguments[1], "rb"))
  for line in file:lines() do
    requests[#requests + 1] = file:read(tonumber(line))
  end
  file:close()
end

function request()
  sent = sent + 1
  return requests[(sent - 1) % #requests + 1]
end

-- One line that is easy to read: counts, seconds, and latencies in milliseconds.
function done(summary, latency, rates)
  local errors = summary.errors
  print(string.format(
    "figures requests=%d seconds=%.3f not2xx=%d broken=%d p50=%.3f p99=%.3f max=%.3f",
    summary.requests, summary.duration / 1e6, errors.status,
    errors.connect + errors.read + errors.write + errors.timeout,
    latency:percentile(50) / 1000, latency:percentile(99) / 1000, latency.max / 1000))
end
