"""What the gateway keeps: jobs, keys, quotas and rates in a database, and the videos."""
