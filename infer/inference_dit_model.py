"""`megadit generate` under its name in NeMo and DFM: `python -m megadit.infer.inference_dit_model`."""

from megadit.infer.generate.command import main

if __name__ == "__main__":
    raise SystemExit(main())
