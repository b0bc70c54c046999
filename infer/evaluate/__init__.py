"""Quality of videos: metrics with confidence intervals, and the protocol of each."""
