-- wrk script: posts one request for scores again and again, and counts every answer that is not a score.
--   wrk -t1 -c200 -d15s --latency -s docs/research/serving/score.lua http://127.0.0.1:8190
-- The body is read from the file named by the environment variable BODY (body.json); docs/serving.md says how to make it.

local file = assert(io.open(os.getenv("BODY") or "body.json", "rb"))
wrk.method = "POST"
wrk.path = "/v1/score"
wrk.headers["Content-Type"] = "application/json"
wrk.body = file:read("*a")
file:close()

local token = os.getenv("REWARD_TOKEN")
if token then
  wrk.headers["Authorization"] = "Bearer " .. token
end

local threads = {}

function setup(thread)
  table.insert(threads, thread)
end

function init(args)
  answered, refused, failed = 0, 0, 0
end

function response(status, headers, body)
  answered = answered + 1
  if status ~= 200 then
    refused = refused + 1
  elseif body:find('"value": null', 1, true) then
    failed = failed + 1
  end
end

function done(summary, latency, requests)
  local total, bad, null = 0, 0, 0
  for _, thread in ipairs(threads) do
    total = total + thread:get("answered")
    bad = bad + thread:get("refused")
    null = null + thread:get("failed")
  end
  local errors = summary.errors
  print(string.format("answers %d, not 200: %d, failed items: %d", total, bad, null))
  print(string.format("lost: connect %d, read %d, write %d, timeout %d", errors.connect, errors.read, errors.write, errors.timeout))
  print(string.format("requests/s %.0f", summary.requests / (summary.duration / 1e6)))
  for _, percent in ipairs({ 50, 90, 99, 99.9, 100 }) do
    local value = percent == 100 and latency.max or latency:percentile(percent)
    print(string.format("latency %5.1f %%  %.0f ms", percent, value / 1000))
  end
end
