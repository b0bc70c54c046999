"""The thread that writes one rank's files of a checkpoint."""

import threading

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megadit.train.checkpoints.writer import BackgroundWrite


def test_the_gpu_is_waited_for_by_the_thread_whose_current_device_it_is(tmp_path):
    called = {}

    def preload():
        called["preload"] = threading.current_thread()
        return b"on the host"

    def write(rank, content, queue):
        called["write"] = threading.current_thread()
        (tmp_path / f"__{rank}_0.distcp").write_bytes(content)

    request = AsyncRequest(write, (3, b"on the device", None), [], preload_fn=preload)
    sums = BackgroundWrite(request, tmp_path, prefix="__3_").finish()
    assert list(sums) == ["__3_0.distcp"] and (tmp_path / "__3_0.distcp").read_bytes() == b"on the host"
    assert called["preload"] is threading.current_thread() is not called["write"]


def test_a_rank_may_have_nothing_to_write(tmp_path):
    """As of the few tensors of an adapter on hundreds of ranks."""
    done = []
    assert BackgroundWrite(AsyncRequest(None, (), [lambda: done.append(True)]), tmp_path, prefix="__1_").finish() == {}
    assert done
