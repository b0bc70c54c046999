"""What a run reports: metrics, trackers, curves, the console, anomalies, and the watchdog."""
