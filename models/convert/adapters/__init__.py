"""Adapter files of PEFT, diffusers, Kohya and ComfyUI: read, written, checked and merged."""
