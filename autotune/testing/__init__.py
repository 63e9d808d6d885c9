"""Contract suites and fakes for tests, both our own and those of third-party launchers, knobs and trackers."""
