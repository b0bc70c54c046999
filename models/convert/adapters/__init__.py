"""Adapter files of PEFT, diffusers, Kohya and ComfyUI: reading, writing and checks."""
