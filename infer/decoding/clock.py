"""Presentation times of frames, corrected: decoders return frames in the order of presentation."""

from fractions import Fraction

import av

_TS_DISCONT = 0x0200
"""Flag in `container.format.flags`: times may restart within such a file."""
NO_TIMESTAMPS = 0x0080
"""A stream without a container: its times are ffmpeg's guesses."""
_JUMP_SECONDS = 10.0
"""Seconds; a longer gap between two frames of such a file is a restart of time, as in ffmpeg."""
_BACK_SECONDS = 1.0
"""Seconds; a time this far before the last one is a restart."""


class Clock:
    """Times of consecutive frames, in ticks, strictly increasing."""

    def __init__(self, format: av.ContainerFormat, time_base: Fraction, fps: float) -> None:
        self.is_regular = True
        """Whether all times were the file's own, so that seeking works."""
        self._may_jump = bool(format.flags & _TS_DISCONT)
        self._has_no_times = bool(format.flags & NO_TIMESTAMPS)
        self._has_decoding_times = format.name == "avi"  # which has no others
        self._step = max(1, round(1 / (fps * time_base)))
        self._back, self._jump = _BACK_SECONDS / time_base, _JUMP_SECONDS / time_base
        self._last: int | None = None
        self._offset = 0
        self._num_wrong = {"pts": 0, "dts": 0}
        self._before: dict[str, int] = {}

    def __call__(self, frame: av.VideoFrame) -> int:
        stated, last = self._stated(frame), self._last
        step = frame.duration or self._step
        if stated is None:
            time = 0 if last is None else last + step
            self.is_regular = False
        else:
            time = stated + self._offset
            if last is not None and (last - time > self._back or (self._may_jump and time - last > self._jump)):
                self._offset += last + step - time
                time = last + step
            elif last is not None and time <= last:
                time = last + step
            self.is_regular = self.is_regular and time == stated
        self._last = time
        return time

    def _stated(self, frame: av.VideoFrame) -> int | None:
        """The file's time: decoding times are used if presentation times run backwards more often."""
        if self._has_no_times:
            return None
        if self._has_decoding_times and frame.dts is not None:
            return frame.dts
        for name, time in (("pts", frame.pts), ("dts", frame.dts)):
            if time is not None:
                self._num_wrong[name] += name in self._before and time <= self._before[name]
                self._before[name] = time
        if frame.pts is not None and (frame.dts is None or self._num_wrong["pts"] <= self._num_wrong["dts"]):
            return frame.pts
        return frame.dts
