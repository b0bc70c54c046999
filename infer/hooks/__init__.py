"""Programs of the user's own: a content filter (`--guardrail_dir`) and a scorer of videos."""
