"""Requests a video with only NVIDIA's client and numpy; copy this file anywhere.

pip install 'tritonclient[grpc]' numpy
python with_tritonclient.py localhost:8001 "a red seven moving left" [first_frame.png] [adapter:0.8]
"""

import json
import queue
import sys
from pathlib import Path

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput


def tensor(name: str, value, kind: str, number_type) -> InferInput:
    """One value, with a batch axis."""
    made = InferInput(name, [1, 1], kind)
    made.set_data_from_numpy(np.array([[value]], dtype=number_type))
    return made


def main(
    url: str = "localhost:8001", prompt: str = "a red seven moving left", image: str = "", adapter: str = ""
) -> None:
    responses = queue.Queue()
    inputs = [
        tensor("prompt", prompt.encode(), "BYTES", np.object_),
        tensor("seed", 7, "INT64", np.int64),
        # NeMo's names work as well as guidance and num_steps
        tensor("unconditional_guidance_scale", 4.0, "FP32", np.float32),
        tensor("inference_steps", 10, "INT32", np.int32),
    ]
    if image:
        inputs.append(tensor("image", Path(image).read_bytes(), "BYTES", np.object_))
    if adapter:  # NAME:SCALE; a list, here of one
        inputs.append(tensor("adapters", adapter.encode(), "BYTES", np.object_))
    with InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: responses.put((result, error)))
        client.async_stream_infer("text_to_video", inputs, enable_empty_final_response=True)
        while True:
            result, error = responses.get()
            if error is not None:
                raise error
            response = result.get_response()
            if response.outputs:
                event = json.loads(result.as_numpy("event").item())
                if event["type"] == "progress":
                    print(f"step {event['step']} of {event['num_steps']}")
                else:
                    Path("video.mp4").write_bytes(result.as_numpy("data").tobytes())
                    print(f"video.mp4: seed {event['seed']}, {event['seconds']:.2f} s")
            if response.parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()


if __name__ == "__main__":
    main(*sys.argv[1:])
