"""The workloads of the recorded tables that searches are replayed on; see `record`."""
