"""`megadit generate` under the name that users of NeMo and DFM know: `python -m megadit.infer.inference_dit_model`."""

from megadit.infer.generate.command import main

if __name__ == "__main__":
    raise SystemExit(main())
