#!/usr/bin/env bash
# A video with curl, over HTTP alone. usage: with_curl.sh [HOST:PORT] [PROMPT] [FIRST_FRAME] [ADAPTER:SCALE]
set -euo pipefail
url=${1:-localhost:8000} prompt=${2:-a red seven moving left} image=${3:-} adapter=${4:-}
python3 -c '
import base64, json, sys
body = {"prompt": sys.argv[1], "seed": 7}
if sys.argv[2]:
    body["image"] = "data:;base64," + base64.b64encode(open(sys.argv[2], "rb").read()).decode()
if sys.argv[3]:
    body["adapters"] = [sys.argv[3]]
print(json.dumps(body))
' "$prompt" "$image" "$adapter" |
curl --silent --no-buffer "http://$url/v2/models/text_to_video/generate_stream" --data @- |
python3 -c '
import json, sys
for line in sys.stdin:
    if line.startswith("data:"):
        answer = json.loads(line[len("data:"):])
        event = json.loads(answer["event"])
        if event["type"] == "progress":
            print("step", event["step"], "of", event["num_steps"])
        else:
            open("video.mp4", "wb").write(bytes(answer["data"]))
            print("video.mp4: seed", event["seed"])
'
