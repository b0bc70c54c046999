"""State of the gateway: jobs, keys, quotas and rates in a database, and the videos."""
