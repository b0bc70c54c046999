"""Reports of a run: metrics, trackers, curves, the console, anomalies, and the watchdog."""
