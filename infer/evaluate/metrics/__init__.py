"""Metrics of an evaluation: functions of features, and their confidence intervals."""
