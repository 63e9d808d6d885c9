"""Contract suites and fakes for tests, both for our own code and for third-party launchers, knobs and trackers."""
