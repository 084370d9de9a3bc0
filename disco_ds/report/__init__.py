"""The report of runs: one page, from their folders alone."""
