"""User programs: a content filter (`--guardrail_dir`) and a scorer of videos (`--scorer_dir`)."""
