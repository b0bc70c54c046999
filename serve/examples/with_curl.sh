#!/usr/bin/env bash
# A video with curl, over HTTP alone. usage: with_curl.sh [HOST:PORT] [PROMPT]
set -euo pipefail
url=${1:-localhost:8000} prompt=${2:-a red seven moving left}
body=$(python3 -c 'import json, sys; print(json.dumps({"prompt": sys.argv[1], "seed": 7}))' "$prompt")
curl --silent --no-buffer "http://$url/v2/models/text_to_video/generate_stream" --data "$body" |
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
