"""Quality of videos: metrics with intervals, under a protocol that is written down."""
